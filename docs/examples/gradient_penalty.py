"""A gradient penalty, whose loss contains a gradient: one backward for the whole loss.

torchrun --standalone --nproc-per-node 2 docs/examples/gradient_penalty.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def compute_penalty(outputs, inputs):
    """Returns the mean square of the gradient of outputs (N, K) with respect to inputs (N, C)."""
    (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return slopes.square().sum(1).mean()


def train_step(ddp_model, optimizer, inputs, labels):
    """Makes a step with the penalty in the loss."""
    inputs.requires_grad_()
    outputs = ddp_model(inputs)
    loss = nn.functional.mse_loss(outputs, labels) + compute_penalty(outputs, inputs)
    optimizer.zero_grad()
    loss.backward()  # fills .grad once, and DDP averages it
    optimizer.step()


def train_step_in_two(ddp_model, optimizer, inputs, labels):
    """A mistake: the penalty has a backward of its own, after DDP has averaged the gradients."""
    inputs.requires_grad_()
    outputs = ddp_model(inputs)
    optimizer.zero_grad()
    nn.functional.mse_loss(outputs, labels).backward(retain_graph=True)
    compute_penalty(outputs, inputs).backward()
    optimizer.step()


def build_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def find_difference(model, other):
    """Returns the largest difference between the weights of two models."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def main():
    rank = dist.get_rank()
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    labels = inputs[:, :2]
    alone, optimizer = build_model()
    for _ in range(3):
        train_step(alone, optimizer, inputs.clone(), labels)  # one process, all rows
    for name, step in (("one backward", train_step), ("mistake, two", train_step_in_two)):
        model, optimizer = build_model()
        ddp_model = DistributedDataParallel(model)
        for _ in range(3):
            step(ddp_model, optimizer, inputs[rank::2].clone(), labels[rank::2])
        same = find_difference(model, alone) < 1e-6
        print(f"rank {rank}, {name}: as one process {same}")


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
