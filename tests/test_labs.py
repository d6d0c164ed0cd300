"""Each lab of docs/break_it.md breaks what the page says, and looks as the page says."""

import re
import shlex
import shutil

import pytest
import update_pages
from launch import REPO, Launch, free_port, gave_up, page_commands

PAGE = "docs/break_it.md"
BLOCKS = update_pages.read_blocks((REPO / PAGE).read_text())


def pattern(line):
    """A regular expression for a shown line, in which numbers may be others."""
    if "Timed out waiting 5000ms" in line:
        return gave_up("Timed out waiting 5000ms").pattern
    number = r"-?\d[\d.]*"
    return number.join(map(re.escape, re.split(number, line.removeprefix("… ").strip())))


def start(folder, title):
    """Makes the lab's scripts in folder; returns its commands as lists of words."""
    for name in ("mnmc_ddp_env.py", "mnmc_ddp_tcp.py"):
        shutil.copy(REPO / name, folder)
    for block in BLOCKS:
        if block.heading == title and block.mark.startswith("patch "):
            scratch = folder / "patched"
            scratch.mkdir()
            update_pages.patched(block, scratch).rename(folder / "mine.py")
    port = str(free_port())
    commands = page_commands(PAGE, title)
    return [shlex.split(command.replace("29500", port)) for command in commands]


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
    one, eight, scaled = accuracies
    assert one > eight + 3 and scaled > eight + 3, accuracies


@pytest.mark.slow
def test_distributed_sampler_for_testing(tmp_path):
    title = "8. DistributedSampler for testing"
    run = see(tmp_path, title, start(tmp_path, title), [0])
    assert run.epochs()[0]["count"] == 2001, run.story()


@pytest.mark.slow
def test_model_not_wrapped(tmp_path):
    """And with DDP the hashes are equal, as the page says."""
    title = "9. The model not wrapped"
    commands = start(tmp_path, title)
    numbers = hashes(see(tmp_path, title, commands, [0]))
    assert numbers[0, 1] != numbers[1, 1] and numbers[0, 2] != numbers[1, 2]
    script = tmp_path / "mine.py"
    text = script.read_text().replace(
        "parallel_model = model\n", "parallel_model = nn.parallel.DistributedDataParallel(model)\n"
    )
    script.write_text(text)
    numbers = hashes(see(tmp_path, title, commands, [0]))
    assert numbers[0, 1] == numbers[1, 1] and numbers[0, 2] == numbers[1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "change", "undone"),
    [
        ("10. Another seed on each rank, and no broadcast", ", init_sync=False", ""),
        ("11. no_sync round the last micro-batch", "part == 1", "part == 0"),
    ],
)
def test_weights_differ_until_the_change_is_undone(tmp_path, title, change, undone):
    commands = start(tmp_path, title)
    run = see(tmp_path, title, commands, [0])
    numbers = hashes(run)
    assert numbers[0, 1] != numbers[1, 1] and numbers[0, 2] != numbers[1, 2], run.story()
    script = tmp_path / "mine.py"
    assert script.read_text().count(change) == 1
    script.write_text(script.read_text().replace(change, undone))
    run = see(tmp_path, title, commands, [0])
    numbers = hashes(run)
    assert numbers[0, 1] == numbers[1, 1] and numbers[0, 2] == numbers[1, 2], run.story()
