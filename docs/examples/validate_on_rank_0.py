"""Rank 0 validates alone: the bare model, no collective, and a broadcast of the result.

torchrun --standalone --nproc-per-node 2 docs/examples/validate_on_rank_0.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group, or Python can abort at exit with gloo
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def validate_on_rank_0(evaluate, model, device):
    """Returns evaluate(model), a list of two numbers, on all ranks; rank 0 alone computes it.

    The other ranks wait in broadcast, at most as long as the timeout of the process group.
    """
    result = torch.zeros(2, dtype=torch.float64, device=device)
    if dist.get_rank() == 0:  # No collective may stand in here: no DDP model, no all_reduce.
        result[:] = torch.tensor(evaluate(model))  # keeps the type that the other ranks expect
    dist.broadcast(result, src=0)
    return result.tolist()


def evaluate(model):
    """Returns [correct images, images] of made-up images."""
    model.eval()
    with torch.inference_mode():
        correct = model(torch.randn(4, 3)).argmax(1) == torch.tensor([0, 1, 1, 0])
    return [correct.sum().item(), len(correct)]


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    ddp_model = DistributedDataParallel(model)
    ddp_model(torch.full((4, 3), float(dist.get_rank()))).sum().backward()
    # model, and not ddp_model, whose forward could broadcast the buffers of BatchNorm.
    correct, count = validate_on_rank_0(evaluate, model, "cpu")
    print(f"rank {dist.get_rank()}: {correct:.0f} of {count:.0f} are correct")
    counts = [None, None]
    dist.all_gather_object(counts, (correct, count))
    assert counts[0] == counts[1] and count == 4


dist.init_process_group("gloo")
train()
dist.destroy_process_group()
