"""Weights, split and order need the same seed on all ranks; dropout needs another on each.

torchrun --standalone --nproc-per-node 2 docs/examples/random_seeds.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, random_split


def prepare(build_model, data, lengths, seed):
    """Returns (model, training set, test set, sampler), the same split on all ranks."""
    torch.manual_seed(seed)
    model = build_model()
    train_set, test_set = random_split(data, lengths)
    return model, train_set, test_set, DistributedSampler(train_set, seed=seed)


def start_epoch(sampler, seed, epoch):
    """Gives each rank random numbers of its own for dropout and augmentation."""
    sampler.set_epoch(epoch)
    torch.manual_seed(seed + epoch * dist.get_world_size() + dist.get_rank())


def gather(value):
    """Returns the value of each rank, in the order of the ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def build_model():
    """Returns a model whose weights differ with the seed."""
    return torch.nn.Linear(1, 2)


def draw_mask():
    """Returns which of eight numbers dropout keeps."""
    return torch.nn.functional.dropout(torch.ones(8)).bool().int().tolist()


def show(name, seed):
    """Prints what each rank tests and trains on, and what its dropout keeps."""
    _, train_set, test_set, sampler = prepare(build_model, range(8), [6, 2], seed)
    rows = {
        "tests": sorted(test_set),
        "trains on": sorted(train_set[index] for index in sampler),
        "dropout": draw_mask(),
    }
    start_epoch(sampler, seed, epoch=1)
    rows["dropout after start_epoch"] = draw_mask()
    for number, (row, value) in enumerate(rows.items(), start=1):
        values = gather(value)
        if dist.get_rank() == 0:
            print(f"{name}: {number} {row}", *values)


def main():
    show("a seed for each rank", seed=3 + dist.get_rank())
    show("one seed", seed=3)


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
