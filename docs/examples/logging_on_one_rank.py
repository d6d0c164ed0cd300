"""Logs on one rank, with numbers of all ranks.

torchrun --standalone --nproc-per-node 2 docs/examples/logging_on_one_rank.py
"""

import logging
import sys

import torch
import torch.distributed as dist
from tqdm import tqdm


def train_one_epoch(batches, rank):
    """Logs and returns the mean loss of all ranks. A batch is (loss, how many samples)."""
    totals = torch.zeros(2)
    for loss, count in tqdm(batches, leave=False, disable=rank > 0):
        if count == 0:
            logging.warning("an empty batch")
            continue  # Its mean loss is nan, and so would be that of the epoch.
        totals += torch.tensor([loss * count, count])
    dist.all_reduce(totals)  # On every rank, so never inside `if rank == 0`.
    loss = (totals[0] / totals[1]).item()
    logging.info("train loss %.4f", loss)
    return loss


dist.init_process_group("gloo")
rank = dist.get_rank()
# Rank 0 logs everything. The others report trouble, and each line names its rank.
level = logging.INFO if rank == 0 else logging.WARNING
logging.basicConfig(stream=sys.stdout, level=level, format=f"rank {rank}: %(message)s")
both = [[(4.0, 8), (2.0, 8), (2.0, 8)], [(2.0, 8), (1.0, 8), (float("nan"), 0)]]
loss = train_one_epoch(both[rank], rank)
assert abs(loss - 88 / 40) < 1e-6  # The mean of rank 0 alone is 64 / 24.
dist.destroy_process_group()
