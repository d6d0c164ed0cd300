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


def draw_mask():
    """Returns which of eight numbers dropout keeps."""
    return torch.nn.functional.dropout(torch.ones(8)).bool().int().tolist()


def draw(seed):
    """Returns what each rank tests and trains on, and its masks before and after start_epoch."""
    train_set, test_set, sampler = prepare(range(8), [6, 2], seed)
    trains_on, mask = {train_set[index] for index in sampler}, draw_mask()
    start_epoch(sampler, seed, epoch=1)
    return [gather(value) for value in (set(test_set), trains_on, mask, draw_mask())]


def main():
    tests, trains_on, masks, later_masks = draw(seed=7)
    assert tests[0] == tests[1] and not tests[0] & (trains_on[0] | trains_on[1])
    assert masks[0] == masks[1]  # not what dropout needs
    assert later_masks[0] != later_masks[1]
    tests, trains_on, _, _ = draw(seed=7 + dist.get_rank())  # A mistake: a seed for each rank
    assert tests[0] & trains_on[1]
    if dist.get_rank() == 0:
        print(
            f"with a seed for each rank, rank 0 tests {tests[0]}, rank 1 trains on {trains_on[1]}"
        )


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
