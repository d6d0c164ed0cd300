"""The operations that an all_reduce can make.

torchrun --standalone --nproc-per-node 3 docs/examples/reductions.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
    dtype = torch.float32 if name == "AVG" else torch.int64
    tensor = torch.tensor([1, 3, 6], dtype=dtype) + rank
    dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
    if rank == 0:
        print(f"{name} of [1, 3, 6], [2, 4, 7], [3, 5, 8]: {tensor.tolist()}")
dist.destroy_process_group()
