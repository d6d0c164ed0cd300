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


dist.init_process_group("gloo")
rank = dist.get_rank()
prepare_on_rank_0(lambda: time.sleep(2), timeout=timedelta(seconds=60))
print(f"rank {rank}: ready")
try:
    prepare_on_rank_0(lambda: time.sleep(2), timeout=timedelta(seconds=1))
    raise AssertionError("the barrier has not failed")
except RuntimeError as error:
    print(f"rank {rank}: the barrier with a short time-out: {type(error).__name__}")
dist.destroy_process_group()
