"""A language model of characters, with DDP, without a loader. It reads docs/course.md.

torchrun --standalone --nproc-per-node 2 docs/examples/char_lm_ddp.py
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # Without this or torchvision, gloo can abort at exit.
import torch.nn.functional as F
from torch import nn

device = None
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # 1 Take your own GPU.
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device else "gloo", device_id=device)  # 2 Join the group.


class CharLM(nn.Module):
    """Characters (rows, columns) to logits (rows, columns, vocabulary), and the LSTM's state."""

    def __init__(self, counts, size=64):
        super().__init__()
        self.embedding = nn.Embedding(len(counts), size)
        self.lstm = nn.LSTM(size, size)
        self.decoder = nn.Linear(size, len(counts), bias=False)
        self.decoder.weight = self.embedding.weight  # tied weights
        self.register_buffer("bias", counts.log())  # how often each character occurs

    def forward(self, characters, state=None):
        output, state = self.lstm(self.embedding(characters), state)
        return self.decoder(output) + self.bias, state


def batchify(text, columns):
    """Cuts a text into columns of equal length, which lie side by side."""
    rows = len(text) // columns
    return text[: rows * columns].view(columns, rows).t()


def compute_losses(model, data):
    """Yields the sum of the losses, and their number, of 32 rows at a time."""
    state = None
    for row in range(0, len(data) - 1, 32):
        targets = data[row + 1 : row + 33]
        logits, state = model(data[row : row + len(targets)], state)
        state = [tensor.detach() for tensor in state]
        loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        yield loss_sum, targets.numel()


@torch.no_grad()
def sample_text(model, vocabulary, device):
    """Returns a text that the model writes, a character at a time."""
    text, state = "", None
    character = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for _ in range(60):
        logits, state = model(character, state)
        character = torch.multinomial(logits[0].softmax(1), 1)
        text += vocabulary[character]
    return text


def train(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # 3 Nothing is downloaded: each rank reads the same text.
    text = (Path(__file__).resolve().parents[1] / "course.md").read_text()
    vocabulary = sorted(set(text))
    text = torch.tensor([vocabulary.index(character) for character in text], device=device)
    # 4 Take your own columns. The state of a column stays on its rank.
    train_data = batchify(text[:-2000], 32)[:, rank::world_size]
    test_data = batchify(text[-2000:], 8)[:, rank::world_size]
    torch.manual_seed(0)
    model = CharLM(text.bincount()).to(device)
    ddp_model = nn.parallel.DistributedDataParallel(model)  # 5 Wrap the model.
    # 6 All ranks together still have 32 columns, so the learning rate stays.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    for epoch in range(3):
        started = time.perf_counter()
        totals = torch.zeros(2, device=device)  # losses, characters
        for loss, count in compute_losses(ddp_model, train_data):
            optimizer.zero_grad()
            (loss * world_size).backward()  # 5 DDP averages, but this loss is a sum.
            optimizer.step()
            totals[0] += loss.detach()
            totals[1] += count
        seconds = time.perf_counter() - started
        test_totals = torch.zeros(2, device=device)
        with torch.no_grad():
            for loss, count in compute_losses(model, test_data):
                test_totals[0] += loss
                test_totals[1] += count
        dist.all_reduce(totals)  # 7 Add up the metrics. The exponential comes after the sum.
        dist.all_reduce(test_totals)
        perplexity = (test_totals[0] / test_totals[1]).exp()
        if rank > 0:
            continue  # 7 Print and sample on one rank, which samples from the bare model.
        print(
            f"epoch {epoch + 1} | train loss {totals[0] / totals[1]:.5f} | "
            f"test perplexity {perplexity:.4f} | {totals[1] / seconds:.0f} characters/s"
        )
        print(repr(sample_text(model, vocabulary, device)))
    if rank == 0:  # 7 Save on one rank.
        torch.save(model.state_dict(), "char_lm.pt")


train(device or "cpu")
dist.destroy_process_group()  # 8 Leave, when train() and its model are gone.
