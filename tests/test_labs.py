"""Each lab of docs/break_it.md breaks what the page says, and looks as the page says."""

import re
import shlex
import shutil
import subprocess

import patches
import pytest
import update_pages
from launch import REPO, Launch, free_port, gave_up, page_commands

PAGE = "docs/break_it.md"
BLOCKS = update_pages.read_blocks((REPO / PAGE).read_text())
# The pages whose patches are tried by the commands that stand there.
PAGES = (PAGE, "docs/by_hand.md", "docs/beyond_ddp.md")
PATCHES = [
    (page, name)
    for page in PAGES
    for name in patches.NAMES
    if f"patch.sh {name}\n" in (REPO / page).read_text()
]


@pytest.mark.parametrize(("page", "name"), PATCHES)
def test_patch_has_the_command_of_its_page(page, name):
    """patch.sh prints what the page says."""
    commands = re.findall(r"^    (.+)$", patches.read_patch(name).header, re.MULTILINE)
    assert commands
    for command in commands:
        assert f"\n{command}\n" in (REPO / page).read_text(), f"{command} is not on {page}"


def test_each_lab_has_a_patch():
    """But the second, which changes nothing."""
    assert sum(page == PAGE for page, _ in PATCHES) == 10


def pattern(line):
    """A regular expression for a shown line, in which numbers may be others."""
    if "Timed out waiting 5000ms" in line:
        return gave_up("Timed out waiting 5000ms").pattern
    number = r"-?\d[\d.]*"
    return number.join(map(re.escape, re.split(number, line.removeprefix("… ").strip())))


def start(folder, title, page=PAGE):
    """Makes the section's scripts in folder; returns its other commands as lists of words."""
    for name in ("mnmc_ddp_env.py", "mnmc_ddp_tcp.py", "scripts/patch.sh"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, folder / name)
    shutil.copytree(REPO / "docs" / "patches", folder / "docs" / "patches")
    port, commands = str(free_port()), []
    for command in page_commands(page, title):
        if "patch.sh" in command:
            subprocess.run(shlex.split(command), cwd=folder, check=True)
        else:
            commands.append(shlex.split(command.replace("29500", port)))
    return commands


def change(folder, name, old, new):
    """Replaces words of the lab's script that stand there once."""
    script = folder / "patched" / f"{name}.py"
    text = script.read_text()
    assert text.count(old) == 1, old
    script.write_text(text.replace(old, new))


def see(folder, title, commands, codes, seconds=200):
    """Runs commands at the same time; returns their launch, which shows all that the page shows."""
    with Launch(commands, folder / "output", cwd=folder) as run:
        run.wait(seconds)
        run.wait_for(lambda: not run.pids(), 60, "all processes to be gone")
    assert run.codes == codes, run.story()
    shows(title, run.out + run.err)
    return run


def shows(title, printed):
    """Finds every line of the lab's output on the page in what was printed."""
    (shown,) = (b.code for b in BLOCKS if b.heading == title and b.language == "text")
    for line in shown.splitlines():
        assert re.search(pattern(line), printed), (line, printed)


def hashes(run):
    """The hash of each rank's weights in each epoch: {(rank, epoch): hash}."""
    rows = re.findall(r"rank (\d), epoch (\d): hash of the weights (\d{6})", run.out)
    assert len(rows) == 4, run.story()
    return {(int(rank), int(epoch)): number for rank, epoch, number in rows}


@pytest.mark.slow
def test_set_epoch_left_out(tmp_path):
    title = "1. set_epoch left out"
    run = see(tmp_path, title, start(tmp_path, title), [0])
    orders = re.findall(r"epoch \d begins with the images (.+)", run.out)
    assert len(orders) == 3 and len(set(orders)) == 1, run.story()


@pytest.mark.slow
def test_two_processes_with_one_rank(tmp_path):
    title = "2. Two processes with one rank"
    run = see(tmp_path, title, start(tmp_path, title), [1, 1])
    assert run.out == "", run.story()  # no [init] line


@pytest.mark.slow
def test_barrier_under_if_rank_0(tmp_path):
    title = "3. A barrier under if rank == 0"
    run = see(tmp_path, title, start(tmp_path, title), [1])
    assert run.epochs() == [], run.story()


@pytest.mark.slow
def test_kill_with_a_launcher(tmp_path):
    title = "4. kill -9 with a launcher"
    run = see(tmp_path, title, start(tmp_path, title), [1])
    assert [line["epoch"] for line in run.epochs()] == [1], run.story()


@pytest.mark.slow
def test_kill_without_a_launcher(tmp_path):
    title = "5. kill -9 without a launcher"
    run = see(tmp_path, title, start(tmp_path, title), [1, -9])
    assert [line["epoch"] for line in run.epochs()] == [1], run.story()
    assert re.search("Connection (closed|reset) by peer|Broken pipe", run.last_line()), run.story()


@pytest.mark.slow
def test_stop(tmp_path):
    title = "6. kill -STOP"
    run = see(tmp_path, title, start(tmp_path, title), [1])
    assert [line["epoch"] for line in run.epochs()] == [1], run.story()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_learning_rate_scaling(tmp_path):
    title = "7. No learning-rate scaling"
    accuracies, printed = [], ""
    for command in start(tmp_path, title):
        with Launch([command], tmp_path / "output", cwd=tmp_path) as run:
            accuracies.append(run.succeeded(300).epochs()[0]["test"])
            printed += run.out
    shows(title, printed)
    one_process, eight_processes, scaled = accuracies
    assert one_process > eight_processes + 3 and scaled > eight_processes + 3, accuracies


@pytest.mark.slow
def test_distributed_sampler_for_testing(tmp_path):
    title = "8. DistributedSampler for testing"
    run = see(tmp_path, title, start(tmp_path, title), [0])
    assert run.epochs()[0]["count"] == 2001, run.story()


def assert_hashes_differ(run):
    numbers = hashes(run)
    assert numbers[0, 1] != numbers[1, 1] and numbers[0, 2] != numbers[1, 2], run.story()


def assert_hashes_are_equal(run):
    numbers = hashes(run)
    assert numbers[0, 1] == numbers[1, 1] and numbers[0, 2] == numbers[1, 2], run.story()


WRAP = "nn.parallel.DistributedDataParallel(model)"
NAMED = "ddp_model = "  # what the scripts call the wrapped model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "name", "old", "new"),
    [
        ("9. The model not wrapped", "model_not_wrapped", f"{NAMED}model\n", f"{NAMED}{WRAP}\n"),
        (
            "10. Another seed on each rank, and no broadcast",
            "weights_not_broadcast",
            ", init_sync=False",
            "",
        ),
        (
            "11. no_sync round the last micro-batch",
            "no_sync_last_micro_batch",
            "part == 1",
            "part == 0",
        ),
    ],
)
def test_weights_differ_until_the_change_is_undone(tmp_path, title, name, old, new):
    commands = start(tmp_path, title)
    assert_hashes_differ(see(tmp_path, title, commands, [0]))
    change(tmp_path, name, old, new)
    assert_hashes_are_equal(see(tmp_path, title, commands, [0]))
