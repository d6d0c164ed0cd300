"""The buckets of gradients that DDP makes of ResNet-18, in three steps.

torchrun --standalone --nproc-per-node 2 docs/examples/gradient_buckets.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn  # not used: docs/troubleshooting.md says why it is here
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18


def note_size(sizes, bucket):
    """A communication hook: notes the MiB of the bucket, and does what DDP does without a hook."""
    sizes.append(round(bucket.buffer().nbytes / 2**20, 1))
    return allreduce_hook(None, bucket)


def train():
    sizes, steps = [], []
    ddp_model = DistributedDataParallel(resnet18())
    ddp_model.register_comm_hook(sizes, note_size)
    for step in range(3):
        sizes.clear()
        ddp_model(torch.randn(2, 3, 32, 32)).sum().backward()
        steps.append(list(sizes))
        if dist.get_rank() == 0:
            print(f"step {step}: buckets of {sizes} MiB")
    assert steps[0] != steps[1] == steps[2]  # DDP makes its final buckets after the first step.


dist.init_process_group("gloo")
train()
dist.destroy_process_group()
