"""Messages between two ranks: send and recv, and a batch of isend and irecv.

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
dist.destroy_process_group()
