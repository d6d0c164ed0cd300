"""Two linear layers, of which each rank holds a half: tensor parallel.

torchrun --standalone --nproc-per-node 2 docs/examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same model and the same inputs on all ranks
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
inputs = torch.randn(5, 8)
expected = model(inputs)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
outputs = model(inputs)
torch.testing.assert_close(outputs, expected)
outputs.sum().backward()
shapes = [tuple(model[number].weight.to_local().shape) for number in (0, 2)]
print(f"rank {dist.get_rank()}: equal; weights of (16, 8) and (4, 16), here {shapes}")
dist.destroy_process_group()
