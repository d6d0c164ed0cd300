"""The training loop of the README, with DDP. It writes data.pt and model.pt.

torchrun --standalone --nproc-per-node 2 docs/examples/recipe_ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.ops import MLP

device = None
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # 1 Take your own GPU.
    torch.cuda.set_device(device)  # also for a plain "cuda"
dist.init_process_group("nccl" if device else "gloo", device_id=device)  # 2 Join the group.


def train(device):
    if dist.get_rank() == 0:  # 3 One process downloads. The others wait.
        torch.save(torch.arange(20480.0).sin().view(1024, 20), "data.pt")
    dist.barrier()
    data = torch.load("data.pt", map_location=device, weights_only=True)
    sampler = DistributedSampler(data)  # 4 Take your own shard.
    torch.manual_seed(0)
    model = MLP(19, [32, 1]).to(device)
    ddp_model = nn.parallel.DistributedDataParallel(model)  # 5 Wrap the model.
    batch_size = 128 // dist.get_world_size()  # 6 Keep the global batch size.
    loader = DataLoader(data, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(5):
        sampler.set_epoch(epoch)  # 4 Each epoch has another order.
        totals = torch.zeros(2, device=device)  # losses, rows
        for rows in loader:  # The model predicts column 0 from the others.
            loss = nn.functional.mse_loss(ddp_model(rows[:, 1:]), rows[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            totals[0] += loss.detach() * len(rows)
            totals[1] += len(rows)
    dist.all_reduce(totals)  # 7 Add up the metrics.
    if dist.get_rank() > 0:
        return  # 7 Print and save on one rank.
    print(f"loss {totals[0] / totals[1]:.4f}")
    torch.save(model.state_dict(), "model.pt")


train(device or "cpu")
dist.destroy_process_group()  # 8 Leave, when train() and its model are gone.
