"""A model whose layers lie on two devices, wrapped in DDP without device_ids.

torchrun --standalone --nproc-per-node 2 docs/examples/model_on_two_devices.py
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def choose_devices(local_rank, local_world_size):
    """Returns the two devices of a process: GPUs 0 and 1, 2 and 3 and so on of its node."""
    if torch.cuda.device_count() < 2 * local_world_size:
        return torch.device("cpu"), torch.device("cpu")
    torch.cuda.set_device(2 * local_rank)
    return torch.device("cuda", 2 * local_rank), torch.device("cuda", 2 * local_rank + 1)


class SplitModel(nn.Module):
    """Computes its first layer on one device and its second on another."""

    def __init__(self, first, second):
        super().__init__()
        self.layer1 = nn.Linear(8, 16, device=first)
        self.layer2 = nn.Linear(16, 2, device=second)

    def forward(self, x):
        hidden = torch.relu(self.layer1(x.to(self.layer1.weight.device)))
        return self.layer2(hidden.to(self.layer2.weight.device))


def main():
    rank = dist.get_rank()
    torch.manual_seed(0)
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])  # of this node; torchrun sets it
    model = SplitModel(*choose_devices(dist.get_node_local_rank(), local_world_size))
    try:
        DistributedDataParallel(model, device_ids=[0])
    except ValueError as error:
        print(f"rank {rank}: {str(error)[:62]} …")
    ddp_model = DistributedDataParallel(model)
    ddp_model(torch.ones(4, 8) * rank).sum().backward()
    print(f"rank {rank}: gradient {model.layer1.weight.grad.norm().item():.4f}")


dist.init_process_group("gloo")  # without device_id: the process has two devices
main()
dist.destroy_process_group()
