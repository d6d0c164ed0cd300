"""Opens pdb in one rank, while the others wait.

torchrun --standalone --nproc-per-node 2 docs/examples/debug_one_rank.py         # without pdb
torchrun --standalone --nproc-per-node 2 docs/examples/debug_one_rank.py --stop  # up, p total, c
"""

import sys

import torch
import torch.distributed as dist


def add_up(value, stop_rank=None):
    """Returns the sum of a number over all ranks; opens pdb in one rank before it."""
    total = torch.tensor(float(value))
    if stop_rank is not None:
        dist.breakpoint(rank=stop_rank)  # All ranks must call it: the others wait in a barrier.
    dist.all_reduce(total)
    return total.item()


def main():
    dist.init_process_group("gloo")
    total = add_up(dist.get_rank() + 1, stop_rank=1 if "--stop" in sys.argv else None)
    print(f"rank {dist.get_rank()}: {total:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
