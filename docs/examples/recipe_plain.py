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
    loader = DataLoader(data, batch_size=128, sampler=sampler)
    torch.manual_seed(0)
    model = MLP(19, [32, 1]).to(device)
    lr = 0.02
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(5):
        sampler.generator.manual_seed(epoch)
        total = torch.zeros(1, device=device)
        for rows in loader:  # The model learns to predict column 0 from the other 19.
            loss = nn.functional.mse_loss(model(rows[:, 1:]), rows[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(rows)
    print(f"loss {total.item() / len(data):.4f}")
    torch.save(model.state_dict(), "model.pt")


train("cuda" if torch.cuda.is_available() else "cpu")
