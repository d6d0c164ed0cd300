"""Learns from a sensor, with some noise. The judge calls train(seed, file, epochs).

    torchrun --standalone --nproc-per-node 2 mybugs/sensors.py whole.pt 4
    torchrun --standalone --nproc-per-node 2 mybugs/sensors.py halves.pt 2
    torchrun --standalone --nproc-per-node 2 mybugs/sensors.py halves.pt 4

What its user says: the third command resumes what the second has begun, and should end as the first
does. With one process it does, with two it does not. Delete the files before you try again.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(seed, file, epochs):
    """Trains until so many epochs are done, also those of an earlier run; returns the model."""
    rank, world_size, first_epoch = dist.get_rank(), dist.get_world_size(), 0
    torch.manual_seed(seed)
    readings = torch.randint(0, 10, (240, 8)).float()
    targets = readings[:, :2].prod(1, keepdim=True) / 10
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    noise = torch.Generator().manual_seed(seed + rank)
    if file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        noise.set_state(state["noise"])
        first_epoch = state["epoch"]
    for epoch in range(first_epoch, epochs):
        order = torch.randperm(240, generator=torch.Generator().manual_seed(epoch))
        for batch in order[rank::world_size].split(24 // world_size):
            inputs = readings[batch] + 0.5 * torch.rand(len(batch), 8, generator=noise)
            loss = nn.functional.mse_loss(ddp_model(inputs), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: last loss {loss.item():.5f}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"noise": noise.get_state(), "epoch": epoch + 1}, file)
        dist.barrier()
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(seed=0, file=Path(sys.argv[1]), epochs=int(sys.argv[2]))
    dist.destroy_process_group()
