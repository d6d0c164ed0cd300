"""docs/patches/save_on_signal.diff: saves in mid-epoch, and resumes as if nothing had happened."""

import os
import re
import signal

import patches
import pytest
import torch
from launch import EPOCH, REPO, Launch
from slurm import BatchJob, Cluster

NAME = "save_on_signal"
SAVED = re.compile(r"^saved after step (\d+) of epoch (\d+)$", re.MULTILINE)


def load(path):
    return torch.load(path, weights_only=True)


def check_equal(path, other):
    """The same weights, statistics and optimizer state, to the bit."""
    ours, theirs = load(path), load(other)
    assert ours["epoch"] == theirs["epoch"] and ours["middle"] is theirs["middle"] is None
    for name, tensor in theirs["model"].items():
        assert torch.equal(ours["model"][name], tensor), name
    for number, state in theirs["optimizer"]["state"].items():
        buffer = ours["optimizer"]["state"][number]["momentum_buffer"]
        assert torch.equal(buffer, state["momentum_buffer"]), number


def read_metrics(text):
    keys = ("epoch", "loss", "train", "correct")
    return [tuple(match[key] for key in keys) for match in EPOCH.finditer(text)]


def start(folder, checkpoint, processes=2):
    """Trains by torchrun, with the synthetic images augmented as those of CIFAR-10 are."""
    script = patches.write_patched([NAME], folder)
    text, condition = script.read_text(), 'if args.dataset == "cifar10":\n            images'
    assert condition in text
    script.write_text(text.replace(condition, condition.replace("cifar10", "synthetic")))
    argv = ["torchrun", "--standalone", "--nproc-per-node", processes, script, "-e", "2"]
    argv += ["--dataset", "synthetic", "--checkpoint", checkpoint]
    return Launch([argv], folder / "output")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, number):
    """Augmented images, and the metrics of the epoch that was cut, are those of a whole run."""
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    with start(tmp_path, whole) as run:
        expected = read_metrics(run.succeeded(250).out)
        assert len(expected) == 2, run.story()
    with start(tmp_path, cut) as run:
        run.wait_for(lambda: cut.exists(), 90, "the first epoch")
        os.kill(run.pid_of(1), number)
        run.succeeded(250)
        step, epoch = map(int, SAVED.search(run.out).groups())
        assert load(cut)["epoch"] == epoch - 1 and load(cut)["middle"]["step"] == step
        metrics = read_metrics(run.out)
    with start(tmp_path, cut, processes=1) as run:
        assert 0 not in run.wait().codes, run.story()
        assert run.last_line().endswith("was saved in mid-epoch by 2 processes"), run.story()
    with start(tmp_path, cut) as run:
        out = run.succeeded(250).out
        assert f"after epoch {epoch - 1}/2 and step {step}\n" in out, run.story()
        assert metrics + read_metrics(out) == expected
    check_equal(cut, whole)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["the batch file's signal", "scontrol requeue"])
def test_requeued_job_resumes_in_mid_epoch(tmp_path, way):
    """On a real Slurm, with the lines that the page gives for a SETUP file."""
    page = (REPO / "docs" / "slurm.md").read_text()
    (tmp_path / "requeue.sh").write_text(
        re.search(r">requeue.sh <<'END'\n(.*?)END\n", page, re.DOTALL)[1]
    )
    script = patches.write_patched([NAME], tmp_path)
    cluster = Cluster(NODES="1", CPUS="4")
    env = {"SETUP": str(tmp_path / "requeue.sh"), "SCRIPT": str(script)}
    options = ("--dataset", "synthetic", "-e", "3", "-b", "16")
    whole, cut = (tmp_path / name for name in ("whole", "cut"))
    try:
        with BatchJob(cluster, whole, *options, before=("--nodes", "1"), env=env) as job:
            job.succeeded(240)
            expected, finished = read_metrics(job.out), job.number
        with BatchJob(cluster, cut, *options, before=("--nodes", "1"), env=env) as job:
            job.wait_for(lambda: read_metrics(job.out), "the first epoch", 120)
            if way == "scontrol requeue":
                cluster.ask("scontrol", "requeue", job.number)
            else:
                job.signal()
            job.start_again()
            job.succeeded(240)
            step, epoch = SAVED.search(job.out).groups()
            assert f"after epoch {int(epoch) - 1}/3 and step {step}\n" in job.out
            assert read_metrics(job.out) == expected, job.out
            check_equal(
                cut / "checkpoints" / job.number / "last.pt",
                whole / "checkpoints" / finished / "last.pt",
            )
    finally:
        cluster.stop()
