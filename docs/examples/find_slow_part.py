"""Where the time of a step goes: the loader, the computation, DDP, or the network.

    torchrun --standalone --nproc-per-node 2 docs/examples/find_slow_part.py

To measure your own training, set BATCH_SIZE, and put your model, data set and loss into
build_model(), build_loader() and step(). It measures in as many processes as torchrun starts. Start
it with one process, too.
"""

import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group, or Python can abort at exit with gloo
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

BATCH_SIZE, STEPS = 4, 3
LOADER_STEPS = 40  # many, because each worker has two batches ready when the clock starts


def build_model():
    return resnet18(num_classes=10)


def build_loader(workers, batches=LOADER_STEPS + 1):
    images = torch.randn(BATCH_SIZE * batches, 3, 32, 32)
    labels = torch.randint(10, (len(images),))
    return DataLoader(TensorDataset(images, labels), BATCH_SIZE, num_workers=workers)


def step(model, images, labels):
    """Forward and backward. The optimizer is left out: it costs the same with and without DDP."""
    F.cross_entropy(model(images), labels).backward()
    model.zero_grad()


def measure(run, device, steps=STEPS):
    """Calls run() once to warm up; returns the ms of the calls after it, of the slowest rank."""
    run()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()  # Until here the GPU may not have done what was asked of it.
    milliseconds = torch.tensor(1000 * (time.perf_counter() - started) / steps, device=device)
    dist.all_reduce(milliseconds, op=dist.ReduceOp.MAX)
    return milliseconds.item()


def measure_parts(device):
    """Returns the milliseconds of each part of a step by its name."""
    model = build_model().to(device)
    ddp_model = DistributedDataParallel(model)
    images, labels = (tensor.to(device) for tensor in next(iter(build_loader(0))))
    gradients = torch.zeros(sum(p.numel() for p in model.parameters()), device=device)
    parts = {}
    for workers in (0, 2):
        loader = build_loader(workers)
        batches, steps = iter(loader), min(LOADER_STEPS, len(loader) - 1)
        name = f"loader alone, {workers} workers"
        parts[name] = measure(lambda b=batches: next(b), device, steps)
    # One batch: a worker that is still sending one when it has to end can print an OSError.
    loader = build_loader(workers=2, batches=1)
    parts["first batch of an epoch, 2 new workers"] = measure(lambda: next(iter(loader)), device)
    parts["step without communication"] = measure(lambda: step(model, images, labels), device)
    parts["step of DDP"] = measure(lambda: step(ddp_model, images, labels), device)
    parts["all-reduce alone"] = measure(lambda: dist.all_reduce(gradients), device)
    return parts, gradients.nbytes / 1e6


def report(parts, megabytes):
    """Prints the parts, and what the all-reduce says about the network between the ranks."""
    for name, milliseconds in parts.items():
        print(f"{milliseconds:8.1f} ms  {name}")
    ranks = dist.get_world_size()
    if ranks > 1:
        sent = 2 * (ranks - 1) / ranks * megabytes  # A ring sends so much from each rank.
        gigabits = 8 * sent / parts["all-reduce alone"]  # a megabit in a ms is a gigabit in a s
        print(f"{gigabits:8.1f} Gb/s of each rank in an all-reduce of {megabytes:.1f} MB")


def main():
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    parts, megabytes = measure_parts(device)
    if dist.get_rank() == 0:
        report(parts, megabytes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
