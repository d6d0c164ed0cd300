"""Early stopping: all ranks decide by the same number, so all stop at the same epoch.

torchrun --standalone --nproc-per-node 2 docs/examples/early_stopping.py
"""

import torch
import torch.distributed as dist


def average_over_ranks(loss_sum, count, device):
    """Returns the mean loss of all samples of all ranks. Every rank must call it."""
    totals = torch.tensor([loss_sum, count], dtype=torch.float32, device=device)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def should_stop(losses, patience):
    """Whether the last epochs, as many as patience, have not improved on the best loss before."""
    return len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])


def any_rank_wants(flag, device):
    """Whether the flag is set on any rank, such as after a signal. Every rank must call it."""
    wanted = torch.tensor(int(flag), device=device)
    dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
    return bool(wanted)


dist.init_process_group("gloo")
rank = dist.get_rank()
losses = [[0.9, 0.6, 0.7, 0.8], [0.9, 0.8, 0.5, 0.4]]
averages = [average_over_ranks(32 * loss, 32, "cpu") for loss in losses[rank]]
alone, agreed = should_stop(losses[rank], patience=2), should_stop(averages, patience=2)
print(f"rank {rank}: stops alone {alone}, agreed {agreed}")
assert alone == (rank == 0) and not agreed
assert any_rank_wants(rank == 1, "cpu") and not any_rank_wants(False, "cpu")
dist.destroy_process_group()
