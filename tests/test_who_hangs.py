"""The tool that says which rank hangs: on notes made here, and on runs that hang on purpose."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import patches
import pytest
from launch import REPO, Launch, page_commands

FOLDER, PIDS = page_commands("docs/troubleshooting.md", "Who hangs?")  # two commands
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
FRAMES = {
    "sum": ("train", 20, "dist.all_reduce(totals)  # all wait"),
    "test": ("test", 30, "for images in loader:"),
    "join": ("main", 5, "dist.init_process_group()"),
}
SUM = "        at train, my.py:20: dist.all_reduce(totals)\n"
TEST = "        at test, my.py:30: for images in loader:\n"
JOIN = "        at main, my.py:5: dist.init_process_group()\n"
MOMENTS = {}  # by the folder of a test


def call(number, name="all_reduce", size=(3,), ended=True, group="0", since=60, by="gloo"):
    """An entry of the flight recorder, as gloo makes it; since: seconds before its note."""
    sizes, kinds = ([], []) if name == "barrier" else ([list(size)], ["Float"])
    entry = {"collective_seq_id": number, "profiling_name": f"{by}:{name}", "is_p2p": False}
    entry |= {"input_sizes": sizes, "input_dtypes": kinds, "process_group": [group, "default_pg"]}
    entry |= {"output_sizes": sizes, "output_dtypes": kinds, "retired": ended}
    return entry | {"time_created_ns": -since * 1e9, "state": "scheduled"}


def wait_in(number, *what, **others):
    """A rank's calls when it waits in the last of them."""
    same = {name: others[name] for name in ("by", "group") if name in others}
    return [
        call(number - 1, "broadcast", (16,), **same),
        call(number, *what, ended=False, **others),
    ]


def write(folder, rank, calls, frame="sum", age=0, **others):
    """Writes the note of a rank on another machine, as the lines on the page do."""
    function, line, code = FRAMES[frame]
    inner = "init_process_group" if frame == "join" else "wrapper"
    stack = [
        [f"{folder}/my.py", 40, "<module>", "main()"],
        [f"{folder}/my.py", line, function, code],
        ["/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", 1, inner, "work.wait()"],
    ]
    note = {"rank": rank, "world_size": 3, "host": "elsewhere", "pid": 4711, "running": True}
    # One moment for all notes of a test: a busy machine takes a second between two of them.
    note |= {"time": MOMENTS.setdefault(folder, time.time()) - age, "stack": stack}
    dated = [c | {"time_created_ns": note["time"] * 1e9 + c["time_created_ns"]} for c in calls]
    note["recorder"] = [json.dumps({"entries": dated}), json.dumps({})]
    (folder / "who_hangs").mkdir(exist_ok=True)
    (folder / "who_hangs" / f"{rank}.json").write_text(json.dumps(note | others))


def two_wait(folder):
    """Ranks 0 and 2 wait in collective 7."""
    for rank in (0, 2):
        write(folder, rank, wait_in(7))


def ask(folder):
    """What the page's command prints, or its message where it fails."""
    command = FOLDER.replace("python scripts", f"{sys.executable} {REPO}/scripts")
    run = subprocess.run(command.split(), text=True, cwd=folder, capture_output=True)
    return run.stderr or run.stdout


SEVEN = f"collective 7: all_reduce (3 floats), for 60 s\n    ranks 0 and 2 wait in it\n{SUM}"
NO_NOTE = "has written no note: it was not started, or did not come to the lines\n"
LAST = "the last one was collective 6, broadcast (16 floats)\n"
LEFT = "has left the script: its output says whether it failed\n"
SILENT = "has written no note for 30 s: look at process 4711 on elsewhere\n"
SILENT += f"        30 s earlier {TEST[8:]}"


@pytest.mark.parametrize(
    ("note", "expected"),
    (
        ({"calls": wait_in(7)[:1]}, f"has not called it: {LAST}{TEST}"),
        ({"calls": []}, f"has called no collective\n{TEST}"),
        ({"calls": wait_in(3), "age": 30}, SILENT),
        ({"calls": [], "age": 50, "running": False}, LEFT),
        (None, NO_NOTE),
    ),
    ids=("in other code", "called nothing", "silent", "left", "no note"),
)
def test_rank_that_the_others_wait_for(tmp_path, note, expected):
    two_wait(tmp_path)
    if note:
        write(tmp_path, 1, frame="test", **note)
    assert ask(tmp_path) == f"{SEVEN}    rank 1 {expected}"


def test_stopped_rank_and_dead_rank(launch, tmp_path):
    """The last note can be from before the others' last collectives."""
    (process,) = launch([["sleep", "1000"]]).processes
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    two_wait(tmp_path)
    here, pid = os.uname().nodename, process.pid
    write(tmp_path, 1, wait_in(7)[:1], "test", age=4, host=here, pid=pid)
    expected = f"is stopped: process {pid} on {here} goes on after kill -CONT {pid}"
    assert ask(tmp_path) == f"{SEVEN}    rank 1 {expected}\n        4 s earlier {TEST[8:]}"
    process.kill()
    process.wait()
    expected = f"has died: its output says why\n        4 s earlier {TEST[8:]}"
    assert ask(tmp_path) == f"{SEVEN}    rank 1 {expected}"
    for rank in (0, 2):  # Somebody has killed the run.
        write(tmp_path, rank, wait_in(7), host=here, pid=pid)
    report = ask(tmp_path).partition("\n")
    assert report[0] == "no rank runs any more: this is from before they ended"
    assert report[2] == f"{SEVEN}    rank 1 has not called it: {LAST}{TEST}"


def test_collectives_that_differ(tmp_path):
    """In their name; and in shapes, of which the rank with the smaller tensor notices nothing."""
    two_wait(tmp_path)
    title = "collective 7: not the same on all ranks, for 60 s\n"
    title += f"    ranks 0 and 2 wait in all_reduce (3 floats)\n{SUM}"
    write(tmp_path, 1, wait_in(7, "barrier"), "test")
    assert ask(tmp_path) == f"{title}    rank 1 waits in barrier\n{TEST}"
    calls = [call(7, size=(2, 4)), call(8, "barrier", ended=False, since=59)]
    write(tmp_path, 1, calls, "test")
    gone_on = "    rank 1 has called all_reduce (2 x 4 floats) and gone on\n"
    assert ask(tmp_path) == title + gone_on + TEST


@pytest.mark.parametrize("name", ("all_reduce", "gather"))
def test_the_first_difference_counts(tmp_path, name):
    """Not the later collective in which the ranks wait; shapes of some collectives may differ."""
    for rank in range(3):
        write(tmp_path, rank, [call(5, name, (3 + rank,)), *wait_in(7)])
    first = "collective 7: all_reduce" if name == "gather" else "collective 5: not the same"
    assert ask(tmp_path).startswith(first)


def test_all_wait_for_a_rank_that_never_joined(tmp_path):
    for rank in (0, 2):
        write(tmp_path, rank, [], "join")
    title = "init_process_group: it ends when all ranks have called it\n"
    title += f"    ranks 0 and 2 wait in it\n{JOIN}"
    assert ask(tmp_path) == f"{title}    rank 1 {NO_NOTE}"
    write(tmp_path, 1, [], "test")
    assert ask(tmp_path) == f"{title}    rank 1 has not called it\n{TEST}"


def test_run_that_goes_on_and_run_that_has_ended(tmp_path):
    """A short wait is no hang."""
    for rank in range(3):
        write(tmp_path, rank, wait_in(7, since=3))
    title = "no rank has waited in a collective for more than 12 s\n"
    assert ask(tmp_path) == f"{title}    ranks 0 to 2 are {SUM[8:]}"
    for rank in range(3):
        write(tmp_path, rank, [], running=False, age=1000)
    assert ask(tmp_path) == "all 3 ranks have left the script\n"


def test_two_process_groups_in_another_order(tmp_path):
    """Rank 0 waits in the first for rank 1, which waits in the second; rank 2 is in neither."""
    write(tmp_path, 0, [call(7, ended=False, group="1")])
    write(tmp_path, 1, [call(6, group="1"), call(4, ended=False, group="2")], "test")
    write(tmp_path, 2, [call(80)])
    assert ask(tmp_path) == (
        "collective 7 of process group 1: all_reduce (3 floats), for 60 s\n"
        f"    rank 0 waits in it\n{SUM}"
        "    rank 1 has not called it: it waits in collective 4 of process group 2, "
        f"all_reduce (3 floats)\n{TEST}"
        f"    rank 2 has called no collective of process group 1\n{SUM}"
    )


def test_gloo_and_nccl_in_one_process_group(tmp_path):
    """They count apart, and share the process group of all ranks."""
    for rank in range(3):
        calls = [call(7, "broadcast", (9,)), *([] if rank == 1 else wait_in(7, by="nccl2"))]
        write(tmp_path, rank, calls, "test" if rank == 1 else "sum")
    title = SEVEN.replace("collective 7", "collective 7 of nccl")
    assert ask(tmp_path) == f"{title}    rank 1 has called no collective of nccl\n{TEST}"


def test_many_ranks(tmp_path):
    for rank in range(64):
        calls = [] if rank in (8, 60) else wait_in(7)
        write(tmp_path, rank, calls, "test" if rank in (8, 60) else "sum", world_size=64)
    report = ask(tmp_path)
    assert "    ranks 0 to 7, 9 to 59 and 61 to 63 wait in it\n" in report
    assert "    ranks 8 and 60 have called no collective\n" in report


# Running processes.

LOADS = """
import time

def load():
    print("loads", flush=True)
    time.sleep(1000)

load()
"""


def test_running_processes(launch, tmp_path):
    """py-spy shows the line of each."""
    script = tmp_path / "loads.py"
    script.write_text(LOADS)
    run = launch([["python", script], ["python", script]])
    run.wait_for(lambda: run.out.count("loads") == 2, 60, "both")
    command = ["bash", "-c", PIDS.replace("mnmc_ddp_env.py", str(script))]
    shown = subprocess.run(command, env={"PATH": PATH}, capture_output=True, text=True).stdout
    assert len(re.findall(r"^ +load \(.*loads.py:6\)$", shown, re.MULTILINE)) == 2, shown


def test_watched_script_imports_what_lies_beside_it_and_goes_to_another_folder(tmp_path):
    (tmp_path / "beside.py").write_text("import os\nos.chdir('/')")
    (tmp_path / "mine.py").write_text("import beside")
    command = ["python", REPO / "scripts/check_ddp.py", "mine.py"]
    env = {"RANK": "0", "WORLD_SIZE": "1"}
    with Launch([command], tmp_path / "output", env=env, cwd=tmp_path) as run:
        run.succeeded()
    assert not json.loads((tmp_path / "who_hangs" / "0.json").read_text())["running"]


# Runs that hang.

# What the page of labs shows of each hang, by the name of its patch.
REPORTS = dict(
    re.findall(
        r"<!-- printed by scripts/who_hangs.py (\w+) -->\n```text\n(.*?)```",
        (REPO / "docs" / "break_it.md").read_text(),
        re.DOTALL,
    )
)
assert REPORTS, "the page of labs shows no report any more"


def generalize(report):
    """A report without the numbers, which differ between runs."""
    return re.sub(r"\b(collective |for |\.py:)\d+", r"\1N", report)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_hang_on_purpose_is_reported_as_on_the_page(tmp_path, name):
    """Then Ctrl-\\ ends it at once. Ctrl-C takes 30 seconds: a rank is inside a collective."""
    (tmp_path / "patched").mkdir()
    patches.write_patched([name], tmp_path / "patched")
    command = ["torchrun", "--standalone", "--nproc-per-node", 2, REPO / "scripts/check_ddp.py"]
    command += [f"patched/{name}.py", "--dataset", "synthetic"]
    with Launch([command], tmp_path / "output", cwd=tmp_path) as run:
        expected = generalize(REPORTS[name])
        with contextlib.suppress(AssertionError):  # The next line shows what the tool said.
            run.wait_for(lambda: generalize(ask(tmp_path)) == expected, 200, "the report")
        assert generalize(ask(tmp_path)) == expected, run.story()
        run.processes[0].send_signal(signal.SIGQUIT)
        assert "got signal: 3" in run.wait(20).err.splitlines()[-1], run.story()
        assert run.pids() == []
