"""BatchNorm sees the images of its own process; SyncBatchNorm refuses to run on a CPU.

torchrun --standalone --nproc-per-node 2 docs/examples/sync_batch_norm.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    rank = dist.get_rank()
    images = torch.full((2, 1, 4, 4), 10.0 * rank)
    model = nn.Sequential(nn.BatchNorm2d(1, momentum=1))
    model(images)
    print(f"rank {rank}: BatchNorm2d has the mean {model[0].running_mean.item()}")
    assert model[0].running_mean.item() == 10 * rank  # and not 5, the mean of all images
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    try:
        DistributedDataParallel(model)
    except ValueError as error:
        print(f"rank {rank}: ValueError: {error}")
        assert str(error) == "SyncBatchNorm layers only work with GPU modules"
    else:
        raise AssertionError("SyncBatchNorm works on a CPU now: this example is out of date")


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
