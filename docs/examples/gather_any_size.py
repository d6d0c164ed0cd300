"""all_gather of tensors whose sizes no other rank knows: the sizes first, then the padded tensors.

torchrun --standalone --nproc-per-node 2 docs/examples/gather_any_size.py
"""

import math

import torch
import torch.distributed as dist


def gather_any_size(tensor):
    """Returns a list with the tensor of each rank, in the order of the ranks.

    The tensors have one dtype and equally many dimensions; their sizes may differ. Every rank must
    call it. The list has no gradients.
    """
    size = torch.tensor(tensor.shape, device=tensor.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    sizes = [size.tolist() for size in sizes]
    padded = tensor.new_zeros(max(math.prod(size) for size in sizes))
    padded[: tensor.numel()] = tensor.flatten()
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [part[: math.prod(size)].view(size) for part, size in zip(parts, sizes, strict=True)]


dist.init_process_group("gloo")
rank = dist.get_rank()
parts = gather_any_size(torch.full([(3, 2), (5, 4)][rank], float(rank)))
print(f"rank {rank}: {[tuple(part.shape) for part in parts]}")
assert parts[0].equal(torch.zeros(3, 2)) and parts[1].equal(torch.ones(5, 4))
dist.destroy_process_group()
