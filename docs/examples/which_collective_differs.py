"""torch compares the ranks' collectives before each call, and says what differs.

torchrun --standalone --nproc-per-node 2 docs/examples/which_collective_differs.py
"""

import os

import torch
import torch.distributed as dist


def compare_all_reduce(tensor):
    """Sums a tensor over all ranks; raises RuntimeError where its shape or dtype differs."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG=DETAIL from outside
    dist.init_process_group("gloo")
    dist.all_reduce(tensor)


def main():
    rank = int(os.environ["RANK"])
    try:
        compare_all_reduce(torch.ones(2 + rank))
    except RuntimeError as error:
        print(f"rank {rank}:", str(error).split(". ")[0])
        print(f"rank {rank}:", str(error).split("aspects:")[1].strip())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
