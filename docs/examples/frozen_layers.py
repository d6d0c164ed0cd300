"""Frozen layers: requires_grad=False before the wrapper, and a new wrapper after each change.

torchrun --standalone --nproc-per-node 2 docs/examples/frozen_layers.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def set_frozen(module, frozen):
    """Freezes or thaws a module. Wrap the model in DDP after this, not before."""
    for parameter in module.parameters():
        parameter.requires_grad = not frozen


def wrap(model):
    """Returns (DDP model, optimizer) for the parameters that are trained now."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return DistributedDataParallel(model), torch.optim.SGD(trained, lr=0.1)


def build_model():
    """Returns a backbone and a head."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def train(ddp_model, optimizer, steps=3):
    """Trains on data of this rank; returns the first line of the error, if there is one."""
    inputs = torch.ones(2, 4) * (1 + dist.get_rank())
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            ddp_model(inputs).square().mean().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)[:58] + " …"
    return "trained"


def have_equal_weights(model):
    """Returns whether all ranks have the same weights."""
    weights = [None] * dist.get_world_size()
    dist.all_gather_object(weights, [p.tolist() for p in model.parameters()])
    return weights.count(weights[0]) == len(weights)


def main():
    lines = []
    model = build_model()
    set_frozen(model[0], True)
    lines.append(f"1 frozen, then wrapped: {train(*wrap(model))}")
    set_frozen(model[0], False)
    lines.append(f"2 thawed, then wrapped again: {train(*wrap(model))}")
    lines.append(f"2 thawed, then wrapped again: equal weights {have_equal_weights(model)}")

    model = build_model()
    ddp_model, optimizer = wrap(model)
    set_frozen(model[0], True)
    lines.append(f"3 mistake, wrapped, then frozen: {train(ddp_model, optimizer)}")

    model = build_model()
    set_frozen(model[0], True)
    ddp_model, _ = wrap(model)
    set_frozen(model[0], False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines.append(f"4 mistake, wrapped, then thawed: {train(ddp_model, optimizer)}")
    lines.append(f"4 mistake, wrapped, then thawed: equal weights {have_equal_weights(model)}")
    if dist.get_rank() == 0:
        print(*lines, sep="\n")


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
