"""The exponential moving average (EMA) of the weights, on every rank.

torchrun --standalone --nproc-per-node 2 docs/examples/ema.py
"""

from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def build_ema(model, decay=0.999):
    """Returns the averaged model; model is the bare one, not the wrapper."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=False)


def train_step(ddp_model, optimizer, ema, inputs, compute_loss):
    """Updates the weights and their average. All ranks call it."""
    optimizer.zero_grad()
    compute_loss(ddp_model(inputs)).backward()
    optimizer.step()
    ema.update_parameters(ddp_model.module)  # after the step; it communicates nothing


def compute_loss(outputs):
    """Returns how far the outputs are from 1."""
    return (outputs - 1).square().mean()


def train(inputs, wrap, update=True):
    """Trains 20 steps; returns the averaged bias."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    ema, other_ema = build_ema(model, decay=0.9), build_ema(model)
    ddp_model, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        train_step(ddp_model, optimizer, ema if update else other_ema, inputs, compute_loss)
    return ema.module.bias.item()


def wrap_bare(model):
    """Looks like the wrapper of DDP, for training in one process."""
    return torch.nn.Sequential(OrderedDict(module=model))


def main():
    rank = dist.get_rank()
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    part = inputs.chunk(2)[rank]
    one_process, every_rank = train(inputs, wrap_bare), train(part, DistributedDataParallel)
    rank_0 = train(part, DistributedDataParallel, update=rank == 0)
    print(f"rank {rank}: {one_process=:.4f} {every_rank=:.4f} {rank_0=:.4f}")
    assert abs(one_process - every_rank) < 1e-6
    assert (abs(rank_0 - every_rank) < 1e-6) == (rank == 0)  # The other ranks have no average.


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
