"""Rank 0 saves a checkpoint, and the other ranks load it only when it is complete.

torchrun --standalone --nproc-per-node 2 docs/examples/resume_checkpoint.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist


def save_on_rank_0(path, checkpoint):
    """Every rank must call this. When it returns, the file is complete."""
    if dist.get_rank() == 0:
        temporary = path.with_name(path.name + ".tmp")
        torch.save(checkpoint, temporary)
        temporary.replace(path)  # A run that is killed leaves the old file or the new file.
    dist.barrier()


def load(path):
    """Every rank reads the file, to the CPU. Use it only for files that you trust."""
    return torch.load(path, map_location="cpu", weights_only=True)


def try_to_load(path):
    try:
        return load(path)["weight"].tolist()
    except FileNotFoundError:
        return "FileNotFoundError"


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, src=0)  # All ranks use the folder of rank 0.
        path = Path(folders[0], "last.pt")
        if rank == 1:
            print(f"rank {rank}, too early: {try_to_load(path)}")
        dist.barrier()  # Rank 0 saves only after rank 1 has tried, as if the disk were slow.
        save_on_rank_0(path, {"weight": torch.ones(2)})
        print(f"rank {rank}, after save_on_rank_0: {try_to_load(path)}")
        dist.barrier()  # The folder must not go before all have loaded.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
