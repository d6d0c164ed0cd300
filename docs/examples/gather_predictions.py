"""The predictions of all ranks, in the order of the data set, for AUC or retrieval.

torchrun --standalone --nproc-per-node 3 docs/examples/gather_predictions.py
"""

import torch
import torch.distributed as dist


def gather_predictions(local, count):
    """Returns the predictions of all ranks, (count, ...), in the order of the data set.

    local has those of this rank, (n, ...). Sample i is on rank i % W at place i // W.
    """
    world_size = dist.get_world_size()
    longest = -(-count // world_size)  # rounded up
    padded = local.new_zeros(longest, *local.shape[1:])
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded)
    return torch.stack(parts, dim=1).flatten(0, 1)[:count]  # place by place, rank by rank


dist.init_process_group("gloo")
scores = torch.randn(20, generator=torch.Generator().manual_seed(0))  # what a model would predict
own = scores[dist.get_rank() :: dist.get_world_size()]
gathered = gather_predictions(own, len(scores))
print(f"rank {dist.get_rank()} has {len(own)} predictions, and gathers {len(gathered)}")
assert gathered.equal(scores)  # the predictions of one process, in their order
dist.destroy_process_group()
