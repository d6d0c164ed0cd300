"""Predicts how much energy a town needs tomorrow. The judge calls train(seed).

    torchrun --standalone --nproc-per-node 2 mybugs/energy.py

What its user says: both processes predict the same at first, and after some epochs they do not any
more. But the model is in DistributedDataParallel, and nothing else changes its weights.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@torch.no_grad()
def validate(model, days, needs):
    """Returns the loss, and shows its mean over all ranks."""
    loss = nn.functional.mse_loss(model(days), needs)
    mean = loss / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"validation loss {mean.item():.4f}")
    return loss


def train(seed):
    """Returns the model."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    days = torch.randn(540, 12)
    needs = days[:, :4].sum(1, keepdim=True) + torch.randn(540, 1)
    tomorrow = torch.randn(1, 12)
    own_days, own_needs = days[rank::world_size], needs[rank::world_size]
    model = nn.Linear(12, 1)
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
    batch_size = 24 // world_size
    for epoch in range(16):
        for n in range(0, 480 // world_size, batch_size):  # The others are for validation.
            batch = slice(n, n + batch_size)
            loss = nn.functional.mse_loss(ddp_model(own_days[batch]), own_needs[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step(validate(model, own_days[n + batch_size :], own_needs[n + batch_size :]))
        print(f"epoch {epoch}, rank {rank}: tomorrow {model(tomorrow).item():.6f}")
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(seed=0)
    dist.destroy_process_group()
