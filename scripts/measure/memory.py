"""How much memory a rank needs with DDP, ZeRO-1 and FSDP2, and what that costs.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 scripts/measure/memory.py
    NPROC=1 RATE=100mbit bash scripts/cluster/two_hosts.sh scripts/measure/memory.py --steps 3

The versions wrap ResNet-18 as docs/beyond_ddp.md says, DDP and ZeRO-1 with gradients in the
buckets, and train it on noise of CIFAR-10's shape. They take turns, so that a machine that slows
down slows them all.

The table has, in MB, what the rank with the most keeps after a step, and what a formula says. Then
the median, lowest and highest milliseconds of a step, and how many MB a rank sends in a step. The
last number comes from the kernel: it counts all that this host sends, its other programs included.
"""

import argparse
import os
import statistics

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchvision import models

SGD = {"lr": 0.001, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
WARM_UP = 2  # In the second step DDP makes its final buckets.


class Version:
    """ResNet-18, wrapped in one of the ways, its optimizer and a batch."""

    def __init__(self, name, batch_size):
        torch.manual_seed(0)
        self.name, self.model = name, models.resnet18(num_classes=10)
        if name == "FSDP2":
            shard(self.model)
        else:
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        parameters = self.model.parameters()
        if name == "ZeRO-1":
            self.optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, **SGD)
        else:
            self.optimizer = torch.optim.SGD(parameters, **SGD)
        self.images = torch.randn(batch_size, 3, 32, 32)
        self.labels = torch.randint(10, (batch_size,))

    def train(self, steps):
        """Trains for some steps, and keeps the gradients of the last one."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(self.images), self.labels).backward()
            self.optimizer.step()

    def count_kept_bytes(self):
        """Returns this rank's bytes of weights, of gradients, and of optimizer state."""
        optimizer = getattr(self.optimizer, "optim", self.optimizer)  # the one inside ZeRO's
        rows = optimizer.state.values()
        state = [value for row in rows for value in row.values() if torch.is_tensor(value)]
        parameters = list(self.model.parameters())
        return count_bytes(parameters), count_bytes(p.grad for p in parameters), count_bytes(state)


def shard(model):
    """Shards a ResNet, each of its blocks by itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [m for m in model.modules() if isinstance(m, models.resnet.BasicBlock)]
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # right on torch 2.8, too


def count_bytes(tensors):
    """Returns how many bytes of these tensors this rank holds."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(tensor.nbytes for tensor in local)


def predict_bytes(name, weights, world_size):
    """Returns what a rank should keep; gradients and momentum are as large as the weights."""
    predicted = {"ZeRO-1": 2 * weights + weights / world_size, "FSDP2": 3 * weights / world_size}
    return predicted.get(name, 3 * weights)


def measure(version, steps):
    """Returns a turn's ms and MB sent of a step, and the MB kept, of the rank that has the most."""
    milliseconds, sent = common.measure(version.train, steps)
    sent /= int(os.environ["LOCAL_WORLD_SIZE"])
    kept = [size / 1e6 for size in version.count_kept_bytes()]
    most = torch.tensor([milliseconds, sent, *kept], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


def make_row(version, turns):
    """Returns a version's row of the table."""
    times, sent, *kept = zip(*turns, strict=True)
    parts = [sizes[0] for sizes in kept]
    weights = sum(p.numel() * p.element_size() for p in version.model.parameters()) / 1e6
    row = dict(zip(("weights", "gradients", "optimizer"), parts, strict=True))
    row |= {"all": sum(parts)}
    row |= {"formula": predict_bytes(version.name, weights, dist.get_world_size())}
    row |= {"ms": statistics.median(times), "lowest": min(times), "highest": max(times)}
    row |= {"sent": statistics.median(sent)}
    return {"version": version.name} | {name: f"{value:.1f}" for name, value in row.items()}


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--batch-size", type=int, default=32, help="in each process; default: 32")
    add("--steps", type=int, default=5, help="of a turn; default: 5")
    add("--repeats", type=int, default=3, help="turns of each version; default: 3")
    args = parser.parse_args()
    if min(args.batch_size, args.steps, args.repeats) < 1:
        parser.error("all numbers must be above 0")
    return args


def compare(args):
    """Measures the versions in turns; returns the rows of the table."""
    versions = [Version(name, args.batch_size) for name in ("DDP", "ZeRO-1", "FSDP2")]
    for version in versions:
        version.train(WARM_UP)
    turns = [[] for _ in versions]
    for _ in range(args.repeats):
        for version, measured in zip(versions, turns, strict=True):
            measured.append(measure(version, args.steps))
    return [make_row(version, values) for version, values in zip(versions, turns, strict=True)]


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rows = compare(args)  # It has returned, and the models are gone.
    if dist.get_rank() == 0:
        network = os.environ.get("CABLE", "one host")  # two_hosts.sh says how fast its cable is.
        print(f"{dist.get_world_size()} processes, {network}, {common.describe_machine()}")
        print("MB of a rank, ms of a step (median, lowest, highest), MB sent in a step\n")
        common.print_table(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
