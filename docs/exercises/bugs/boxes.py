"""Looks for a bird in each picture: is there one, and where? The judge calls train(seed).

    torchrun --standalone --nproc-per-node 2 mybugs/boxes.py

What its user says: it prints some steps, always the same ones, and then nothing any more. Both
processes are still there, and there is no message. With one process it trains to the end.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((16,), 0.5))
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, pictures):
        return self.layers(pictures - self.mean)


def compute_losses(outputs, birds, places):
    losses = {"bird": nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], birds.float())}
    if birds.any():
        distances = (outputs[birds, 1:] - places[birds]).square().sum()
        losses["place"] = distances / len(birds)
    return losses


def train(seed):
    """Returns the model and a dict for each step: the mean of each loss over all ranks."""
    rank, world_size, log = dist.get_rank(), dist.get_world_size(), []
    torch.manual_seed(seed)
    pictures, places, birds = torch.rand(960, 16), torch.rand(960, 2), torch.rand(960) < 0.2
    ddp_model = DistributedDataParallel(Detector())
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    for step in range(40):
        own = slice(24 * step + rank, 24 * (step + 1), world_size)
        losses = compute_losses(ddp_model(pictures[own]), birds[own], places[own])
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        log.append({})
        for name, loss in losses.items():
            mean = loss.detach() / world_size
            dist.all_reduce(mean)
            log[-1][name] = mean.item()
        if rank == 0:
            print(f"step {step}:", *(f"{name} {mean:.4f}" for name, mean in log[-1].items()))
    return ddp_model.module, log


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(seed=0)
    dist.destroy_process_group()
