"""BatchNorm sees the images of its own process; SyncBatchNorm refuses to run on a CPU.

torchrun --standalone --nproc-per-node 2 docs/examples/sync_batch_norm.py
"""

import torch
import torch.distributed as dist
from torch import nn


def main():
    rank = dist.get_rank()
    images = torch.full((2, 1, 4, 4), 10.0 * rank)
    model = nn.Sequential(nn.BatchNorm2d(1, momentum=1))
    model(images)
    print(f"rank {rank}: BatchNorm2d has the mean {model[0].running_mean.item()}")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    try:
        model(images)
    except ValueError as error:
        print(f"rank {rank}: ValueError: {error}")


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
