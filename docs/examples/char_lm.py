"""A language model of characters, in one process, without a loader. It reads docs/course.md.

python docs/examples/char_lm.py
"""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


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
    text = (Path(__file__).resolve().parents[1] / "course.md").read_text()
    vocabulary = sorted(set(text))
    text = torch.tensor([vocabulary.index(character) for character in text], device=device)
    train_data = batchify(text[:-2000], 32)
    test_data = batchify(text[-2000:], 8)
    torch.manual_seed(0)
    model = CharLM(text.bincount()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    for epoch in range(3):
        started = time.perf_counter()
        totals = torch.zeros(2, device=device)  # losses, characters
        for loss, count in compute_losses(model, train_data):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            totals[0] += loss.detach()
            totals[1] += count
        seconds = time.perf_counter() - started
        test_totals = torch.zeros(2, device=device)
        with torch.no_grad():
            for loss, count in compute_losses(model, test_data):
                test_totals[0] += loss
                test_totals[1] += count
        perplexity = (test_totals[0] / test_totals[1]).exp()
        print(
            f"epoch {epoch + 1} | train loss {totals[0] / totals[1]:.5f} | "
            f"test perplexity {perplexity:.4f} | {totals[1] / seconds:.0f} characters/s"
        )
        print(repr(sample_text(model, vocabulary, device)))
    torch.save(model.state_dict(), "char_lm.pt")


train("cuda" if torch.cuda.is_available() else "cpu")
