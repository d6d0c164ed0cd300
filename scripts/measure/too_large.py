"""A model that does not fit: with DDP each rank runs out of memory, with FSDP2 the ranks train.

    torchrun --standalone --nproc-per-node 4 scripts/measure/too_large.py ddp
    torchrun --standalone --nproc-per-node 4 scripts/measure/too_large.py fsdp2

The model has 32 layers with 4.2 MB of weights each, 134 MB in all. With the gradients and the
momentum of SGD it needs 403 MB. Each rank may allocate 300 MB in addition to what Python, torch and
gloo already have. This limit takes the place of a GPU's memory. The program needs Linux.

Smaller batches and torch.utils.checkpoint do not help here. They make the activations smaller, and
here the weights, gradients and momentum are too large.
"""

import argparse
import os
import re
import resource
import sys
from pathlib import Path

# Freed memory goes back to the system at once, so that the limit counts only what is in use. glibc
# reads this when a process starts, so the process starts itself once more.
if os.environ.get("MALLOC_MMAP_THRESHOLD_") != "65536":
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    os.execv(sys.executable, sys.orig_argv)

import torch
import torch.distributed as dist
import torch.distributed.nn  # as in the scripts: before the process group, for a clean exit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS = 1024, 32


def count_megabytes():
    """Returns how much this process has allocated."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^VmData:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 1024 / 1e6


def build_model():
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks)


def wrap_model():
    """Builds the whole model on each rank, and wraps it in DDP, which sends rank 0's weights."""
    model = build_model()
    for parameter in model.parameters():
        nn.init.kaiming_normal_(parameter)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def shard_model():
    """Builds the model with FSDP2, so that no rank ever holds the whole of it."""
    with torch.device("meta"):  # Parameters with a shape and without memory.
        model = build_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [*model, model]:  # The blocks come first.
        fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)  # right on torch 2.8, too
    model.to_empty(device="cpu")  # Now each rank allocates its own slices.
    torch.manual_seed(dist.get_rank())  # The slices of a parameter must differ.
    # Right for 2-D weights: a slice has fewer rows but all columns, and fan_in counts the columns.
    for parameter in model.parameters():
        nn.init.kaiming_normal_(parameter.to_local())
    return model


def train(way, megabytes):
    before = count_megabytes()
    limit = int((before + megabytes) * 1e6)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    model = wrap_model() if way == "ddp" else shard_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    inputs = torch.randn(8, WIDTH)
    for step in range(3):
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            used = count_megabytes() - before
            print(f"step {step + 1} | loss {loss:.4f} | {used:.0f} MB in use", flush=True)
        optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=("ddp", "fsdp2"))
    parser.add_argument("--megabytes", type=int, default=300, help="for each rank; default: 300")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.way, args.megabytes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
