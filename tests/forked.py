"""Runs a script in a process forked from one that has imported torch already: 0.1 s, not 4."""

import multiprocessing
import os
import runpy
import sys
import time
from unittest import mock

from launch import REPO, without_gloo_lines

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torchvision", "tqdm"])
# The server's environment, and so its children's: one thread, and no network: a download fails at
# once.
SETTINGS = {"OMP_NUM_THREADS": "1"}
SETTINGS |= {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def as_main(script, arguments, folder, environment):
    """The child's part: the script as __main__ in folder, with its output in the files out, err."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.chdir(folder)
    os.environ |= environment
    sys.argv = [str(script), *map(str, arguments)]
    # A DataLoader's workers come from the script's own process: this one cannot reach the server.
    multiprocessing.set_start_method("fork", force=True)
    runpy.run_path(str(script), run_name="__main__")


def start(script, arguments, folder, environment):
    """Starts a script; returns its process."""
    folder.mkdir(parents=True)
    process = CONTEXT.Process(target=as_main, args=(script, arguments, folder, environment))
    with mock.patch.dict(os.environ, SETTINGS):
        process.start()
    return process


def end(processes, seconds):
    """Waits for processes; returns their exit status, None for what took longer and was killed."""
    deadline = time.monotonic() + seconds
    codes = []
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
        codes.append(process.exitcode)
    for process in processes:
        process.kill()
        process.join()
    return codes


def run_forked(script, arguments, folder, seconds=20):
    """Returns (exit status, stdout, stderr); the status is None when it took longer."""
    (code,) = end([start(REPO / script, arguments, folder, {})], seconds)
    return code, (folder / "out").read_text(), (folder / "err").read_text()


def run_forked_ranks(path, processes, port, folder, seconds=60):
    """Runs a file as torchrun would, with 0 processes as python; returns (statuses, out, err)."""
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["LOCAL_WORLD_SIZE"] = str(processes)
    ranks = [
        shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)
    ] or [{}]
    folders = [folder / str(rank) for rank in range(len(ranks))]
    started = [start(path, [], *both) for both in zip(folders, ranks, strict=True)]
    codes = end(started, seconds)
    out, err = ("".join((f / name).read_text() for f in folders) for name in ("out", "err"))
    return codes, without_gloo_lines(out), err
