"""Each rank holds some layers, and sends its outputs to the next rank: pipeline parallel.

torchrun --standalone --nproc-per-node 2 docs/examples/pipeline_parallel.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same layers, inputs and targets on all ranks
layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(world_size)])
inputs, targets = torch.randn(12, 8), torch.randn(12, 8)
loss = F.mse_loss(layers(inputs), targets)
(expected,) = torch.autograd.grad(loss, layers[rank].weight)
stage = PipelineStage(layers[rank], rank, world_size, device=torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=3, loss_fn=F.mse_loss)
if rank == 0:
    schedule.step(inputs)  # forward and backward
else:
    schedule.step(target=targets)
torch.testing.assert_close(layers[rank].weight.grad, expected)
print(f"rank {rank}: layer {rank} has the gradient of the whole model")
dist.destroy_process_group()
