"""Split and order need the same seed on all ranks; dropout needs another on each.

torchrun --standalone --nproc-per-node 2 docs/examples/random_seeds.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, random_split


def prepare(data, lengths, seed):
    """Returns (training set, test set, sampler), the same split on all ranks."""
    torch.manual_seed(seed)
    train_set, test_set = random_split(data, lengths)
    return train_set, test_set, DistributedSampler(train_set, seed=seed)


def start_epoch(sampler, seed, epoch):
    """Gives each rank random numbers of its own for dropout and augmentation."""
    sampler.set_epoch(epoch)
    torch.manual_seed(seed + epoch * dist.get_world_size() + dist.get_rank())


def gather(value):
    """Returns the value of each rank, in the order of the ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


dist.init_process_group("gloo")
for seed in (7, 7 + dist.get_rank()):  # The second is a mistake: a seed for each rank.
    train_set, test_set, sampler = prepare(range(8), [6, 2], seed)
    tested, trained = gather(set(test_set)), gather({train_set[index] for index in sampler})
    print(f"seed {seed}: rank 0 tests {tested[0]}, rank 1 trains on {trained[1]}")
    assert bool(tested[0] & trained[1]) == (seed != 7 or gather(seed)[1] != 7)
numbers = gather(torch.rand(1).item())
dist.destroy_process_group()
