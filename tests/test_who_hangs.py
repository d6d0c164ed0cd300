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

import pytest
import update_pages
import who_hangs
from forked import end, start
from launch import REPO, Launch, free_port, gave_up, page_commands
from test_slurm import Cluster

PAGE = "docs/troubleshooting.md"
FOLDER, PIDS = page_commands(PAGE, "Who hangs?")  # two commands
TEXT = (REPO / PAGE).read_text()
(EXAMPLE,) = (b.code for b in update_pages.read_blocks(TEXT) if "def watch(" in b.code)
HERE = os.uname().nodename
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
PLACES = {
    "sum": ("train", 20, "dist.all_reduce(totals)  # all wait"),
    "test": ("test", 30, "for images in loader:"),
    "join": ("main", 5, "dist.init_process_group()"),
}
AT = {
    "sum": "        at train, my.py:20: dist.all_reduce(totals)\n",
    "test": "        at test, my.py:30: for images in loader:\n",
    "join": "        at main, my.py:5: dist.init_process_group()\n",
}


def call(number, name="all_reduce", size=(3,), kind="Float", ended=True, group="0", since=60):
    """An entry of the flight recorder, as gloo makes it; since: seconds before its note."""
    sizes, kinds = ([], []) if name == "barrier" else ([list(size)], [kind])
    return {
        "collective_seq_id": number,
        "profiling_name": f"gloo:{name}",
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


def write(folder, rank, calls, place="sum", age=0, **others):
    """Writes the note of a rank on another machine, as the lines on the page do."""
    function, line, code = PLACES[place]
    inner = "init_process_group" if place == "join" else "wrapper"
    stack = [
        [f"{folder}/my.py", 40, "<module>", "main()"],
        [f"{folder}/my.py", line, function, code],
        ["/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", 1, inner, "work.wait()"],
    ]
    note = {"rank": rank, "world_size": 3, "host": "elsewhere", "pid": 1, "running": True}
    note |= {"time": time.time() - age, "stack": stack}
    dated = [c | {"time_created_ns": note["time"] * 1e9 + c["time_created_ns"]} for c in calls]
    note["recorder"] = json.dumps({"entries": dated})
    (folder / "who_hangs").mkdir(exist_ok=True)
    (folder / "who_hangs" / f"{rank}.json").write_text(json.dumps(note | others))


def ask(folder, command=FOLDER, path=PATH):
    """What a command of the page prints."""
    command = command.replace("python scripts", f"{sys.executable} {REPO}/scripts")
    bash = [shutil.which("bash"), "-c", command]
    return subprocess.check_output(bash, text=True, cwd=folder, env={"PATH": path})


def waiting(number, *what, **others):
    """A rank's calls when it waits in the last of them."""
    return [call(number - 1, "broadcast", (16,)), call(number, *what, ended=False, **others)]


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
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as one:
        yield one
        one.kill()


def test_stopped_rank_without_py_spy(tmp_path, process):
    """Its last note can be from before the others' last collectives."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    two_wait(tmp_path)
    write(tmp_path, 1, waiting(3), "test", age=30, host=HERE, pid=process.pid)
    said = f"    rank 1 is stopped: process {process.pid} on {HERE} goes on after kill -CONT "
    said += f"{process.pid}\n        30 s earlier {AT['test'].strip()}\n"
    assert ask(tmp_path, path="/nowhere") == SEVEN + said


def test_dead_rank(tmp_path, process):
    process.kill()
    process.wait()
    two_wait(tmp_path)
    write(tmp_path, 1, waiting(3), "test", age=4, host=HERE, pid=process.pid)
    said = f"    rank 1 is dead: process {process.pid} on {HERE} is gone, and wrote no last note\n"
    assert ask(tmp_path) == f"{SEVEN}{said}        4 s earlier {AT['test'].strip()}\n"


def test_silent_rank_on_another_machine(tmp_path):
    two_wait(tmp_path)
    write(tmp_path, 1, waiting(3), "test", age=30, pid=4711)
    said = "    rank 1 has written no note for 30 s: look at process 4711 on elsewhere\n"
    assert ask(tmp_path) == f"{SEVEN}{said}        30 s earlier {AT['test'].strip()}\n"


def test_rank_without_a_note(tmp_path):
    two_wait(tmp_path)
    said = "    rank 1 has written no note: it was not started, or did not come to the lines\n"
    assert ask(tmp_path) == SEVEN + said


def test_rank_that_left(tmp_path):
    two_wait(tmp_path)
    write(tmp_path, 1, [], age=50, running=False)
    said = "    rank 1 has left the script: its output says whether it failed\n"
    assert ask(tmp_path) == SEVEN + said


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
    two_wait(tmp_path, place="join", recorder='{"entries": []}')
    title = "init_process_group: it ends when all ranks have called it\n"
    title += f"    ranks 0 and 2 wait in it\n{AT['join']}"
    said = "    rank 1 has written no note: it was not started, or did not come to the lines\n"
    assert ask(tmp_path) == title + said
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
    said = f"    ranks 0 and 1 are {AT['sum'].strip()}\n    rank 2 is {AT['test'].strip()}\n"
    assert ask(tmp_path) == NOTHING + said


def test_job_that_is_over(tmp_path, process):
    """No process is left: the notes say how it ended, and that they are old."""
    process.kill()
    process.wait()
    two_wait(tmp_path, age=100, host=HERE, pid=process.pid)
    write(tmp_path, 1, waiting(7)[:1], "test", age=98, host=HERE, pid=process.pid)
    old, _, said = ask(tmp_path).partition("\n")
    assert re.fullmatch(r"the newest note is \d+ s old", old)
    said = re.sub(r"for \d+ s", "for 60 s", said)
    assert said == f"{SEVEN}    rank 1 has not called it: {LAST}{AT['test']}"


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
    said = ask(tmp_path)
    assert "    ranks 0 to 7, 9 to 59 and 61 to 63 wait in it\n" in said
    assert "    ranks 8 and 60 have called no collective\n" in said


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


@needs_py_spy
@pytest.mark.parametrize("launcher", ("torchrun", "srun"))
def test_running_processes(launch, tmp_path, launcher):
    """Among them a launcher, a rank's helper, and a rank that is stopped."""
    script = tmp_path / "loads.py"
    script.write_text(LOADS)
    names = ("RANK", "WORLD_SIZE") if launcher == "torchrun" else ("SLURM_PROCID", "SLURM_NTASKS")
    ranks = [["env", f"{names[0]}={rank}", f"{names[1]}=3"] for rank in range(2)]
    run = launch([["python", script], *[[*env, "python", script, "helper"] for env in ranks]])
    run.wait_for(lambda: run.out.count("loads") == 5, 30, "all five")
    stopped = run.processes[2]
    stopped.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    assert ask(tmp_path, PIDS.replace("mnmc_ddp_env.py", str(script))) == (
        "no collective is on record, only where the ranks are\n"
        "    rank 0 is at load, loads.py:6: time.sleep(1000)\n"
        f"    rank 1 is stopped: process {stopped.pid} on {HERE} goes on after kill -CONT "
        f"{stopped.pid}\n        at load, loads.py:6: time.sleep(1000)\n"
        "    rank 2 has written no note: it was not started, or did not come to the lines\n"
    )


# A script of another kind, in which rank 1 can load for ever.
OTHER = """

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def load(path):
    while not os.path.exists(path):
        time.sleep(0.1)


def main():
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
    lines = EXAMPLE.partition("\n\ndist.init")[0]
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
        said = ""
        while "has not called it: the last" not in said and time.monotonic() < deadline:
            time.sleep(0.1)  # between two looks
            notes = who_hangs.read_notes("who_hangs")
            said = who_hangs.report(notes) if notes else ""
        assert re.sub(r"\b(collective|for|py:)( ?)\d+", r"\1\2N", said) == (
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
        said = who_hangs.report(who_hangs.read_notes("who_hangs"))
        assert said == "all 2 ranks have left the script"


def hangs():
    """The page's hangs by their headings: the patch, and what the tool says."""
    blocks = update_pages.read_blocks(TEXT)
    return {
        patch.heading: (patch.code, printed.code)
        for patch, printed in zip(blocks, blocks[1:], strict=False)
        if printed.mark == "printed by scripts/who_hangs.py"
    }


HANGS = hangs()
BY_SLURM = [("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")]


def plain(said):
    """A report without the numbers and the name that differ between runs."""
    said = re.sub(r"\w+\.py:\d+: ", "", said)
    said = re.sub(r"process \d+ on \S+", "process N on HOST", said)
    return re.sub(r"(collective|for|-CONT) \d+", r"\1 N", said)


def check_lines(said, script):
    """Each line that the report names has the code that the report shows."""
    lines = script.read_text().splitlines()
    found = re.findall(r"(\w+\.py):(\d+): (.+)", said)
    assert found
    for name, number, statement in found:
        assert name == script.name
        assert lines[int(number) - 1].partition("  #")[0].strip() == statement


@pytest.fixture(scope="module")
def cluster():
    one = Cluster(NODES="2", CPUS="4")
    yield one
    one.stop()


@needs_py_spy
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("heading", HANGS)
@pytest.mark.parametrize("world_size", (2, pytest.param(4, marks=pytest.mark.stress)))
@pytest.mark.parametrize("launcher", ("torchrun", "srun"))
def test_hang_on_purpose(request, monkeypatch, tmp_path, heading, world_size, launcher):
    """Two ranks: what the page shows. Four: the guilty rank with its line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", PATH)
    name, env = "mnmc_ddp_env.py", {}
    command = ["torchrun", "--standalone", "--nproc-per-node", world_size]
    if launcher == "srun":
        name, command = "mnmc_ddp_slurm.py", ["srun", "-N2", "-n", world_size, "python"]
        env = request.getfixturevalue("cluster").env
    code = update_pages.watched(name, TEXT)
    for ours, slurms in BY_SLURM if launcher == "srun" else ():
        code = code.replace(f'int(os.environ["{ours}"])', f'int(os.environ["{slurms}"])')
    script = tmp_path / name
    script.write_text(code)
    patch, expected = HANGS[heading]
    update_pages.apply_patch(patch.replace("mnmc_ddp_env.py", name), script)
    expected = plain(expected)
    guilty = 0 if "rank == 0" in heading else 1
    parts = re.findall(f"^    rank {guilty} .*\n.*\n", expected, re.M)

    def as_on_the_page(said):
        said = plain(said)
        return said == expected if world_size == 2 else all(part in said for part in parts)

    def report():
        notes = who_hangs.read_notes("who_hangs")
        return who_hangs.report(notes) + "\n" if notes else ""

    command += [name, "--dataset", "synthetic"]
    with Launch([command], tmp_path / "output", env=env, cwd=tmp_path) as run:
        try:
            run.wait_for(lambda: as_on_the_page(report()), 600, "the report")
        except AssertionError as error:
            raise AssertionError(f"expected:\n{expected}\nsaid:\n{report()}\n{error}") from None
        said = ask(tmp_path)
        assert as_on_the_page(said)
        check_lines(said, script)
        assert len(run.epochs()) == ("shapes" in heading), run.story()
    run.wait_for(lambda: not run.pids(), 60, "all processes to be gone")
    if launcher == "srun":  # Its srun was killed, which leaves the job its nodes.
        slurm = request.getfixturevalue("cluster")
        slurm.ask("scancel", "--me")
        run.wait_for(lambda: not slurm.ask("squeue", "--noheader"), 60, "the nodes to be free")


@pytest.mark.slow
@pytest.mark.parametrize("heading", HANGS)
def test_hang_without_the_tool(launch, tmp_path, heading):
    """What the page says of the time-out; the rank that loads and the stopped one say nothing."""
    script = tmp_path / "mnmc_ddp_env.py"
    shutil.copy(REPO / script.name, script)
    update_pages.apply_patch(HANGS[heading][0], script)
    command = ["torchrun", "--standalone", "--nproc-per-node", 2, script]
    run = launch([[*command, "--dataset", "synthetic", "--timeout", 30]]).wait(250)
    assert run.codes == [1]
    assert re.search(
        rf"^\[rank\d\]: .*({gave_up('Timed out waiting 30000ms').pattern})", run.err, re.M
    ), run.story()
    assert "[rank1]" not in run.err or "a rank that" not in heading.lower(), run.story()
    assert len(run.epochs()) == ("shapes" in heading), run.story()
