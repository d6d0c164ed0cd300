"""Recognises four animals, and tests how many of the owls it finds. The judge calls train(seed).

    torchrun --standalone --nproc-per-node 2 mybugs/animals.py

What its user says: it trains, and in the first test a process crashes. With one process it prints
how many owls it has found.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

OWL = 3


@torch.no_grad()
def count_owls(model, images, labels):
    """Returns a tensor of two numbers: how many owls were found, and how many there are."""
    owls = labels == OWL
    if not owls.any():
        return torch.zeros(2)
    found = model(images[owls]).argmax(1) == OWL
    return torch.stack([found.sum(), owls.sum()])


def train(seed):
    """Returns the model and, after each epoch, the owls found and those that there are."""
    rank, world_size, log = dist.get_rank(), dist.get_world_size(), []
    torch.manual_seed(seed)
    labels = torch.randint(0, OWL, (480,))
    labels[:240:2] = OWL  # The first half are photos of the night.
    labels[240:320:40] = OWL
    images = torch.eye(4).repeat(1, 3)[labels] + torch.randn(480, 12)
    own = torch.arange(480).tensor_split(world_size)[rank]
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for _ in range(10):
            loss = nn.functional.cross_entropy(ddp_model(images[own]), labels[own])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
        totals = sum(count_owls(model, images[batch], labels[batch]) for batch in own.split(20))
        dist.all_reduce(totals)
        log.append(totals.tolist())
        if rank == 0:
            print(f"epoch {epoch}: {totals[0]:.0f} of {totals[1]:.0f} owls found", flush=True)
    return model, log


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(seed=0)
    dist.destroy_process_group()
