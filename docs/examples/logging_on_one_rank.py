"""Logs, TensorBoard and Weights & Biases on one rank, with numbers of all ranks.

    torchrun --standalone --nproc-per-node 2 docs/examples/logging_on_one_rank.py

Writes into the folder runs. A library that is not installed is left out. To try both without an
account: pip install tensorboard wandb, then set WANDB_MODE=offline.
"""

import contextlib
import logging
import os
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


def open_tensorboard(folder, rank):
    """Returns TensorBoard's writer on rank 0, and None on the other ranks."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder) if rank == 0 else None


def open_wandb(rank, **settings):
    """Returns a run of Weights & Biases; on the ranks above 0 its log() does nothing."""
    import wandb

    return wandb.init(mode=None if rank == 0 else "disabled", **settings)


def reduce_on_rank_0_only(rank):
    """The mistake: rank 0's first all_reduce meets the next all_reduce of rank 1."""
    loss, images = torch.tensor(1.0 + rank), torch.tensor(100.0)
    if rank == 0:
        dist.all_reduce(loss)
        assert loss == 1 + 100  # in place of 1 + 2
    dist.all_reduce(images)
    if rank == 1:
        dist.all_reduce(loss)  # Else rank 0 would wait in its second all_reduce.
    assert images != 200


dist.init_process_group("gloo")
rank = dist.get_rank()
# Rank 0 logs everything. The others report trouble, and each line names its rank.
level = logging.INFO if rank == 0 else logging.WARNING
logging.basicConfig(stream=sys.stdout, level=level, format=f"rank {rank}: %(message)s")
both = [[(4.0, 8), (2.0, 8), (2.0, 8)], [(2.0, 8), (1.0, 8), (float("nan"), 0)]]
loss = train_one_epoch(both[rank], rank)
assert abs(loss - 88 / 40) < 1e-6  # The mean of rank 0 alone is 64 / 24.
with contextlib.suppress(ModuleNotFoundError):
    if writer := open_tensorboard("runs", rank):
        writer.add_scalar("loss", loss, 0)
        writer.close()
if "WANDB_MODE" in os.environ:
    run = open_wandb(rank, project="ddp", dir="runs")
    run.log({"loss": loss}, step=0)
    run.finish()
reduce_on_rank_0_only(rank)
dist.destroy_process_group()
