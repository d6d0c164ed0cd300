"""A barrier that names the rank that did not come.

torchrun --standalone --nproc-per-node 2 docs/examples/which_rank_is_missing.py
"""

import time
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(2)  # Rank 1 does something else.
else:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=1))
    except RuntimeError as error:
        print(str(error).splitlines()[0])
dist.destroy_process_group()
