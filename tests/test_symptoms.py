"""Symptoms that the scripts themselves never show, each made here."""

import shutil
import subprocess
import sys

import pytest
import torch
from forked import run_forked_ranks
from launch import free_port, gave_up
from torch.utils.data import DistributedSampler

PROGRAM = """
import contextlib
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.BatchNorm1d(4))
    model(torch.ones(2, 4)).sum().backward()
    model.eval()
    {part}
    print(f"rank {{rank}} is through", flush=True)
    # Stays while the other waits, or that one would see a closed connection.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"through {{rank}}", "")
    with contextlib.suppress(RuntimeError):
        store.wait([f"through {{1 - rank}}"], timedelta(seconds=20))
        # Rank 0 has the store, so it leaves last.
        if rank == 1:
            store.set("rank 1 leaves", "")
        else:
            store.wait(["rank 1 leaves"], timedelta(seconds=20))

main()
"""
UNEQUAL_EVALUATION = "for _ in range(3 + rank): {model}(torch.ones(2, 4))"


def run_two(tmp_path, part):
    """Two ranks of PROGRAM; returns their statuses, what they print and what they complain of."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(part=part))
    return run_forked_ranks(path, 2, free_port(), tmp_path / "run")


@pytest.mark.parametrize("model", ("model", "model.module"))
def test_hang_in_evaluation(tmp_path, model):
    """Through DDP rank 1 waits for a batch that rank 0 does not have; through model.module not."""
    codes, out, err = run_two(tmp_path, UNEQUAL_EVALUATION.format(model=model))
    if model == "model.module":
        assert codes == [0, 0] and err == ""
    else:
        assert codes[1] == 1 and "rank 1 is through" not in out
        assert "in forward" in err
        assert gave_up("Timed out waiting 10000ms").search(err)


def test_hang_at_the_end(tmp_path):
    """Rank 0 alone calls a collective."""
    codes, out, err = run_two(tmp_path, "if rank == 0: dist.all_reduce(torch.ones(1))")
    assert codes == [1, 0] and out == "rank 1 is through\n"
    assert gave_up("Timed out waiting 10000ms").search(err) and "in all_reduce" in err


def test_every_epoch_has_the_same_order_without_set_epoch():
    sampler = DistributedSampler(range(100), 2, 0)
    assert list(sampler) == list(sampler)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_torchrun_is_not_found_but_its_module_is(tmp_path):
    command = [shutil.which("bash"), "-c", "torchrun --help"]
    run = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert "torchrun: command not found" in run.stderr
    command = [sys.executable, "-m", "torch.distributed.run", "--help"]
    assert "--nproc-per-node" in subprocess.check_output(command, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to find")
def test_torchrun_for_gpus_without_one(launch):
    run = launch([["torchrun", "--nproc-per-node", "gpu", "mnmc_ddp_env.py"]]).wait()
    assert run.codes == [1] and "ValueError: Cuda is not available." in run.err
