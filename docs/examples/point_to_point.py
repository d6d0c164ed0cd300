"""Messages between two ranks: send and recv, a batch of isend and irecv, and tags.

torchrun --standalone --nproc-per-node 2 docs/examples/point_to_point.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
received = torch.zeros(2)

# send and recv return when the caller may use the tensor again.
if rank == 0:
    dist.send(torch.tensor([1.0, 2.0]), dst=1)
else:
    dist.recv(received, src=0)
    print(f"rank {rank}: 1. recv gave {received.tolist()}")
    assert received.tolist() == [1, 2]

# A batch starts its calls together. Leave the tensors alone until all its requests are through.
numbers = torch.tensor([10.0 * rank, 10.0 * rank + 1])
other = 1 - rank
calls = [dist.P2POp(dist.isend, numbers, other), dist.P2POp(dist.irecv, received, other)]
for request in dist.batch_isend_irecv(calls):
    request.wait()
print(f"rank {rank}: 2. irecv gave {received.tolist()}")
assert received.tolist() == [10 * other, 10 * other + 1]

# A tag tells messages apart. Rank 1 asks for the second message first.
first, second = torch.tensor([1.0]), torch.tensor([2.0])
if rank == 0:
    for request in [dist.isend(first, dst=1, tag=1), dist.isend(second, dst=1, tag=2)]:
        request.wait()
else:
    dist.recv(received[:1], src=0, tag=2)
    dist.recv(received[1:], src=0, tag=1)
    print(f"rank {rank}: 3. tag 2 gave {received[0].item()}, tag 1 gave {received[1].item()}")
    assert received.tolist() == [2, 1]
dist.destroy_process_group()
