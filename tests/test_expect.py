"""The estimate for a reader's own network: what the page shows, and what follows from it."""

import inspect

import pytest
from launch import REPO, page_commands
from update_pages import read_blocks

PAGE = (REPO / "docs" / "performance.md").read_text()
SECTION = "What can I expect, and what would help?"


def test_page_shows_what_the_command_prints(launch):
    (command,) = page_commands("docs/performance.md", SECTION)
    (shown,) = (b.code for b in read_blocks(PAGE) if b.heading == SECTION and b.language == "text")
    assert launch([["bash", "-c", command]]).succeeded().out == shown


def test_estimate_is_that_of_the_page():
    import expect

    assert inspect.getsource(expect.step_seconds) in PAGE


def test_what_would_help():
    """One second of computing, and one bucket of 25 MB, which takes 0.2 s at 1 Gb/s."""
    import expect

    assert expect.step_seconds(2, 1, 25, 1, latency=0) == pytest.approx(1.2)
    # Of two buckets the first is sent during backward; of the second, all.
    assert expect.step_seconds(2, 1, 50, 1, latency=0) == pytest.approx(1.2)
    # The bf16 hook has as many buckets as DDP, each with half the bytes.
    assert expect.ways(2, 1, 50, 1)["bf16 hook"] == pytest.approx(1.1, abs=0.0001)
    found = expect.ways(2, 1, 25, 1)
    assert found == pytest.approx(
        {
            "DDP": 1.2,
            "bf16 hook": 1.1,
            "PowerSGD": 1.002,
            "no_sync over 4 batches": 1.05,
            "batch times 4": 1.05,
            "network 10 times as fast": 1.02,
        },
        abs=0.0001,
    )


def test_one_gpu_is_answered_in_one_line(launch):
    options = ["--gpus", 1, "--gigabits", 10, "--ms", 87, "--megabytes", 102]
    run = launch([["python", "scripts/lab/expect.py", *options]]).wait()
    assert run.codes == [2] and "--gpus must be at least 2" in run.last_line(), run.story()
