"""WeightedRandomSampler for several ranks: all draw the same images, each takes its share.

torchrun --standalone --nproc-per-node 2 docs/examples/weighted_sampling.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset


def draw_images(weights, epoch, rank, world_size, seed=0):
    """Returns a list of this rank's image numbers in an epoch, drawn by float weights (N,)."""
    generator = torch.Generator().manual_seed(seed + epoch)  # the same on all ranks
    count = len(weights) // world_size * world_size  # as many images on each rank
    # In float32 small weights get lost in the sum of millions.
    drawn = torch.multinomial(weights.double(), count, replacement=True, generator=generator)
    return drawn[rank::world_size].tolist()


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
labels = torch.tensor([0] * 900 + [1] * 100)
weights = 1 / torch.bincount(labels)[labels]  # Both classes are drawn as often.
drawn, later = (draw_images(weights, epoch, rank, world_size) for epoch in range(2))
loader = DataLoader(TensorDataset(labels), batch_size=50, sampler=drawn)
share = torch.cat([batch for (batch,) in loader]).float().mean()
print(f"rank {rank}: {drawn[:6]}, {100 * share:.0f} % of class 1")
assert drawn != later and 0.4 < share < 0.6
assert drawn == draw_images(weights, 0, 0, 1)[rank::world_size]  # a share of one process's
dist.barrier()  # Otherwise a rank could leave before the other one is connected.
dist.destroy_process_group()
