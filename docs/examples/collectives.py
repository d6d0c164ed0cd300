"""Messages between ranks: send and recv, collectives, and a group of some ranks.

torchrun --standalone --nproc-per-node 3 docs/examples/collectives.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

# send and recv return when the caller may use the tensor again.
received = torch.zeros(2)
if rank == 0:
    dist.send(torch.tensor([1.0, 2.0]), dst=1)
elif rank == 1:
    dist.recv(received, src=0)
    assert received.tolist() == [1, 2]

# A batch starts its calls together. Leave the tensors alone until all its requests are through.
left, right = (rank - 1) % world_size, (rank + 1) % world_size
numbers = torch.tensor([10.0 * rank, 10.0 * rank + 1])
calls = [dist.P2POp(dist.isend, numbers, right), dist.P2POp(dist.irecv, received, left)]
for request in dist.batch_isend_irecv(calls):
    request.wait()
assert received.tolist() == [10 * left, 10 * left + 1]

tensor = torch.tensor([rank])
dist.broadcast(tensor, src=2)
assert tensor.tolist() == [2]

tensor = torch.tensor([rank + 1])
dist.reduce(tensor, dst=0)  # on the other ranks, the tensor is undefined afterwards
assert rank > 0 or tensor.tolist() == [1 + 2 + 3]

parts = [torch.tensor([10, i]) for i in range(world_size)] if rank == 0 else None
tensor = torch.zeros(2, dtype=torch.int64)
dist.scatter(tensor, parts, src=0)
assert tensor.tolist() == [10, rank]

parts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)] if rank == 0 else None
dist.gather(torch.tensor([rank * rank]), parts, dst=0)
assert rank > 0 or torch.cat(parts).tolist() == [0, 1, 4]

# The names since torch 2.13, and the older ones
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
numbers = torch.tensor([1, 2, 3]) + 10 * rank

tensor = numbers.clone()  # all_reduce writes the sum into its tensor
work = dist.all_reduce(tensor, async_op=True)
# Here the script can compute something that does not need the tensor.
work.wait()
assert tensor.tolist() == [33, 36, 39]

parts = [torch.zeros_like(numbers) for _ in range(world_size)]
dist.all_gather(parts, numbers)
assert torch.cat(parts).tolist() == [1, 2, 3, 11, 12, 13, 21, 22, 23]

whole = torch.zeros(3 * world_size, dtype=torch.int64)
all_gather_single(whole, numbers)
assert whole.equal(torch.cat(parts))

part = torch.zeros(1, dtype=torch.int64)
reduce_scatter_single(part, numbers)
assert part.tolist() == [[33], [36], [39]][rank]

swapped = torch.zeros_like(numbers)
dist.all_to_all_single(swapped, numbers)
assert swapped.tolist() == [[1, 11, 21], [2, 12, 22], [3, 13, 23]][rank]

objects = [None] * world_size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]

outer = dist.new_group([0, 2])
if rank in (0, 2):
    number = torch.tensor([rank])
    dist.broadcast(number, src=2, group=outer)  # src is the rank in the world, not in the group
    assert dist.get_rank(outer) == rank // 2 and number.tolist() == [2]
dist.barrier()  # Rank 1 waits for the others, and all leave together.
print(f"rank {rank}: each call gave what its assert says")
dist.destroy_process_group()
