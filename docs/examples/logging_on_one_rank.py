"""Logs and a progress bar on one rank, with numbers of all ranks.

torchrun --standalone --nproc-per-node 2 docs/examples/logging_on_one_rank.py
"""

import logging
import sys

import torch
import torch.distributed as dist
from tqdm import tqdm


def set_up_logging(rank):
    """Rank 0 logs everything. The others report trouble, and each line names its rank."""
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(stream=sys.stdout, level=level, format=f"rank {rank}: %(message)s")


def train_one_epoch(batches, rank):
    """Logs the mean loss of all ranks. A batch is (loss, how many samples)."""
    totals = torch.zeros(2)
    for loss, count in tqdm(batches, disable=rank > 0 or None):  # None: where a terminal is
        if count == 0:
            logging.warning("an empty batch")
        totals += torch.tensor([loss * count, count])
    logging.info("this rank alone: %.4f", totals[0] / totals[1])
    dist.all_reduce(totals)  # On every rank, so never inside `if rank == 0`.
    logging.info("all ranks: %.4f", totals[0] / totals[1])


def reduce_on_rank_0_only(rank):
    """The mistake: rank 0's first all_reduce meets the next all_reduce of rank 1."""
    loss, images = torch.tensor(1.0 + rank), torch.tensor(100.0)
    if rank == 0:
        dist.all_reduce(loss)
        print(f"mistake: the loss of both is {loss:.0f}, in place of 3")
    dist.all_reduce(images)
    if rank == 1:
        dist.all_reduce(loss)  # Else rank 0 would wait in its second all_reduce.
    print(f"mistake, rank {rank}: the images of both are {images:.0f}, in place of 200")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    set_up_logging(rank)
    both = [[(4.0, 8), (2.0, 8), (2.0, 8)], [(2.0, 8), (1.0, 8), (0.0, 0)]]
    train_one_epoch(both[rank], rank)
    logging.info("one process: %.4f", sum(loss * count for loss, count in sum(both, [])) / 40)
    reduce_on_rank_0_only(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
