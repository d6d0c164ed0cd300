"""The accuracies on the page on performance are those that the scripts print."""

import json
import signal

import pytest
from launch import REPO, page_commands

COMMANDS = page_commands("docs/performance.md", "Accuracy as processes are added")
COMMANDS += page_commands("docs/slow_network.md", "What the hooks cost in accuracy")


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_accuracies_are_those_of_the_script(launch, tmp_path):
    """The page's three commands in small; each of the three ways, and one run by hand."""
    import accuracy

    path = tmp_path / "accuracy.json"
    small = f"--dataset synthetic --processes 2 --seeds 3 --epochs 1 --json {path}"
    commands = "\n".join(f"{command} {small}" for command in COMMANDS)
    run = launch([["bash", "-ec", commands]]).succeeded(200)
    rows = json.loads(path.read_text())["rows"]
    found = [[row[n] for n in ("way", "processes", "batch_size", "steps", "seed")] for row in rows]
    assert found == [
        ["DDP", 2, 128, 40, 3],  # Of 10,000 images
        ["DDP", 2, 64, 79, 3],
        ["bf16 hook", 2, 64, 79, 3],
        ["PowerSGD", 2, 64, 79, 3],
    ]
    assert [f"{row['accuracy']:.2f}" in run.out for row in rows] == [True] * 4, run.story()
    options = ("--dataset", "synthetic", "-e", 1, "-b", 128, "--seed", 3)
    threads = {"OMP_NUM_THREADS": str(max(1, accuracy.count_cores() // 2))}
    by_hand = launch("mnmc_ddp_env.py", 2, *options, env=threads).succeeded().epochs()
    assert rows[0]["accuracy"] == by_hand[0]["test"]
    assert all(row["accuracy"] > 95 for row in rows)


def test_ways_have_the_hooks_of_their_patches(tmp_path):
    import accuracy

    assert accuracy.write_script("DDP", tmp_path) == REPO / "mnmc_ddp_env.py"
    for way, hook in (("bf16 hook", "bf16_compress_hook"), ("PowerSGD", "powerSGD_hook")):
        assert f"hook={hook})" in accuracy.write_script(way, tmp_path).read_text()


def test_seeds_of_another_call_stay_in_the_file(tmp_path):
    import common

    for seed in (0, 1, 0):
        common.add_rows(tmp_path / "file.json", [{"seed": seed, "accuracy": seed + 90}], ["seed"])
    found = json.loads((tmp_path / "file.json").read_text())
    assert [row["seed"] for row in found["rows"]] == [1, 0]
    other = (tmp_path / "file.json").read_text().replace(found["machine"], "an abacus")
    (tmp_path / "file.json").write_text(other)
    with pytest.raises(SystemExit, match="another machine: an abacus"):
        common.add_rows(tmp_path / "file.json", [], ["seed"])


@pytest.mark.slow
def test_stopped_measurement_leaves_no_rank(launch):
    command = ["python", "scripts/measure/accuracy.py", "--dataset", "synthetic", "--epochs", 1000]
    run = launch([[*command, "--processes", 2]])
    run.wait_for(lambda: len(run.pids()) >= 4, 60, "torchrun and two ranks")
    run.processes[0].send_signal(signal.SIGTERM)
    assert run.wait(60).codes == [143], run.story()
    run.wait_for(lambda: not run.pids(), 60, "all processes to be gone")


@pytest.mark.slow
def test_failed_training_and_wrong_sizes_are_said(launch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    command = ["python", REPO / "scripts/measure/accuracy.py", "--processes", 1, "--seeds", 0]
    run = launch([[*command, "--data-root", tmp_path / "file"]]).wait()
    last = run.err.strip().splitlines()[-1]  # below torchrun's page about the failure
    assert run.codes == [1] and last.startswith("the training failed: "), run.story()
    run = launch([[*command, "--global-batch-size", 3, "--processes", 2]]).wait()
    assert run.codes == [2] and "must be a multiple" in run.last_line(), run.story()
