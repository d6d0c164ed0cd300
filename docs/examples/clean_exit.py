"""A script with DDP over gloo that leaves no thread behind, and so cannot abort at exit.

torchrun --standalone --nproc-per-node 2 docs/examples/clean_exit.py
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init_process_group


def count_threads():
    return len(os.listdir("/proc/self/task"))


def train():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.ones(2, 4)).sum().backward()


before = count_threads()
dist.init_process_group("gloo")
rank = dist.get_rank()
train()  # The DDP model is gone when it returns.
during = count_threads()
dist.destroy_process_group()
left = count_threads() - before
print(f"rank {rank}: gloo has threads: {during > before}, threads left: {left}")
