"""Collectives that begin and end on all ranks: all_reduce, all_gather, reduce_scatter, all_to_all.

torchrun --standalone --nproc-per-node 2 docs/examples/more_collectives.py
"""

import torch
import torch.distributed as dist

# The names since torch 2.13, and the older ones
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
numbers = torch.tensor([1, 2]) + 10 * rank

tensor = numbers.clone()  # all_reduce writes the sum into its tensor
work = dist.all_reduce(tensor, async_op=True)
# Here the script can compute something that does not need the tensor.
work.wait()
print(f"rank {rank}: 1. all_reduce gave {tensor.tolist()}")
assert tensor.tolist() == [12, 14]

parts = [torch.zeros_like(numbers) for _ in range(world_size)]
dist.all_gather(parts, numbers)
print(f"rank {rank}: 2. all_gather gave {[part.tolist() for part in parts]}")
assert torch.cat(parts).tolist() == [1, 2, 11, 12]

whole = torch.zeros(2 * world_size, dtype=torch.int64)
all_gather_single(whole, numbers)
print(f"rank {rank}: 3. all_gather_single gave {whole.tolist()}")
assert whole.tolist() == [1, 2, 11, 12]

part = torch.zeros(1, dtype=torch.int64)
reduce_scatter_single(part, numbers)
print(f"rank {rank}: 4. reduce_scatter_single gave {part.tolist()}")
assert part.tolist() == [[12], [14]][rank]

swapped = torch.zeros_like(numbers)
dist.all_to_all_single(swapped, numbers)
print(f"rank {rank}: 5. all_to_all_single gave {swapped.tolist()}")
assert swapped.tolist() == [[1, 11], [2, 12]][rank]

objects = [None] * world_size
dist.all_gather_object(objects, {"rank": rank})
print(f"rank {rank}: 6. all_gather_object gave {objects}")
assert objects == [{"rank": 0}, {"rank": 1}]
dist.destroy_process_group()
