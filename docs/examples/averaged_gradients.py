"""Two ranks begin with different weights and have different images: what DDP makes equal.

torchrun --standalone --nproc-per-node 2 docs/examples/averaged_gradients.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn  # not used: docs/troubleshooting.md says why it is here
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank):
    torch.manual_seed(rank)  # other weights on each rank, to see what DDP does about it
    model = nn.Linear(1, 1, bias=False)
    ddp_model = DistributedDataParallel(model)
    print(f"rank {rank}: 1. weight {model.weight.item():.4f}")  # rank 0's on both

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = torch.tensor([[1.0 + rank]])
    # The gradient of the weight is the image: 1 on rank 0, and 2 on rank 1.
    loss = ddp_model(images).sum()
    loss.backward()
    print(f"rank {rank}: 2. gradient {model.weight.grad.item()}")  # the average on both
    assert model.weight.grad.item() == 1.5

    optimizer.step()
    print(f"rank {rank}: 3. weight {model.weight.item():.4f}")
    weights = [None, None]
    dist.all_gather_object(weights, model.weight.item())
    assert weights[0] == weights[1]


dist.init_process_group("gloo")
train(dist.get_rank())
dist.destroy_process_group()
