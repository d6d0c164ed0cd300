"""Learns the prices of 600 houses, and says how well. The judge calls train(seed).

    torchrun --standalone --nproc-per-node 2 mybugs/houses.py

What its user says: R² is the part of the variance that the model explains. One process prints a
higher R² than two, and two a higher one than three. But the error is the same, and so is the model.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@torch.no_grad()
def evaluate(model, houses, prices, count):
    """Returns the mean squared error and R²; each rank has a part of the houses."""
    model.eval()
    errors = (model(houses) - prices).square().sum()
    variance = (prices - prices.mean()).square().sum()
    sums = torch.stack([errors, variance])
    dist.all_reduce(sums)
    model.train()
    errors, variance = sums.tolist()
    return errors / count, 1 - errors / variance


def train(seed):
    """Returns the model and, after each epoch, the mean squared error and R² of all houses."""
    rank, world_size, log = dist.get_rank(), dist.get_world_size(), []
    torch.manual_seed(seed)
    number = torch.arange(600).unsqueeze(1)  # Ten streets of 60 houses, the even ones in the sun.
    houses = torch.cat([torch.rand(600, 6), number // 60 / 10, number % 2], dim=1)
    prices = houses @ (torch.rand(8, 1) + 0.5) + 0.3 * torch.randn(600, 1)
    own_houses = houses.tensor_split(world_size)[rank]
    own_prices = prices.tensor_split(world_size)[rank]
    model = nn.Linear(8, 1)
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(5):
        for _ in range(40):
            loss = nn.functional.mse_loss(ddp_model(own_houses), own_prices)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        log.append(evaluate(model, own_houses, own_prices, len(houses)))
        if rank == 0:
            print(f"epoch {epoch}: mean squared error {log[-1][0]:.4f}, R² {log[-1][1]:.4f}")
    return model, log


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(seed=0)
    dist.destroy_process_group()
