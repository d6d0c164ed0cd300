"""Trains a model that is too large for one process: DDP fails, and FSDP2 trains.

    torchrun --standalone --nproc-per-node 2 scripts/lab/too_large.py ddp
    torchrun --standalone --nproc-per-node 2 scripts/lab/too_large.py fsdp2

Weights, gradients and the two numbers of AdamW for each weight are 1074 MB. Each process forbids
itself to use more than 1000 MB beyond what it has when it has joined the process group. The limit
is that of "ulimit -d" in a shell.
"""

import argparse
import resource
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # not used: see mark 8 in mnmc_ddp_env.py
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH = 2048


def build_model():
    """Returns 16 blocks of 4.2 million parameters each."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(16)])


def build_ddp():
    return DistributedDataParallel(build_model(), gradient_as_bucket_view=True)


def build_fsdp2():
    with torch.device("meta"):  # shapes without memory
        model = build_model()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")  # Now each rank gets memory for its own slices.
    torch.manual_seed(dist.get_rank())  # With one seed for all, the slices would be equal.
    for parameter in model.parameters():
        nn.init.uniform_(parameter.to_local(), -(WIDTH**-0.5), WIDTH**-0.5)
    return model


def limit_memory(megabytes):
    """Lets this process use that much more memory than it uses now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (now,) = (1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    most = now + megabytes * 10**6
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def train(kind):
    model = build_ddp() if kind == "ddp" else build_fsdp2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(8, WIDTH)
    for step in range(3):
        loss = F.mse_loss(model(inputs), inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1}/3 | loss {loss:.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("ddp", "fsdp2"))
    parser.add_argument("--limit", type=int, default=1000, help="in MB; default: 1000")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    limit_memory(args.limit)
    train(args.kind)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
