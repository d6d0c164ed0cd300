"""Sequences of different lengths: batches of at most so many tokens, alike on all ranks of a step.

torchrun --standalone --nproc-per-node 2 docs/examples/similar_lengths.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler


def make_batches(lengths, max_tokens, epoch, rank, world_size, seed=0):
    """Returns a rank's batches in an epoch, lists of indices into lengths, an int64 tensor (N,).

    Each batch has at most max_tokens tokens with its padding, or is one longer sequence. All ranks
    get equally many batches. There must be at least one for each rank.
    """
    generator = torch.Generator().manual_seed(seed + epoch)  # the same on all ranks
    mixed = torch.randperm(len(lengths), generator=generator)
    by_length = mixed[lengths[mixed].argsort(stable=True)].tolist()  # Equal lengths stay mixed.
    batches = [[]]
    for i in by_length:  # From short to long, so that i is the longest of its batch.
        if batches[-1] and (len(batches[-1]) + 1) * lengths[i] > max_tokens:
            batches.append([])
        batches[-1].append(i)
    batches += batches[: -len(batches) % world_size]  # Some are repeated, so that all ranks step.
    steps = torch.arange(len(batches)).view(-1, world_size)  # (steps, ranks)
    return [batches[i] for i in steps[torch.randperm(len(steps), generator=generator), rank]]


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
lengths = torch.randint(4, 513, (4000,), generator=torch.Generator().manual_seed(0))
shard = torch.tensor(list(DistributedSampler(lengths, num_replicas=world_size, rank=rank)))
batches = make_batches(lengths, 8192, 0, rank, world_size)
for name, ways in (("32 at random", shard.split(32)), ("make_batches", batches)):
    padded = torch.stack([len(batch) * lengths[batch].max() for batch in ways])
    padding = 1 - sum(lengths[batch].sum() for batch in ways) / padded.sum()
    slowest = padded.clone()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # In each step all wait for this rank.
    waiting = 1 - padded.sum() / slowest.sum()
    print(f"rank {rank}: {name}: {padding:.0%} padding, {waiting:.0%} waiting")
assert padding < 0.05 and waiting < 0.05 and padded.max() <= 8192
both = [None] * world_size
dist.all_gather_object(both, batches)
assert len(both[0]) == len(both[1])
assert {number for part in both for batch in part for number in batch} == set(range(4000))
dist.destroy_process_group()
