"""Each lab of docs/break_it.md breaks what the page says, and looks as the page says."""

import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import messages
import pytest
from launch import (
    REPO,
    Launch,
    free_port,
    page_commands,
    page_output,
    read_epochs,
    run_forked_ranks,
)

PAGE = "docs/break_it.md"
pytestmark = pytest.mark.slow


def pattern(line):
    """A regular expression for a shown line, in which numbers may be others."""
    if "Timed out waiting 5000ms" in line:
        return messages.pattern("rank stalled", 5000)
    number = r"-?\d[\d.]*"
    return number.join(map(re.escape, re.split(number, line.removeprefix("… ").strip())))


def prepare(folder, title):
    """Makes the section's scripts in folder; returns its other commands as lists of words."""
    for name in ("mnmc_ddp_env.py", "mnmc_ddp_tcp.py", "scripts/patch.sh"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, folder / name)
    shutil.copytree(REPO / "docs" / "patches", folder / "docs" / "patches", dirs_exist_ok=True)
    port, commands = str(free_port()), []
    for command in page_commands(PAGE, title):
        if "patch.sh" in command:
            said = subprocess.check_output(shlex.split(command), cwd=folder, text=True)
            # patch.sh names the command that stands below it on the page.
            assert f"\n{said.splitlines()[-1].strip()}\n" in (REPO / PAGE).read_text()
        else:
            commands.append(shlex.split(command.replace("29500", port)))
    return commands


def check_shown(title, printed):
    """Finds every line of the lab's output on the page in what was printed."""
    (shown,) = page_output(PAGE, title)
    for line in shown.splitlines():
        assert re.search(pattern(line), printed), (line, printed)


def run_lab(folder, title, codes, commands=None):
    """Runs a lab's commands at the same time, finds what the page shows; returns the launch."""
    commands = commands or prepare(folder, title)
    with Launch(commands, folder / "output", cwd=folder) as run:
        run.wait(200)
        run.wait_for(lambda: not run.pids(), 60, "all processes to be gone")
    assert run.codes == codes, run.story()
    check_shown(title, run.out + run.err)
    return run


def run_forked_lab(folder, title, commands=None):
    """Runs a lab that nothing interrupts, its commands one after the other; returns the output.

    Forked, not by the page's torchrun: so its processes, in lab 7 eight, need not import torch.
    """
    printed = ""
    for command in commands or prepare(folder, title):
        processes, script, options = int(command[3]), folder / command[4], command[5:]
        run_folder = Path(tempfile.mkdtemp(dir=folder))
        codes, out, err = run_forked_ranks(script, processes, run_folder, options)
        assert not any(codes), err
        printed += out
    check_shown(title, printed)
    return printed


def test_set_epoch_left_out(tmp_path):
    printed = run_forked_lab(tmp_path, "1. set_epoch left out")
    orders = re.findall(r"epoch \d begins with the images (.+)", printed)
    assert len(orders) == 3 and len(set(orders)) == 1, printed


def test_two_processes_with_one_rank(tmp_path):
    run = run_lab(tmp_path, "2. Two processes with one rank", [1, 1])
    assert run.out == "", run.story()  # no [init] line


@pytest.mark.parametrize(
    ("title", "codes", "epochs"),
    (
        ("3. A barrier under if rank == 0", [1], []),
        ("4. kill -9 with a launcher", [1], [1]),
        ("6. kill -STOP", [1], [1]),
    ),
)
def test_run_that_stops_in_the_middle(tmp_path, title, codes, epochs):
    run = run_lab(tmp_path, title, codes)
    assert [line["epoch"] for line in run.epochs()] == epochs, run.story()


def test_kill_without_a_launcher(tmp_path):
    title = "5. kill -9 without a launcher"
    prepare(tmp_path, "4. kill -9 with a launcher")  # Lab 5 takes the copy of lab 4.
    run = run_lab(tmp_path, title, [1, -9], prepare(tmp_path, title))
    assert [line["epoch"] for line in run.epochs()] == [1], run.story()
    died = f"{messages.pattern('rank died')}|Broken pipe"
    assert re.search(died, run.last_line()), run.story()


def test_no_learning_rate_scaling(tmp_path):
    printed = run_forked_lab(tmp_path, "7. No learning-rate scaling")
    one_process, eight_processes, scaled = (line["test"] for line in read_epochs(printed))
    assert one_process > eight_processes + 3 and scaled > eight_processes + 3, printed


def test_distributed_sampler_for_testing(tmp_path):
    printed = run_forked_lab(tmp_path, "8. DistributedSampler for testing")
    assert read_epochs(printed)[0]["count"] == 2001, printed


def ranks_agree(printed):
    """Whether both ranks have the same hash of their weights, in each of two epochs."""
    rows = re.findall(r"rank (\d), epoch (\d): hash of the weights (\d{6})", printed)
    found = {(rank, epoch): number for rank, epoch, number in rows}
    assert len(found) == 4, printed
    return [found["0", epoch] == found["1", epoch] for epoch in "12"]


def test_weights_differ_until_the_change_that_the_page_names_is_made(tmp_path):
    title = "9. no_sync round the last micro-batch"
    commands = prepare(tmp_path, title)
    assert ranks_agree(run_forked_lab(tmp_path, title, commands)) == [False, False]
    (script,) = (tmp_path / "patched").iterdir()
    assert script.read_text().count("part == 1") == 1
    script.write_text(script.read_text().replace("part == 1", "part == 0"))
    assert ranks_agree(run_forked_lab(tmp_path, title, commands)) == [True, True]
