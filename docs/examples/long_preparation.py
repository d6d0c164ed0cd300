"""Rank 0 prepares data for longer than the time-out of the process group.

torchrun --standalone --nproc-per-node 2 docs/examples/long_preparation.py
"""

import time
from datetime import timedelta

import torch.distributed as dist


def prepare_on_rank_0(prepare, timeout):
    """Rank 0 calls prepare() while the others wait for up to timeout, a timedelta."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    if dist.get_rank() == 0:
        prepare()
    dist.barrier(group=group)
    dist.destroy_process_group(group)


def wait_for_rank_0(prepare, group):
    """The usual way, which fails when prepare() takes longer than the group's time-out."""
    if dist.get_rank() == 0:
        prepare()
    try:
        dist.barrier(group=group)
    except RuntimeError:
        return "the barrier failed"
    return "ready"


def prepare():
    time.sleep(2)  # hours, where real data is unpacked


def main():
    rank = dist.get_rank()
    prepare_on_rank_0(prepare, timeout=timedelta(seconds=60))
    usual = dist.new_group(timeout=timedelta(seconds=1))  # in place of ten or thirty minutes
    state = wait_for_rank_0(prepare, usual)
    print(f"rank {rank}: prepare_on_rank_0: ready; usual group: {state}")
    assert state == "the barrier failed"
    dist.barrier()


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
