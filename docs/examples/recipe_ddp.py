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
backend = "nccl" if device else "gloo"
dist.init_process_group(backend, device_id=device)  # 2 Join the process group.


def train(device):
    if dist.get_rank() == 0:  # 3 One process downloads. The others wait at the barrier.
        torch.save(torch.arange(20480.0).sin().view(1024, 20), "data.pt")
    dist.barrier()
    data = torch.load("data.pt", map_location=device, weights_only=True)
    sampler = DistributedSampler(data)  # 4 Take your own shard.
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    torch.manual_seed(0)
    model = MLP(19, [32, 1]).to(device)
    ddp_model = nn.parallel.DistributedDataParallel(model)  # 5 Wrap the model.
    lr = 0.01 * dist.get_world_size()  # 6 A learning rate for the larger batch.
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(5):
        sampler.set_epoch(epoch)  # 4 Otherwise every epoch would have the same order.
        total = torch.zeros(1, device=device)
        for rows in loader:  # The model learns to predict column 0 from the other 19.
            loss = nn.functional.mse_loss(ddp_model(rows[:, 1:]), rows[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(rows)
    dist.all_reduce(total)  # 7 Add up the metrics.
    if dist.get_rank() > 0:
        return  # 7 Print and save on one rank.
    print(f"loss {total.item() / len(data):.4f}")
    torch.save(model.state_dict(), "model.pt")


train(device or "cpu")
dist.destroy_process_group()  # 8 Leave, when train() and its model are gone.
