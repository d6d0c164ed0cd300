"""Starts commands as a user would, reads what they print, and leaves nothing running."""

import ast
import contextlib
import multiprocessing
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import update_pages

REPO = Path(__file__).resolve().parents[1]
# A list, because a reader's own files may lie beside the scripts.
PLAIN = ("snsc.py", "snmc_dp.py")
DDP = ("mnmc_ddp_tcp.py", "mnmc_ddp_env.py", "mnmc_ddp_mp.py", "mnmc_ddp_slurm.py")
SCRIPTS = PLAIN + DDP

INIT = re.compile(
    r"^\[init\] rank (?P<rank>\d+)/(?P<world>\d+) \| local rank (?P<local>\d+) \| "
    r"(?P<device>\S+) \| (?P<backend>\S+) \| (?P<host>\S+)$",
    re.MULTILINE,
)
EPOCH = re.compile(
    r"^epoch (?P<epoch>\d+)/(?P<epochs>\d+) "
    r"\| train loss (?P<loss>[\d.]+|nan) acc (?P<train>[\d.]+)% "
    r"\| test acc (?P<test>[\d.]+)% \((?P<correct>\d+)/(?P<count>\d+)\) "
    r"\| (?P<speed>\d+) img/s \| (?P<seconds>[\d.]+) s$",
    re.MULTILINE,
)
# What torchrun says of itself in a good run: that it sets OMP_NUM_THREADS; and that it found no
# store at the end, where the torchrun of node 0, which has the store, ended first.
TORCHRUN_SAYS = re.compile(
    r"^W\d{4} .*torch/distributed/run\.py:\d+\].*\n?"
    r"|^\[W\S+ \S+ TCPStore\.cpp:\d+\] \[c10d\] recvValueWithTimeout failed .*\n(?:.+\n)*\n"
    r"|^E\d{4} .*/elastic/agent/server/api\.py:\d+\] Error waiting on exit barrier\..*\n"
    r"(?:E\d{4} .*/elastic/agent/server/api\.py:\d+\].*\n?)*",
    re.MULTILINE,
)


def without_gloo_lines(text):
    """What a program printed but for what gloo adds on torch 2.8, in two parts that can mix."""
    gloo = r"^.*(\[Gloo\] Rank|Expected number of connected peer ranks).*\n(\d*\n)*"
    return re.sub(gloo, "", text, flags=re.MULTILINE)


def quick_for(values, *quick):
    """Parameters of a test: the full run takes all values, the quick one those named."""
    return [v if v in quick else pytest.param(v, marks=pytest.mark.slow) for v in values]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def shape(line):
    """What of a printed line is the same on every machine: no numbers, no host, single spaces."""
    line = re.sub(r"(cpu|cuda:\d) \| (gloo|nccl) \| \S+$", "HOST", line)
    return re.sub(r"[\d.]+", "0", " ".join(line.split()))


# The waits below are written for two free cores; a machine may be slow, and shared by three tests.
PATIENCE = 4

# Launch replaces it by a new file in its folder: no port, which another run could take.
MEETING_POINT = "file:///the meeting point of this launch"


def marked_processes(mark):
    """The processes that run with this NAME=value in their environment, the oldest first."""
    name, value = mark.split("=")
    # What is asked for here stays readable in .info when the process has ended. environ is None for
    # a process of somebody else, and empty for a zombie.
    found = psutil.process_iter(["environ", "cmdline"])
    return [process for process in found if (process.info["environ"] or {}).get(name) == value]


def marked_pids(mark):
    return [process.pid for process in marked_processes(mark)]


class Launch:
    """One or more commands that run at the same time; their output goes to files in folder."""

    def __init__(self, commands, folder, env=None, cwd=REPO):
        folder.mkdir(parents=True, exist_ok=True)
        # torchrun's workers are in sessions of their own: this mark in the environment finds them.
        value = uuid.uuid4().hex
        self.mark = f"DDP_TEST_LAUNCH={value}"
        foreign = ("SLURM_", "TORCHELASTIC", "ENV_SH_")
        settings = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        settings["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{settings['PATH']}"
        # One thread each: launches run side by side, and more would only wait for one another.
        settings |= {"DDP_TEST_LAUNCH": value, "OMP_NUM_THREADS": "1"} | (env or {})
        meeting_point = f"file://{folder.resolve()}/{value}.meeting-point"
        self.commands = [
            [meeting_point if word == MEETING_POINT else str(word) for word in command]
            for command in commands
        ]
        self.processes, self.outputs = [], []
        options = {"cwd": cwd, "env": settings, "start_new_session": True}
        options["stdin"] = subprocess.DEVNULL
        for number, command in enumerate(self.commands):
            self.outputs.append([folder / f"{value}.{number}.{kind}" for kind in ("out", "err")])
            with self.outputs[-1][0].open("w") as out, self.outputs[-1][1].open("w") as err:
                process = subprocess.Popen(command, stdout=out, stderr=err, **options)
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        while pids := self.pids():  # again, for what a process has started meanwhile
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for process in self.processes:
            process.wait()

    def pids(self):
        """Process ids of all that this launch started and that still runs."""
        return marked_pids(self.mark)

    def pid_of(self, rank):
        """Process id of a rank, by its environment, its options, or the order of spawning."""
        commands = {}
        for process in marked_processes(self.mark):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                commands[process.pid] = " ".join([*process.cmdline(), ""])
                by_environment = process.info["environ"].get("RANK") == str(rank)
                if by_environment or f"--rank {rank} " in commands[process.pid]:
                    return process.pid
        if spawned := [pid for pid, command in commands.items() if "spawn_main" in command]:
            return spawned[rank]
        # A plain script, and its workers, which are younger and have its command line.
        alone = rank == 0 and len(set(commands.values())) == 1
        assert alone, f"no rank {rank} in {commands}\n{self.story()}"
        return next(iter(commands))

    def out_of(self, number):
        """What one of the commands printed, without the lines that gloo prints on torch 2.8."""
        return without_gloo_lines(self.outputs[number][0].read_text())

    @property
    def out(self):
        return "".join(map(self.out_of, range(len(self.outputs))))

    @property
    def err(self):
        return "".join(paths[1].read_text() for paths in self.outputs)

    @property
    def codes(self):
        return [process.returncode for process in self.processes]

    def story(self):
        """All commands with their output, for the message of a failure."""
        text = ""
        launches = zip(self.commands, self.processes, self.outputs, strict=True)
        for command, process, paths in launches:
            text += f"$ {' '.join(command)}\n(exit status {process.returncode})\n"
            text += "".join(f"--- {path.suffix[1:]}\n{path.read_text()}\n" for path in paths)
        return text

    def wait_for(self, condition, seconds, what):
        """Waits until condition() is true; fails with the output of all when it takes too long."""
        deadline = time.monotonic() + PATIENCE * seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited too long for {what}\n{self.story()}")
            time.sleep(0.05)  # between two looks
        return self

    def wait(self, seconds=120):
        """Waits until all commands have ended."""
        return self.wait_for(
            lambda: None not in [process.poll() for process in self.processes], seconds, "the end"
        )

    def succeeded(self, seconds=120):
        """Waits for the end and checks that every command exited with 0."""
        self.wait(seconds)
        assert self.codes == [0] * len(self.processes), self.story()
        return self

    def inits(self):
        """The [init] lines: (rank, world size, local rank, device, backend), sorted by rank."""
        return sorted(
            (int(m["rank"]), int(m["world"]), int(m["local"]), m["device"], m["backend"])
            for m in INIT.finditer(self.out)
        )

    def epochs(self):
        return read_epochs(self.out)

    def metrics(self):
        """What of the epoch lines does not depend on the machine's speed."""
        keys = ("epoch", "epochs", "loss", "train", "test", "correct", "count")
        return [tuple(line[key] for key in keys) for line in self.epochs()]

    def last_line(self):
        """The last line on standard error that the scripts wrote, or torch for them.

        What launchers add below it is left out: torchrun's page about the failure, the line of
        mp.spawn that says which worker failed, and srun's lines.
        """
        launcher = r"^[EW]\d{4} .*torch/(distributed/elastic|multiprocessing)/"
        text = re.split(launcher, self.err, maxsplit=1, flags=re.MULTILINE)[0]
        lines = [line for line in text.splitlines() if line.strip()]
        return next((line for line in reversed(lines) if not line.startswith("srun: ")), "")

    def own_err(self):
        """Standard error without what torchrun itself prints."""
        return TORCHRUN_SAYS.sub("", self.err).strip()


def commands_for(script, processes, *options):
    """The commands that start a script with that many processes on this machine."""
    path = REPO / script
    if script in PLAIN:
        assert processes == 1
        return [["python", path, *options]]
    if script == "mnmc_ddp_tcp.py":
        address = ["--init-method", MEETING_POINT, "--world-size", processes]
        return [["python", path, *address, "--rank", rank, *options] for rank in range(processes)]
    if script == "mnmc_ddp_mp.py":
        address = ["--init-method", MEETING_POINT]
        return [["python", path, "--nproc-per-node", processes, *address, *options]]
    return [["torchrun", "--standalone", "--nproc-per-node", processes, path, *options]]


def read_epochs(text):
    """The epoch lines as dictionaries of numbers."""
    lines = [match.groupdict() for match in EPOCH.finditer(text)]
    return [{key: float(value) for key, value in line.items()} for line in lines]


def docstring_commands(script):
    """The indented commands of a script's docstring, each as a list of words."""
    text = ast.get_docstring(ast.parse((REPO / script).read_text())).replace("\\\n", " ")
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line in lines]
    return [command for command in commands if command]


def page_blocks(page, section):
    blocks = update_pages.read_blocks((REPO / page).read_text())
    assert (found := [b for b in blocks if b.heading == section]), f"no {section} in {page}"
    return found


def page_commands(page, section):
    """The commands of a page's section that are marked as run, in one line each."""
    blocks = page_blocks(page, section)
    code = "".join(b.code for b in blocks if b.language == "bash" and b.mark.startswith("run"))
    return [" ".join(line.split()) for line in code.replace("\\\n", "").splitlines()]


def page_output(page, section):
    """What a page's section shows as printed: its blocks of text."""
    return [block.code for block in page_blocks(page, section) if block.language == "text"]


# A forked process starts a script in 0.1 s, not 4, because its server has imported torch.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["torch", "torchvision", "tqdm"])
# The server's environment, and so its children's. Without a network a download fails at once.
FORKED_SETTINGS = {"OMP_NUM_THREADS": "1"}
FORKED_SETTINGS |= {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def run_as_main(script, arguments, folder, environment):
    """The child's part: the script as __main__ in folder, with its output in the files out, err."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.chdir(folder)
    os.environ |= environment
    sys.argv = [str(script), *map(str, arguments)]
    # A DataLoader's workers come from the script's own process: this one cannot reach the server.
    multiprocessing.set_start_method("fork", force=True)
    runpy.run_path(str(script), run_name="__main__")


def start_forked(script, arguments, folder, environment):
    folder.mkdir(parents=True)
    process = FORKSERVER.Process(target=run_as_main, args=(script, arguments, folder, environment))
    with mock.patch.dict(os.environ, FORKED_SETTINGS):
        process.start()
    return process


def end_forked(processes, seconds):
    """Waits for processes; returns their exit status, None for what took longer and was killed."""
    deadline = time.monotonic() + PATIENCE * seconds
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def run_forked(script, arguments, folder, seconds=20):
    """Returns (exit status, stdout, stderr); the status is None when it took longer."""
    (code,) = end_forked([start_forked(REPO / script, arguments, folder, {})], seconds)
    return code, without_gloo_lines((folder / "out").read_text()), (folder / "err").read_text()


def run_forked_ranks(path, processes, folder, arguments=(), seconds=60):
    """Runs a file as torchrun would, with 0 processes as python; returns (statuses, out, err)."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    ranks = [shared | dict.fromkeys(("RANK", "LOCAL_RANK"), str(r)) for r in range(processes)]
    folders = [folder / str(rank) for rank in range(processes or 1)]
    started = [
        start_forked(path, arguments, f, env) for f, env in zip(folders, ranks or [{}], strict=True)
    ]
    codes = end_forked(started, seconds)
    out, err = ("".join((f / name).read_text() for f in folders) for name in ("out", "err"))
    return codes, without_gloo_lines(out), err


def assert_same(path, other):
    """Compares two checkpoints in all that they hold, to the bit."""
    found, expected = (torch.load(file, weights_only=True) for file in (path, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
