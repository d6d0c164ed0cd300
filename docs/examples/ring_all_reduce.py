"""A ring all-reduce, from messages between neighbours.

torchrun --standalone --nproc-per-node 4 docs/examples/ring_all_reduce.py
"""

import torch
import torch.distributed as dist


def ring_all_reduce(tensor):
    """Makes a tensor of one dimension the sum over all ranks; returns the bytes this rank sent."""
    rank, world_size, sent = dist.get_rank(), dist.get_world_size(), 0
    pieces = tensor.tensor_split(world_size)  # Views: a change of a piece changes the tensor.
    for step in range(2 * (world_size - 1)):
        outgoing = pieces[(rank - step) % world_size]
        incoming = pieces[(rank - step - 1) % world_size]
        received = torch.empty_like(incoming)
        send = dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
        if step < world_size - 1:
            incoming += received  # At the end of this half, each rank has the sum of one piece.
        else:
            incoming.copy_(received)  # The finished pieces go round.
        sent += outgoing.nbytes
    return sent


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
tensor = torch.randn(840)  # 840 can be cut into 2 to 8 equal pieces.
expected = tensor.clone()
dist.all_reduce(expected)
sent = ring_all_reduce(tensor)
torch.testing.assert_close(tensor, expected)
print(f"rank {rank}: equal, sent {sent / tensor.nbytes} times the {tensor.nbytes} bytes")
assert sent == 2 * (world_size - 1) / world_size * tensor.nbytes
dist.destroy_process_group()
