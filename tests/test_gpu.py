"""What only a GPU shows; skipped without one: bash scripts/test.sh -m gpu"""

import re

import patches
import pytest
import torch
import who_hangs
from launch import DDP, REPO, Launch, commands_for
from tiny_data import accept_any_cifar10, write_cifar10, write_mnist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SYNTHETIC = ("--dataset", "synthetic", "-e", "2")


@pytest.fixture(params=("1", "0"), ids=("nccl2", "nccl-legacy"))
def both_nccl(request, monkeypatch):
    """Since torch 2.15 nccl is another implementation. The variable brings back that of 2.14."""
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", request.param)


def learned(run):
    """The last epoch's line, of a run that learned and complained of nothing."""
    last = run.succeeded().epochs()[-1]
    assert last["test"] > 95 and last["count"] == 2000, run.story()
    assert run.own_err() == "", run.story()
    return last


@pytest.mark.parametrize(
    ("script", "options"), [*((script, ()) for script in DDP), ("mnmc_ddp_env.py", ("--sync-bn",))]
)
def test_nccl_with_one_process(launch, both_nccl, script, options):
    """By hand and under each launcher, and no warning is printed, from nccl neither."""
    run = launch(script, 1, *SYNTHETIC, *options)
    learned(run)
    assert run.inits() == [(0, 1, 0, "cuda:0", "nccl")], run.story()


def test_two_gloo_processes_share_a_gpu(launch):
    count = torch.cuda.device_count()
    run = launch("mnmc_ddp_env.py", 2, *SYNTHETIC, "--backend", "gloo")
    learned(run)
    assert [row[3] for row in run.inits()] == ["cuda:0", f"cuda:{1 % count}"], run.story()


def test_two_nccl_processes_want_two_gpus(launch, both_nccl):
    """With one they fail while they join, not in the training; with two they train."""
    run = launch("mnmc_ddp_env.py", 2, *SYNTHETIC).wait()
    if torch.cuda.device_count() > 1:
        learned(run)
    else:
        assert run.codes != [0] and run.out == "", run.story()
        # nccl 2.27 has the first text, nccl 2.30 the second.
        assert re.search("Duplicate GPU|Multiple Ranks are using the same GPU", run.err), (
            run.story()
        )


@pytest.mark.parametrize("script", ("snsc.py", "mnmc_ddp_env.py"))
def test_amp_learns_as_well_as_fp32(launch, script):
    options = ((), ("--amp",))
    fp32, amp = (launch(script, 1, *SYNTHETIC, *more).wait() for more in options)
    assert abs(learned(amp)["test"] - learned(fp32)["test"]) < 1
    losses = [[line["loss"] for line in run.epochs()] for run in (fp32, amp)]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("options", ((), ("--amp",)), ids=("fp32", "bf16"))
def test_who_hangs_reads_the_collectives_of_nccl(both_nccl, tmp_path, options):
    """Rank 0 comes to the barrier alone; the tool names the collectives and the ranks."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    script = patches.write_patched(["barrier_under_if"], tmp_path)
    command = ["torchrun", "--standalone", "--nproc-per-node", 2, REPO / "scripts/check_ddp.py"]
    command += [script, *SYNTHETIC, *options]
    with Launch([command], tmp_path / "output", cwd=tmp_path) as run:

        def report():
            notes = who_hangs.read_notes(tmp_path / "who_hangs")
            return who_hangs.report(notes) if notes else ""

        run.wait_for(lambda: " of nccl: not the same on all ranks" in report(), 120, "the report")
        assert "rank 0 waits in barrier" in report() or "rank 0 waits in all_reduce" in report()


@pytest.mark.parametrize("dataset", ("mnist", "cifar10"))
@pytest.mark.parametrize("options", ((), ("--amp",)), ids=("fp32", "bf16"))
def test_training_without_a_stride_warning(launch, tmp_path, dataset, options):
    """channels_last images and weights fit together with DDP's buckets."""
    write_cifar10(tmp_path / "data", per_file=16, test=11)
    write_mnist(tmp_path / "data", train=80, test=11)
    env = accept_any_cifar10(tmp_path / "site")
    common = ("--dataset", dataset, "--data-root", tmp_path / "data", "-e", "2", "-b", "16")
    run = launch("mnmc_ddp_env.py", 1, *common, *options, env=env).succeeded()
    assert run.own_err() == "", run.story()
    assert run.epochs()[-1]["count"] == 11


def test_checkpoints_go_from_gpu_to_cpu_and_back(launch, tmp_path):
    """Trained on the GPU, resumed without one, and again with it."""
    options = ("--dataset", "synthetic", "--checkpoint", tmp_path / "last.pt")
    without = {"CUDA_VISIBLE_DEVICES": ""}
    for epochs, script, env in ((1, "snsc.py", {}), (2, DDP[1], without), (3, DDP[1], {})):
        run = launch(commands_for(script, 1, *options, "-e", epochs), env=env).succeeded()
        assert [line["epoch"] for line in run.epochs()] == [epochs], run.story()
        assert run.own_err() == "", run.story()
        assert (" cpu" in run.out.splitlines()[0]) == (env is without), run.story()
    assert run.epochs()[-1]["test"] > 95


def test_data_parallel_on_what_is_there(launch):
    run = launch("snmc_dp.py", 1, *SYNTHETIC)
    learned(run)
    assert run.out.startswith("[init] cuda:0\n")
