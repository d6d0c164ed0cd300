"""The estimate for a reader's own network: what the page shows, and what follows from it."""

import pytest
from launch import REPO, page_commands
from update_pages import read_blocks

PAGE = "docs/predict.md"


@pytest.mark.parametrize(
    "section", ("What can I expect, and what would help?", "Predicted scaling on paper")
)
def test_page_shows_what_the_command_prints(launch, section):
    (command,) = page_commands(PAGE, section)
    blocks = read_blocks((REPO / PAGE).read_text())
    (shown,) = (b.code for b in blocks if b.heading == section and b.language == "text")
    assert launch([["bash", "-c", command]]).succeeded().out == shown


def test_page_says_what_is_predicted_for_resnet_18():
    import predict_scaling

    for gpus, numbers in ((8, "42, 92 and 98 %"), (1024, "27, 52 and 56 %")):
        steps = [predict_scaling.predict_step(gpus, 0.038, 46.8, speed) for speed in (10, 100, 400)]
        found = [f"{3.8 / step:.0f}" for step in steps]
        assert "{}, {} and {} %".format(*found) == numbers
        assert numbers in " ".join((REPO / PAGE).read_text().split())


def test_what_would_help():
    """One second of computing, and one bucket of 25 MB, which takes 0.2 s at 1 Gb/s."""
    import predict_scaling

    assert predict_scaling.predict_step(2, 1, 25, 1, latency=0) == pytest.approx(1.2)
    # Of two buckets the first is sent during backward; of the second, all.
    assert predict_scaling.predict_step(2, 1, 50, 1, latency=0) == pytest.approx(1.2)
    # The bf16 hook has as many buckets as DDP, each with half the bytes.
    assert predict_scaling.predict_variants(2, 1, 50, 1)["bf16 hook"] == pytest.approx(
        1.1, abs=0.0001
    )
    found = predict_scaling.predict_variants(2, 1, 25, 1)
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
    run = launch([["python", "scripts/measure/predict_scaling.py", *options]]).wait()
    assert run.codes == [2] and "--gpus must be at least 2" in run.last_line(), run.story()
