"""Frozen layers: requires_grad=False before the wrapper, and a new wrapper after each change.

torchrun --standalone --nproc-per-node 2 docs/examples/frozen_layers.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wrap(model):
    """Returns (DDP model, optimizer) for the parameters that are trained now."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return DistributedDataParallel(model), torch.optim.SGD(trained, lr=0.1)


def build_model():
    """Returns a backbone and a head."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def train(ddp_model, optimizer):
    """Makes three steps on data of this rank; returns what became of the weights, or the error."""
    inputs = torch.ones(2, 4) * (1 + dist.get_rank())
    try:
        for _ in range(3):
            optimizer.zero_grad()
            ddp_model(inputs).square().mean().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)[:58] + " …"
    weights = [None, None]
    dist.all_gather_object(weights, [p.tolist() for p in ddp_model.parameters()])
    return f"trained, equal weights {weights[0] == weights[1]}"


def main():
    model = build_model()
    model[0].requires_grad_(False)
    lines = [f"1 frozen, then wrapped: {train(*wrap(model))}"]
    assert torch.equal(model[0].weight, build_model()[0].weight)  # still frozen
    model[0].requires_grad_(True)
    lines.append(f"2 thawed, then wrapped again: {train(*wrap(model))}")

    model = build_model()
    ddp_model, optimizer = wrap(model)
    model[0].requires_grad_(False)
    lines.append(f"3 mistake, wrapped, then frozen: {train(ddp_model, optimizer)}")

    model = build_model()
    model[0].requires_grad_(False)
    ddp_model, _ = wrap(model)
    model[0].requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines.append(f"4 mistake, wrapped, then thawed: {train(ddp_model, optimizer)}")
    if dist.get_rank() == 0:
        print(*lines, sep="\n")


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
