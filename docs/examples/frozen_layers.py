"""Frozen layers: requires_grad=False before the wrapper, and a new wrapper after each change.

torchrun --standalone --nproc-per-node 2 docs/examples/frozen_layers.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(model, frozen_when_wrapped, frozen_later):
    """Wraps a model, makes three steps, and returns what became of the weights, or the error."""
    model[0].requires_grad_(not frozen_when_wrapped)
    ddp_model = DistributedDataParallel(model)
    model[0].requires_grad_(not frozen_later)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    inputs = torch.ones(2, 4) * (1 + dist.get_rank())
    try:
        for _ in range(3):
            optimizer.zero_grad()
            ddp_model(inputs).square().mean().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)[:58] + " …"
    weights = [None, None]
    dist.all_gather_object(weights, [p.tolist() for p in model.parameters()])
    return f"trained, equal weights {weights[0] == weights[1]}"


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    weight = model[0].weight.clone()
    lines = [f"1 frozen, then wrapped: {train(model, True, True)}"]
    assert torch.equal(model[0].weight, weight)  # still frozen
    lines.append(f"2 thawed, then wrapped again: {train(model, False, False)}")
    lines.append(f"3 mistake, wrapped, then frozen: {train(model, False, True)}")
    lines.append(f"4 mistake, wrapped, then thawed: {train(model, True, False)}")
    if dist.get_rank() == 0:
        print(*lines, sep="\n")


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
