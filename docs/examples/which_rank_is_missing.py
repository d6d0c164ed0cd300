"""A barrier that names the rank that did not come.

torchrun --standalone --nproc-per-node 2 docs/examples/which_rank_is_missing.py
"""

import time
from datetime import timedelta

import torch.distributed as dist


def name_missing_rank(seconds, group=None):
    """Waits for all ranks; rank 0 raises RuntimeError with the rank that did not come in time.

    With nccl, make a group for it: dist.new_group(backend="gloo").
    """
    dist.monitored_barrier(group, timeout=timedelta(seconds=seconds))


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep(2)  # Rank 1 does something else.
    else:
        try:
            name_missing_rank(seconds=1)
        except RuntimeError as error:
            print(str(error).splitlines()[0])
            assert "Rank 1" in str(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
