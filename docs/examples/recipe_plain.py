"""The training loop of the README, in one process. It writes data.pt and model.pt.

python docs/examples/recipe_plain.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from torchvision.ops import MLP


def train(device):
    torch.save(torch.arange(20480.0).sin().view(1024, 20), "data.pt")
    data = torch.load("data.pt", map_location=device, weights_only=True)
    sampler = RandomSampler(data, generator=torch.Generator())
    torch.manual_seed(0)
    model = MLP(19, [32, 1]).to(device)
    batch_size = 128
    loader = DataLoader(data, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(5):
        sampler.generator.manual_seed(epoch)
        totals = torch.zeros(2, device=device)  # losses, rows
        for rows in loader:  # The model predicts column 0 from the others.
            loss = nn.functional.mse_loss(model(rows[:, 1:]), rows[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            totals[0] += loss.detach() * len(rows)
            totals[1] += len(rows)
    print(f"loss {totals[0] / totals[1]:.4f}")
    torch.save(model.state_dict(), "model.pt")


train("cuda" if torch.cuda.is_available() else "cpu")
