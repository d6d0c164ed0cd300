"""The tool that says which rank hangs: on notes made here, and on runs that hang on purpose."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import patches
import pytest
import torch
import update_pages
import who_hangs
from forked import end, run_forked, start
from launch import REPO, Launch, commands_for, free_port, gave_up, page_commands
from test_slurm import Cluster

FOLDER, PIDS = page_commands("docs/troubleshooting.md", "Who hangs?")  # two commands
EXAMPLE = REPO / "docs" / "examples" / "watch.py"
HERE = os.uname().nodename
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
FRAMES = {
    "sum": ("train", 20, "dist.all_reduce(totals)  # all wait"),
    "test": ("test", 30, "for images in loader:"),
    "join": ("main", 5, "dist.init_process_group()"),
}
AT = {
    "sum": "        at train, my.py:20: dist.all_reduce(totals)\n",
    "test": "        at test, my.py:30: for images in loader:\n",
    "join": "        at main, my.py:5: dist.init_process_group()\n",
}


def call(
    number, name="all_reduce", size=(3,), kind="Float", ended=True, group="0", since=60, by="gloo"
):
    """An entry of the flight recorder, as gloo makes it; since: seconds before its note."""
    sizes, kinds = ([], []) if name == "barrier" else ([list(size)], [kind])
    return {
        "collective_seq_id": number,
        "profiling_name": f"{by}:{name}",
        "input_sizes": sizes,
        "input_dtypes": kinds,
        "output_sizes": sizes,
        "output_dtypes": kinds,
        "process_group": [group, "default_pg"],
        "time_created_ns": -since * 1e9,
        "retired": ended,
        "state": "scheduled",
        "is_p2p": False,
    }


def write(folder, rank, calls, frame="sum", age=0, **others):
    """Writes the note of a rank on another machine, as the lines on the page do."""
    function, line, code = FRAMES[frame]
    inner = "init_process_group" if frame == "join" else "wrapper"
    stack = [
        [f"{folder}/my.py", 40, "<module>", "main()"],
        [f"{folder}/my.py", line, function, code],
        ["/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", 1, inner, "work.wait()"],
    ]
    note = {"rank": rank, "world_size": 3, "host": "elsewhere", "pid": 1, "running": True}
    note |= {"time": time.time() - age, "stack": stack}
    dated = [c | {"time_created_ns": note["time"] * 1e9 + c["time_created_ns"]} for c in calls]
    libraries = {entry["profiling_name"].partition(":")[0] for entry in dated} or {"gloo"}
    note["recorder"] = [
        json.dumps({"entries": [e for e in dated if e["profiling_name"].startswith(f"{by}:")]})
        for by in sorted(libraries)
    ]
    (folder / "who_hangs").mkdir(exist_ok=True)
    (folder / "who_hangs" / f"{rank}.json").write_text(json.dumps(note | others))


def ask(folder, command=FOLDER, path=PATH, status=0):
    """What a command of the page prints; its message where it ends with another status."""
    command = command.replace("python scripts", f"{sys.executable} {REPO}/scripts")
    argv = [shutil.which("bash"), "-c", command]
    run = subprocess.run(argv, text=True, cwd=folder, env={"PATH": path}, capture_output=True)
    assert run.returncode == status, run.stderr
    return run.stderr if status else run.stdout


def waiting(number, *what, by="gloo", **others):
    """A rank's calls when it waits in the last of them."""
    before = call(number - 1, "broadcast", (16,), by=by)
    return [before, call(number, *what, ended=False, by=by, **others)]


def two_wait(folder, **others):
    """Ranks 0 and 2 wait in collective 7."""
    for rank in (0, 2):
        write(folder, rank, waiting(7), **others)


SEVEN = "collective 7: all_reduce (3 floats), for 60 s\n    ranks 0 and 2 wait in it\n" + AT["sum"]
LAST = "the last one was collective 6, broadcast (16 floats)\n"


def test_rank_in_other_code(tmp_path):
    two_wait(tmp_path)
    write(tmp_path, 1, waiting(7)[:1], "test")
    assert ask(tmp_path) == f"{SEVEN}    rank 1 has not called it: {LAST}{AT['test']}"


def test_rank_that_called_nothing(tmp_path):
    two_wait(tmp_path)
    write(tmp_path, 1, [], "test")
    assert ask(tmp_path) == f"{SEVEN}    rank 1 has called no collective\n{AT['test']}"


@pytest.fixture
def process():
    """A process that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as process:
        yield process
        process.kill()


def test_stopped_rank_without_py_spy(tmp_path, process):
    """Its last note can be from before the others' last collectives."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    two_wait(tmp_path)
    write(tmp_path, 1, waiting(3), "test", age=30, host=HERE, pid=process.pid)
    expected = f"    rank 1 is stopped: process {process.pid} on {HERE} goes on after kill -CONT "
    expected += f"{process.pid}\n        30 s earlier {AT['test'].strip()}\n"
    assert ask(tmp_path, path="/nowhere") == SEVEN + expected


def test_dead_rank(tmp_path, process):
    process.kill()
    process.wait()
    two_wait(tmp_path)
    write(tmp_path, 1, waiting(3), "test", age=4, host=HERE, pid=process.pid)
    expected = f"    rank 1 is dead: process {process.pid} on {HERE} is gone, and wrote no last "
    expected += f"note\n        4 s earlier {AT['test'].strip()}\n"
    assert ask(tmp_path) == SEVEN + expected


def test_silent_rank_on_another_machine(tmp_path):
    two_wait(tmp_path)
    write(tmp_path, 1, waiting(3), "test", age=30, pid=4711)
    expected = "    rank 1 has written no note for 30 s: look at process 4711 on elsewhere\n"
    assert ask(tmp_path) == f"{SEVEN}{expected}        30 s earlier {AT['test'].strip()}\n"


def test_rank_without_a_note(tmp_path):
    two_wait(tmp_path)
    expected = "    rank 1 has written no note: it was not started, or did not come to the lines\n"
    assert ask(tmp_path) == SEVEN + expected


def test_rank_that_left(tmp_path):
    two_wait(tmp_path)
    write(tmp_path, 1, [], age=50, running=False)
    expected = "    rank 1 has left the script: its output says whether it failed\n"
    assert ask(tmp_path) == SEVEN + expected


def test_other_collective(tmp_path):
    two_wait(tmp_path)
    write(tmp_path, 1, waiting(7, "barrier"), "test")
    assert ask(tmp_path) == (
        "collective 7: not the same on all ranks, for 60 s\n"
        f"    ranks 0 and 2 wait in all_reduce (3 floats)\n{AT['sum']}"
        f"    rank 1 waits in barrier\n{AT['test']}"
    )


def test_other_shapes_of_which_one_rank_noticed_nothing(tmp_path):
    """gloo lets the rank with the smaller tensor go on, with wrong numbers."""
    two_wait(tmp_path)
    calls = [call(7, size=(2, 4), kind="Long"), call(8, "barrier", ended=False, since=59)]
    write(tmp_path, 1, calls, "test")
    assert ask(tmp_path) == (
        "collective 7: not the same on all ranks, for 60 s\n"
        f"    ranks 0 and 2 wait in all_reduce (3 floats)\n{AT['sum']}"
        f"    rank 1 has called all_reduce (2 x 4 longs) and gone on\n{AT['test']}"
    )


def test_the_first_difference_counts(tmp_path):
    """Not the later collective in which the ranks wait."""
    for rank in range(3):
        first = call(5, "all_reduce", (3 + (rank == 1),))
        write(tmp_path, rank, [first, *waiting(7)])
    assert ask(tmp_path) == (
        "collective 5: not the same on all ranks, for 60 s\n"
        f"    ranks 0 and 2 have called all_reduce (3 floats) and gone on\n{AT['sum']}"
        f"    rank 1 has called all_reduce (4 floats) and gone on\n{AT['sum']}"
    )


@pytest.mark.parametrize("name", ("gather", "scatter", "all_to_all"))
def test_collectives_whose_shapes_may_differ(tmp_path, name):
    for rank in range(3):
        calls = [call(5, name, (3 + rank,)), call(6, "broadcast", (16,))]
        write(tmp_path, rank, calls + ([call(7, ended=False)] if rank != 1 else []))
    assert ask(tmp_path).startswith(SEVEN)


def test_all_wait_for_a_rank_that_never_joined(tmp_path):
    two_wait(tmp_path, frame="join", recorder=['{"entries": []}'])
    title = "init_process_group: it ends when all ranks have called it\n"
    title += f"    ranks 0 and 2 wait in it\n{AT['join']}"
    expected = "    rank 1 has written no note: it was not started, or did not come to the lines\n"
    assert ask(tmp_path) == title + expected
    write(tmp_path, 1, [], "test")
    assert ask(tmp_path) == f"{title}    rank 1 has not called it\n{AT['test']}"


def test_all_have_finished(tmp_path):
    for rank in range(3):
        write(tmp_path, rank, [], running=False, age=1000)
    assert ask(tmp_path) == "all 3 ranks have left the script\n"


NOTHING = "no rank has waited in a collective for more than 12 s\n"


def test_running_job(tmp_path):
    """A short wait is no hang."""
    for rank in range(2):
        write(tmp_path, rank, waiting(7, since=3))
    write(tmp_path, 2, waiting(7)[:1], "test")
    expected = f"    ranks 0 and 1 are {AT['sum'].strip()}\n    rank 2 is {AT['test'].strip()}\n"
    assert ask(tmp_path) == NOTHING + expected


def test_job_that_is_over(tmp_path, process):
    """No process is left: the notes say how it ended, and that they are old."""
    process.kill()
    process.wait()
    two_wait(tmp_path, age=100, host=HERE, pid=process.pid)
    write(tmp_path, 1, waiting(7)[:1], "test", age=98, host=HERE, pid=process.pid)
    age, _, report = ask(tmp_path).partition("\n")
    assert re.fullmatch(r"the newest note is \d+ s old", age)
    report = re.sub(r"for \d+ s", "for 60 s", report)
    assert report == f"{SEVEN}    rank 1 has not called it: {LAST}{AT['test']}"


def test_process_group_of_some_ranks(tmp_path):
    """Rank 2 is in none of its collectives."""
    write(tmp_path, 0, waiting(7, group="3"))
    write(tmp_path, 1, [call(6, "broadcast", (16,), group="3")], "test")
    write(tmp_path, 2, [call(80)])
    assert ask(tmp_path) == (
        "collective 7 of process group 3: all_reduce (3 floats), for 60 s\n"
        f"    rank 0 waits in it\n{AT['sum']}"
        f"    rank 1 has not called it: {LAST}{AT['test']}"
        f"    rank 2 has called no collective of process group 3\n{AT['sum']}"
    )


def test_calls_of_gloo_and_nccl_in_one_process_group(tmp_path):
    """gloo and nccl count apart, and share the process group of all ranks."""
    for rank in range(3):
        calls = [call(7, "broadcast", (9,)), *([] if rank == 1 else waiting(7, by="nccl2"))]
        write(tmp_path, rank, calls, "test" if rank == 1 else "sum")
    assert ask(tmp_path) == (
        "collective 7 of nccl: all_reduce (3 floats), for 60 s\n"
        f"    ranks 0 and 2 wait in it\n{AT['sum']}"
        f"    rank 1 has called no collective of nccl\n{AT['test']}"
    )


def test_two_process_groups_in_another_order(tmp_path):
    """Rank 0 waits in the first for rank 1, which waits in the second for rank 0."""
    write(tmp_path, 0, waiting(7, group="1"), world_size=2)
    write(tmp_path, 1, [call(6, group="1"), call(4, ended=False, group="2")], "test", world_size=2)
    assert ask(tmp_path) == (
        "collective 7 of process group 1: all_reduce (3 floats), for 60 s\n"
        f"    rank 0 waits in it\n{AT['sum']}"
        "    rank 1 has not called it: it waits in collective 4 of process group 2, "
        f"all_reduce (3 floats)\n{AT['test']}"
    )


def test_all_calls_in_the_own_code(tmp_path):
    """The innermost comes first."""
    two_wait(tmp_path)
    write(tmp_path, 1, waiting(7)[:1], "test")
    main = "        at <module>, my.py:40: main()\n"
    expected = SEVEN + main + f"    rank 1 has not called it: {LAST}{AT['test']}{main}"
    assert ask(tmp_path, f"{FOLDER} --stacks") == expected


def test_many_ranks_and_an_older_run_of_more(tmp_path):
    for rank in range(64):
        calls = [] if rank in (8, 60) else waiting(7)
        write(tmp_path, rank, calls, "test" if rank in (8, 60) else "sum", world_size=64)
    write(tmp_path, 64, waiting(5), age=1000, world_size=65)
    report = ask(tmp_path)
    assert "    ranks 0 to 7, 9 to 59 and 61 to 63 wait in it\n" in report
    assert "    ranks 8 and 60 have called no collective\n" in report


# torch's own hook, which records nccl2's collectives, on a backend that needs no GPU.
HOOKED = """
import sys
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FlightRecorderHook
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
hook = FlightRecorderHook.attach(dist.group.WORLD, [0, 1])
dist.all_reduce(torch.ones(3))
dist.barrier()
# The lines to copy ask for nccl2's entries, and here for those of this backend.
names = {"__name__": "watch"}
exec(open(sys.argv[1]).read().replace('"nccl2"', '"fake"'), names)
print(names["read_recorders"]()[-1].replace("fake:", "nccl2:"))
"""
HAS_NCCL2 = hasattr(torch._C._distributed_c10d, "_dump_fr_trace_file")  # torch 2.15


def test_lines_to_copy_read_a_recorder_of_each_library(tmp_path):
    """gloo's, that of the old nccl where torch was built with it, and since torch 2.15 nccl2's."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import json, runpy\nnames = runpy.run_path({str(EXAMPLE)!r}, run_name='watch')\n"
        "print([sorted(json.loads(text)) for text in names['read_recorders']()])\n"
    )
    code, out, err = run_forked(program, [], tmp_path / "run", 60)
    assert code == 0, err
    libraries = 1 + hasattr(torch._C._distributed_c10d, "_dump_nccl_trace_json") + HAS_NCCL2
    assert out.count("'version'") == libraries, out


# An older torch does not write such entries.
if HAS_NCCL2:

    def test_entries_that_torch_writes_for_nccl2(tmp_path):
        """Rank 0 waits in the barrier, rank 1 in a copy to the CPU; a completed call is retired."""
        (tmp_path / "hooked.py").write_text(HOOKED)
        code, out, err = run_forked(tmp_path / "hooked.py", [EXAMPLE], tmp_path / "run", 60)
        assert code == 0, err
        trace = json.loads(out)
        reduce, barrier = trace["entries"]
        assert reduce.keys() >= call(1).keys()
        for entry in trace["entries"]:
            entry["time_created_ns"] = (time.time() - 60) * 1e9
        reduce |= {"retired": True, "state": "completed"}
        barrier |= {"retired": False, "state": "scheduled"}
        for rank in range(2):
            entries = trace["entries"][: 2 - rank]
            recorder = [json.dumps(trace | {"entries": part}) for part in ([], entries)]
            write(tmp_path, rank, [], "test" if rank else "sum", world_size=2, recorder=recorder)
        assert ask(tmp_path) == (
            f"collective 2 of nccl: barrier, for 60 s\n    rank 0 waits in it\n{AT['sum']}"
            "    rank 1 has not called it: the last one was collective 1, all_reduce (3 floats)\n"
            f"{AT['test']}"
        )


def test_note_of_an_earlier_version_of_the_lines(tmp_path):
    """Its recorder is gloo's text, and no list."""
    for rank in range(3):
        write(tmp_path, rank, waiting(7))
        path = tmp_path / "who_hangs" / f"{rank}.json"
        note = json.loads(path.read_text())
        path.write_text(json.dumps(note | {"recorder": note["recorder"][0]}))
    assert ask(tmp_path).startswith(
        "collective 7: all_reduce (3 floats), for 60 s\n    ranks 0 to 2"
    )


needs_py_spy = pytest.mark.skipif(not shutil.which("py-spy", path=PATH), reason="no py-spy")
LOADS = """
import subprocess, sys, time

def load():
    print("loads", flush=True)
    time.sleep(1000)

if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, __file__])
load()
"""


NOWHERE = "is not among these processes: not started, or on another machine"


@needs_py_spy
@pytest.mark.parametrize("launcher", ("torchrun", "srun", "by hand"))
def test_running_processes(launch, tmp_path, launcher):
    """Among them a launcher, a rank's helper, and a rank that is stopped."""
    script = tmp_path / "loads.py"
    script.write_text(LOADS)
    slurms = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    names = slurms if launcher == "srun" else ("RANK", "WORLD_SIZE")
    ranks = [["env", "SLURM_NTASKS=4", f"{names[0]}={rank}", f"{names[1]}=3"] for rank in range(2)]
    ranks = [[*env, "python", script, "helper"] for env in ranks]
    if launcher == "by hand":
        # The helpers of these have no options, so that they are no ranks.
        ranks = [["python", script, "helper", "--world-size", 3], *ranks[1:]]
        ranks[1] = [*ranks[0], "--rank=1"]
    run = launch([["python", script], *ranks])
    run.wait_for(lambda: run.out.count("loads") == 5, 30, "all five")
    stopped = run.processes[2]
    stopped.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    assert ask(tmp_path, PIDS.replace("mnmc_ddp_env.py", str(script))) == (
        "no collective is on record, only where the ranks are\n"
        "    rank 0 is at load, loads.py:6: time.sleep(1000)\n"
        f"    rank 1 is stopped: process {stopped.pid} on {HERE} goes on after kill -CONT "
        f"{stopped.pid}\n        at load, loads.py:6: time.sleep(1000)\n"
        f"    rank 2 {NOWHERE}\n"
    )


# As torch's mp.spawn starts its workers.
SPAWNS = """
import multiprocessing, time

def load(rank):
    print("loads", flush=True)
    time.sleep(1000 + rank)

def worker(rank):
    load(rank)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=worker, args=(rank,)) for rank in range(2)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
"""


@needs_py_spy
def test_running_workers_of_mp_spawn(launch, tmp_path):
    """Their command line has no script; they are the second node's of two."""
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    run = launch([["python", script, "--nodes", 2, "--node-rank", 1, "--nproc-per-node", 2]])
    run.wait_for(lambda: run.out.count("loads") == 2, 60, "both")
    assert ask(tmp_path, PIDS.replace("mnmc_ddp_env.py", str(script))) == (
        "no collective is on record, only where the ranks are\n"
        f"    ranks 0 and 1 {NOWHERE.replace('is', 'are', 1)}\n"
        "    ranks 2 and 3 are at load, spawns.py:6: time.sleep(1000 + rank)\n"
    )


@needs_py_spy
@pytest.mark.slow
@pytest.mark.parametrize("script", ("mnmc_ddp_tcp.py", "mnmc_ddp_mp.py"))
def test_running_ranks_of_the_scripts_without_a_launcher(launch, tmp_path, script):
    """Each waits for a rank that is not started: the third process, or the second node."""
    if script == "mnmc_ddp_tcp.py":
        commands = commands_for(script, 3, "--dataset", "synthetic")[:2]
    else:
        (command,) = commands_for(script, 2, "--dataset", "synthetic")
        commands = [[*command, "--nodes", 2]]
    run = launch(commands)
    pids = " ".join(str(process.pid) for process in run.processes)
    command = f"python scripts/who_hangs.py --pids {pids}"
    expected = "init_process_group: it ends when all ranks have called it\n    ranks 0 and 1 wait"

    def ask_quietly():
        with contextlib.suppress(AssertionError):  # They are not there yet.
            return ask(tmp_path, command)
        return ""

    run.wait_for(lambda: ask_quietly().startswith(expected), 60, "both ranks to wait")


def test_pids_without_py_spy(tmp_path, process):
    command = f"python scripts/who_hangs.py --pids {process.pid}"
    stderr = ask(tmp_path, command, path="/nowhere", status=1)
    assert stderr == "--pids needs py-spy: pip install py-spy\n"


def test_pids_where_pgrep_finds_none(tmp_path):
    stderr = ask(tmp_path, "python scripts/who_hangs.py --pids", status=1)
    assert stderr == "--pids: no process has this name\n"


@needs_py_spy
def test_pids_of_no_rank(tmp_path, process):
    stderr = ask(tmp_path, f"python scripts/who_hangs.py --pids {process.pid}", status=1)
    assert stderr.startswith("none of these processes is a rank")


# A script of another kind, in which rank 1 can load for ever.
OTHER = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def load(path):
    while not os.path.exists(path):
        time.sleep(0.1)


def main():
    start_watching()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.LSTM(8, 16))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(10):
        if dist.get_rank() == 1 and step == 5:
            load("there")
        outputs, _ = model(torch.randn(3, 4, 8))
        optimizer.zero_grad()
        outputs.square().mean().backward()
        optimizer.step()


main()
dist.destroy_process_group()
"""


@contextlib.contextmanager
def other_script(folder):
    """Two ranks of the other script with the lines of the page, which write more often here."""
    lines = EXAMPLE.read_text().partition("def main")[0]
    for old, new in (('"who_hangs"', f'"{folder}/who_hangs"'), ("timeout=5", "timeout=0.2")):
        assert lines.count(old) == 1
        lines = lines.replace(old, new)
    (folder / "other.py").write_text(lines + OTHER)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [shared | {"RANK": str(rank)} for rank in range(2)]
    started = [start(folder / "other.py", [], folder / env["RANK"], env) for env in ranks]
    try:
        yield started
    finally:
        end(started, 0)


def test_two_ranks_of_another_script(tmp_path, monkeypatch):
    """They hang, and end when the file is there."""
    monkeypatch.setattr(who_hangs, "PATIENCE", 1)
    monkeypatch.chdir(tmp_path)
    with other_script(tmp_path) as ranks:
        deadline = time.monotonic() + 250
        report = ""
        while "has not called it: the last" not in report and time.monotonic() < deadline:
            time.sleep(0.1)  # between two looks
            notes = who_hangs.read_notes("who_hangs")
            report = who_hangs.report(notes) if notes else ""
        assert re.sub(r"\b(collective|for|py:)( ?)\d+", r"\1\2N", report) == (
            "collective N: all_reduce (1664 floats), for N s\n"
            "    rank 0 waits in it\n"
            "        at main, other.py:N: outputs.square().mean().backward()\n"
            "    rank 1 has not called it: the last one was collective N, all_reduce (1664 "
            "floats)\n        at load, other.py:N: time.sleep(0.1)"
        )
        (tmp_path / "1" / "there").touch()
        for rank in ranks:
            rank.join(60)
        assert [rank.exitcode for rank in ranks] == [0, 0]
        report = who_hangs.report(who_hangs.read_notes("who_hangs"))
        assert report == "all 2 ranks have left the script"


def read_reports():
    """What the page of labs shows of each hang, by the name of its patch."""
    blocks = update_pages.read_blocks((REPO / "docs" / "break_it.md").read_text())
    marks = [(block.mark.split(), block.code) for block in blocks]
    start = ["printed", "by", "scripts/who_hangs.py", "watch"]
    return {mark[-1]: code for mark, code in marks if mark[:4] == start}


REPORTS = read_reports()
HANGS = [name for name in patches.NAMES if name.startswith("hang_")]


def generalize(report):
    """A report without the numbers and the name that differ between runs."""
    report = re.sub(r"[\w/]+\.py:\d+: ", "", report)
    report = re.sub(r"process \d+ on \S+", "process N on HOST", report)
    return re.sub(r"(collective|for|-CONT) \d+", r"\1 N", report)


def check_lines(report, script):
    """Each line that the report names has the code that the report shows."""
    lines = script.read_text().splitlines()
    found = re.findall(r"(\w+\.py):(\d+): (.+)", report)
    assert found
    for name, number, statement in found:
        assert name == script.name
        assert lines[int(number) - 1].partition("  #")[0].strip() == statement


def write_for_slurm(names, folder):
    """Writes mnmc_ddp_slurm.py with patches of mnmc_ddp_env.py, which share the lines changed."""
    target = "mnmc_ddp_slurm.py"
    text = (REPO / target).read_text()
    for name in names:
        patch = patches.read_patch(name)
        base = (REPO / patch.script).read_text()
        text, conflicts = patches.merge(text, base, patches.apply_patch(patch, base))
        assert conflicts == 0, name
    for ours, slurms in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
        text = text.replace(f'int(os.environ["{ours}"])', f'int(os.environ["{slurms}"])')
    path = folder / f"{names[-1]}.py"
    path.write_text(text)
    return path


def test_every_hang_is_on_the_page():
    assert sorted(REPORTS) == HANGS


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(NODES="2", CPUS="4")
    yield cluster
    cluster.stop()


@needs_py_spy
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", HANGS)
@pytest.mark.parametrize("world_size", (2, pytest.param(4, marks=pytest.mark.stress)))
@pytest.mark.parametrize("launcher", ("torchrun", "srun"))
def test_hang_on_purpose(request, monkeypatch, tmp_path, name, world_size, launcher):
    """Two ranks: what the page shows. Four: the guilty rank with its line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", PATH)
    env = {}
    if launcher == "srun":
        script = write_for_slurm(["watch", name], tmp_path)
        command = ["srun", "-N2", "-n", world_size, "python", script.name]
        env = request.getfixturevalue("cluster").env
    else:
        script = patches.write_patched(["watch", name], tmp_path)
        command = ["torchrun", "--standalone", "--nproc-per-node", world_size, script.name]
    expected = generalize(REPORTS[name])
    guilty = 0 if name == "hang_collective_under_if" else 1
    parts = re.findall(f"^    rank {guilty} .*\n.*\n", expected, re.M)

    def as_on_the_page(report):
        report = generalize(report)
        return report == expected if world_size == 2 else all(part in report for part in parts)

    def read_report():
        notes = who_hangs.read_notes("who_hangs")
        return who_hangs.report(notes) + "\n" if notes else ""

    command += ["--dataset", "synthetic"]
    with Launch([command], tmp_path / "output", env=env, cwd=tmp_path) as run:
        try:
            run.wait_for(lambda: as_on_the_page(read_report()), 600, "the report")
        except AssertionError as error:
            raise AssertionError(
                f"expected:\n{expected}\nsaid:\n{read_report()}\n{error}"
            ) from None
        report = ask(tmp_path)
        assert as_on_the_page(report)
        check_lines(report, script)
        assert len(run.epochs()) == (name == "hang_shapes"), run.story()
    run.wait_for(lambda: not run.pids(), 60, "all processes to be gone")
    if launcher == "srun":  # Its srun was killed, which leaves the job its nodes.
        slurm = request.getfixturevalue("cluster")
        slurm.ask("scancel", "--me")
        run.wait_for(lambda: not slurm.ask("squeue", "--noheader"), 60, "the nodes to be free")


@pytest.mark.slow
@pytest.mark.parametrize("name", HANGS)
def test_hang_without_the_tool(launch, tmp_path, name):
    """What the page says of the time-out; the rank that loads and the stopped one say nothing."""
    script = patches.write_patched([name], tmp_path)
    command = ["torchrun", "--standalone", "--nproc-per-node", 2, script]
    run = launch([[*command, "--dataset", "synthetic", "--timeout", 30]]).wait(250)
    assert run.codes == [1]
    assert re.search(
        rf"^\[rank\d\]: .*({gave_up('Timed out waiting 30000ms').pattern})", run.err, re.M
    ), run.story()
    if name in ("hang_stopped", "hang_loading"):
        assert "[rank1]" not in run.err, run.story()
    assert len(run.epochs()) == (name == "hang_shapes"), run.story()
