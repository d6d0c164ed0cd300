"""Empty batches and losses that are not finite: what all ranks must do together.

torchrun --standalone --nproc-per-node 2 docs/examples/irregular_steps.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def is_true_on_any_rank(condition, device="cpu"):
    """Returns the same answer on all ranks, which must all call it."""
    flag = torch.tensor(int(condition), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def train_step(ddp_model, optimizer, inputs, labels):
    """Makes a step of inputs (N, 2), where N may be 0; returns False if all ranks skip it."""
    logits = ddp_model(inputs)
    # The sum of nothing is 0, and its backward makes DDP's collective calls.
    loss = F.cross_entropy(logits, labels) if len(inputs) > 0 else logits.sum() * 0
    if is_true_on_any_rank(not loss.isfinite(), inputs.device):
        return False
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return True


def skip_alone(ddp_model, optimizer, inputs, labels):
    """A mistake: a rank skips a step that the others make."""
    loss = F.cross_entropy(ddp_model(inputs), labels)
    if not loss.isfinite():
        return False
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return True


def make_batches(rank):
    """Returns three batches: rank 1's second is empty, its third has a nan."""
    batches = [torch.ones(4, 2) for _ in range(3)]
    if rank == 1:
        batches[1] = torch.ones(0, 2)
        batches[2][0, 0] = float("nan")
    return batches


def train(step, batches, group=None):
    """Returns what step returned for each batch, and the weights' sum."""
    torch.manual_seed(0)
    ddp_model = DistributedDataParallel(torch.nn.Linear(2, 3), process_group=group)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    steps = []
    for inputs in batches:
        labels = torch.zeros(len(inputs), dtype=torch.int64)
        steps.append(step(ddp_model, optimizer, inputs, labels))
    return steps, f"{ddp_model.module.weight.abs().sum().item():.4f}"


def main():
    rank = dist.get_rank()
    steps, weights = train(train_step, make_batches(rank))
    print(f"rank {rank}, together: {steps}, weights {weights}")
    assert steps == [True, True, False]
    all_weights = [None, None]
    dist.all_gather_object(all_weights, weights)
    assert all_weights[0] == all_weights[1]
    group = dist.new_group(timeout=timedelta(seconds=3))
    try:
        train(skip_alone, make_batches(rank), group)
        assert rank == 1
    except RuntimeError as error:  # Rank 0 waits for the step that rank 1 has skipped.
        print(f"rank {rank}, alone: {type(error).__name__}")
        assert rank == 0
    dist.barrier()


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
