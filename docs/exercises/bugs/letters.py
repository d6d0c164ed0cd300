"""Learns which letter comes next, in words of different lengths. The judge calls train(seed).

    torchrun --standalone --nproc-per-node 2 mybugs/letters.py

What its user says: the loss of the first step is the same with one process and with two, which
share the words of a step. Then two processes learn more slowly, and three more slowly still. To
double the learning rate makes it better, but not the same.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_words(count, length):
    """Returns (count, length) letters from 1 to 26, and behind the end of a word 0."""
    words = torch.randint(1, 27, (count, 1))
    while words.shape[1] < length:
        words = torch.cat([words, words[:, -1:] * 5 % 27], dim=1)
    words[torch.arange(length) >= torch.randint(3, length + 1, (count, 1))] = 0
    return words


def train(seed):
    """Returns the model and the loss of each step, a mean over all letters of all ranks."""
    rank, world_size, log = dist.get_rank(), dist.get_world_size(), []
    torch.manual_seed(seed)
    words = make_words(480, 12)
    model = nn.Sequential(nn.Embedding(27, 32), nn.Linear(32, 27))
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.01)
    for step in range(60):
        start = step % 20 * 24
        own = words[start + rank : start + 24 : world_size]
        inputs, targets = own[:, :-1], own[:, 1:]
        count = (targets != 0).sum()
        dist.all_reduce(count)
        logits = ddp_model(inputs).flatten(0, 1)
        losses = nn.functional.cross_entropy(
            logits, targets.flatten(), ignore_index=0, reduction="none"
        )
        loss = losses.sum() / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        log.append(loss.item())
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    return model, log


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(seed=0)
    dist.destroy_process_group()
