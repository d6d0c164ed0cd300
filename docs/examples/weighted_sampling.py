"""WeightedRandomSampler for several ranks: all draw the same images, each takes its share.

torchrun --standalone --nproc-per-node 2 docs/examples/weighted_sampling.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def draw_images(weights, epoch, rank, world_size, seed=0):
    """Returns a list of this rank's image numbers in an epoch, drawn by float weights (N,)."""
    generator = torch.Generator().manual_seed(seed + epoch)  # the same on all ranks
    count = len(weights) // world_size * world_size  # as many images on each rank
    drawn = torch.multinomial(weights, count, replacement=True, generator=generator)
    return drawn[rank::world_size].tolist()


def make_loader(dataset, weights, epoch, batch_size):
    """Returns the loader of an epoch; make another one for each epoch."""
    sampler = draw_images(weights, epoch, dist.get_rank(), dist.get_world_size())
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def main():
    rank = dist.get_rank()
    labels = torch.tensor([0] * 900 + [1] * 100)
    weights = 1 / torch.bincount(labels)[labels]  # Both classes are drawn as often.
    torch.manual_seed(0)
    print(f"rank {rank}: mistake {list(WeightedRandomSampler(weights, 500))[:6]}")
    loaders = [make_loader(TensorDataset(labels), weights, epoch, 50) for epoch in range(2)]
    draws = [loader.sampler for loader in loaders]
    share = torch.cat([batch for (batch,) in loaders[0]]).float().mean()
    print(f"rank {rank}: make_loader {draws[0][:6]}, {100 * share:.0f} % of class 1")
    assert draws[0] != draws[1] and 0.4 < share < 0.6
    whole = draw_images(weights, 0, 0, 1)  # what one process would draw
    assert draws[0] == whole[rank :: dist.get_world_size()]


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
