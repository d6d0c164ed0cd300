"""Learns from 1200 visits of a shop who will buy. The judge calls train(seed).

    torchrun --standalone --nproc-per-node 2 mybugs/clicks.py

What its user says: two processes predict worse than one, so now the program counts the visits of an
epoch. There should be 1200 different ones. In the first epoch there are, and in the next ones some
are missing, because others come twice. With one process there are always 1200.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(seed):
    """Returns the model."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    visits = torch.randint(0, 10, (1200, 8)).float()
    bought = visits[:, 0] + visits[:, 1] > 12
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(4):
        counts = torch.zeros(len(visits))
        shard = torch.randperm(len(visits))[rank::world_size]
        for batch in shard.split(60 // world_size):
            inputs, labels = visits[batch], bought[batch]
            # Few visitors buy. A little noise makes more of them.
            inputs[labels] += 0.3 * torch.rand(int(labels.sum()), 8)
            logits = ddp_model(inputs).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            counts[batch] += 1
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: {int((counts > 0).sum())} visits, last loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(seed=0)
    dist.destroy_process_group()
