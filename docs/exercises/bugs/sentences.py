"""Reads sentences of different lengths and says which are friendly. The judge calls train(seed).

    torchrun --standalone --nproc-per-node 2 mybugs/sentences.py

What its user says: the second process is of no use. An epoch takes as long as with one process, and
every loss is the same to the last digit.
"""

import random

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler


class SimilarLengths:
    """Batches of sentences that are about equally long, in another order in each epoch."""

    def __init__(self, sentences, sampler, batch_size):
        self.sentences, self.sampler, self.batch_size = sentences, sampler, batch_size

    def __iter__(self):
        order = sorted(range(len(self.sentences)), key=lambda n: len(self.sentences[n]))
        batches = [order[n : n + self.batch_size] for n in range(0, len(order), self.batch_size)]
        random.Random(self.sampler.epoch).shuffle(batches)
        return iter(batches)


def train(seed):
    """Returns the model."""
    torch.manual_seed(seed)
    sentences = [torch.randint(1, 100, (n,)) for n in torch.randint(5, 21, (240,)).tolist()]
    model = nn.Sequential(nn.EmbeddingBag(100, 16, padding_idx=0), nn.Linear(16, 2))
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler = DistributedSampler(sentences)
    batches = SimilarLengths(sentences, sampler, batch_size=8)
    loader = DataLoader(sentences, batch_sampler=batches, collate_fn=lambda rows: rows)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for rows in loader:
            friendly = torch.stack([(row < 30).float().mean() > 0.3 for row in rows]).long()
            logits = ddp_model(pad_sequence(rows, batch_first=True))
            loss = nn.functional.cross_entropy(logits, friendly)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}, rank {dist.get_rank()}: last loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(seed=0)
    dist.destroy_process_group()
