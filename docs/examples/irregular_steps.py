"""Empty batches and losses that are not finite: what all ranks must do together.

torchrun --standalone --nproc-per-node 2 docs/examples/irregular_steps.py
"""

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


def main():
    rank = dist.get_rank()
    batches = [torch.ones(4, 2) for _ in range(3)]
    if rank == 1:
        batches[1] = torch.ones(0, 2)
        batches[2][0, 0] = float("nan")
    torch.manual_seed(0)
    ddp_model = DistributedDataParallel(torch.nn.Linear(2, 3))
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    steps = []
    for inputs in batches:
        labels = torch.zeros(len(inputs), dtype=torch.int64)
        steps.append(train_step(ddp_model, optimizer, inputs, labels))
    weights = [None, None]
    dist.all_gather_object(weights, ddp_model.module.weight.tolist())
    print(f"rank {rank}: {steps}")
    assert steps == [True, True, False] and weights[0] == weights[1]


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
