"""Runs a script in a process forked from one that has imported torch already: 0.1 s, not 4."""

import multiprocessing
import os
import runpy
import sys
from unittest import mock

from launch import REPO

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torchvision", "tqdm"])
# The server's environment, and so its children's: what the scripts set before they import torch,
# and no network: a download fails at once.
SETTINGS = {"TORCH_CPP_LOG_LEVEL": "FATAL", "OMP_NUM_THREADS": "1"}
SETTINGS |= {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def as_main(script, words, folder):
    """The child's part: the script as __main__ in folder, with its output in the files out, err."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.chdir(folder)
    sys.argv = [script, *map(str, words)]
    runpy.run_path(str(REPO / script), run_name="__main__")


def run_forked(script, words, folder, seconds=20):
    """Returns (exit status, stdout, stderr); the status is None when it took longer."""
    folder.mkdir()
    process = CONTEXT.Process(target=as_main, args=(script, words, folder))
    with mock.patch.dict(os.environ, SETTINGS):
        process.start()
    process.join(seconds)
    code = process.exitcode
    process.kill()
    process.join()
    return code, (folder / "out").read_text(), (folder / "err").read_text()
