"""A group of some of the ranks, and a collective in it.

torchrun --standalone --nproc-per-node 3 docs/examples/process_groups.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
outer = dist.new_group([0, 2])
if rank in (0, 2):
    tensor = torch.tensor([rank])
    dist.broadcast(tensor, src=2, group=outer)  # src is the rank in the world, not in the group
    print(f"rank {rank}: {dist.get_rank(outer)} in the group, broadcast gave {tensor.tolist()}")
    assert dist.get_rank(outer) == rank // 2 and tensor.tolist() == [2]
dist.barrier()  # Rank 1 waits: if it left now, ranks 0 and 2 could fail while they still connect.
dist.destroy_process_group()
