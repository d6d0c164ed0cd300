"""One run in TensorBoard and in Weights & Biases, and not one for each rank.

    torchrun --standalone --nproc-per-node 2 docs/examples/tensorboard_and_wandb.py

Writes into the folder runs. A library that is not installed is left out. To try both without an
account: pip install tensorboard wandb, then set WANDB_MODE=offline.
"""

import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist


def open_tensorboard(folder, rank):
    """Returns TensorBoard's writer on rank 0, and None on the other ranks."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder) if rank == 0 else None


def open_wandb(rank, **settings):
    """Returns a run of Weights & Biases; on the ranks above 0 its log() does nothing."""
    import wandb

    return wandb.init(mode=None if rank == 0 else "disabled", **settings)


def main():
    dist.init_process_group("gloo")
    rank, writer, run = dist.get_rank(), None, None
    with contextlib.suppress(ModuleNotFoundError):
        writer = open_tensorboard("runs", rank)
    if "WANDB_MODE" in os.environ:
        with contextlib.suppress(ModuleNotFoundError):
            run = open_wandb(rank, project="ddp", dir="runs")
    for epoch in range(2):
        loss = torch.tensor(1.0 + rank - epoch / 2)
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)  # On every rank, before rank 0 logs.
        if writer:
            writer.add_scalar("loss", loss.item(), epoch)
        if run:
            run.log({"loss": loss.item()}, step=epoch)
        if rank == 0:
            print(f"epoch {epoch}: logged {loss:.2f}")
    if writer:
        writer.close()
    if run:
        run.finish()
    dist.barrier()
    runs = [*Path("runs").glob("events*"), *Path("runs").glob("wandb/*run-*")]
    assert len(runs) <= 2, runs  # one for each library
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
