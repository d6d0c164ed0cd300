"""Collectives with one rank at the beginning or at the end, and a group of some of the ranks.

torchrun --standalone --nproc-per-node 3 docs/examples/collectives.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

tensor = torch.tensor([rank])
dist.broadcast(tensor, src=2)
print(f"rank {rank}: 1. broadcast gave {tensor.tolist()}")
assert tensor.tolist() == [2]

tensor = torch.tensor([rank + 1])
dist.reduce(tensor, dst=0)  # on the other ranks, the tensor is undefined afterwards
if rank == 0:
    print(f"rank {rank}: 2. reduce gave {tensor.tolist()}")
    assert tensor.tolist() == [1 + 2 + 3]

parts = [torch.tensor([10, i]) for i in range(world_size)] if rank == 0 else None
tensor = torch.zeros(2, dtype=torch.int64)
dist.scatter(tensor, parts, src=0)
print(f"rank {rank}: 3. scatter gave {tensor.tolist()}")
assert tensor.tolist() == [10, rank]

parts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)] if rank == 0 else None
dist.gather(torch.tensor([rank * rank]), parts, dst=0)
if rank == 0:
    print(f"rank {rank}: 4. gather gave {[part.tolist() for part in parts]}")
    assert torch.cat(parts).tolist() == [0, 1, 4]

outer = dist.new_group([0, 2])
if rank in (0, 2):
    number = torch.tensor([rank])
    dist.broadcast(number, src=2, group=outer)  # src is the rank in the world, not in the group
    print(f"rank {rank}: {dist.get_rank(outer)} in the group, broadcast gave {number.tolist()}")
    assert dist.get_rank(outer) == rank // 2 and number.tolist() == [2]
dist.barrier()  # Rank 1 waits: if it left now, ranks 0 and 2 could fail while they still connect.
dist.destroy_process_group()
