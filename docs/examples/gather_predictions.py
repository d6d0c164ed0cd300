"""AUC over all ranks: the predictions of all ranks, in the order of the data set.

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


def compute_auc(scores, labels):
    """The share of the pairs of a positive and a negative whose positive has the higher score."""
    return (scores[labels == 1].view(-1, 1) > scores[labels == 0]).double().mean()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(20) % 5 % 2
    scores = torch.randn(20, generator=generator) + labels  # what a model would predict
    own = range(rank, len(labels), world_size)
    gathered = gather_predictions(scores[own], len(labels))
    averaged = compute_auc(scores[own], labels[own])
    dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
    if rank == 0:
        print(f"AUC of all ranks {compute_auc(gathered, labels):.4f}")
        print(f"wrong: the mean of the ranks' AUC, {averaged:.4f}")
        assert torch.equal(gathered, scores)  # the predictions of one process, in their order
        assert averaged != compute_auc(scores, labels)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
