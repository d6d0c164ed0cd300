"""The linear and the square-root rule.

python docs/examples/learning_rate_rules.py
"""

import torch

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(2048, 8, generator=generator)
targets = inputs.sum(1) + 0.1 * torch.randn(2048, generator=generator)


def train(world_size, peak_lr):
    """Trains a linear model for one epoch with the schedule of the scripts; returns the loss."""
    weight = torch.zeros(8, requires_grad=True)
    batches = torch.arange(2048).split(8 * world_size)
    for step, batch in enumerate(batches):
        progress = (step + 0.5) / len(batches)
        lr = peak_lr * (progress / 0.2 if progress < 0.2 else (1 - progress) / 0.8)
        loss = (inputs[batch] @ weight - targets[batch]).square().mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - lr * gradient).detach().requires_grad_()
    return (inputs @ weight - targets).square().mean().item()


for processes in (1, 4, 16, 64):
    same, scaled = train(processes, 0.02), train(processes, 0.02 * processes)
    print(f"{processes} processes: loss {same:.2f} at 0.02, {scaled:.2f} at 0.02 * {processes}")
