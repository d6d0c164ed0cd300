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
rank = dist.get_rank()
train_set, test_set, sampler = prepare(range(8), [6, 2], seed=7)
tested, trained = gather(set(test_set)), gather({train_set[i] for i in sampler})
assert tested[0] == tested[1] and not tested[0] & (trained[0] | trained[1])
before = gather(torch.rand(1).item())
start_epoch(sampler, seed=7, epoch=1)
after = gather(torch.rand(1).item())
assert before[0] == before[1] and after[0] != after[1]  # Dropout needs different numbers.

# A mistake: a seed for each rank.
train_set, test_set, sampler = prepare(range(8), [6, 2], seed=7 + rank)
tested, trained = gather(set(test_set)), gather({train_set[i] for i in sampler})
print(f"rank {rank}: rank 0 tests {tested[0]}, rank 1 trains on {trained[1]}")
assert tested[0] & trained[1]
dist.destroy_process_group()
