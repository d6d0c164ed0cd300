"""How long a step takes on a slow network, and what helps: hooks, accumulation, buckets.

    NPROC=1 RATE=100mbit bash scripts/cluster/two_hosts.sh scripts/measure/network.py
    torchrun --nnodes 2 … scripts/measure/network.py   # on two machines of your own, with gloo

The ranks train on noise, on their CPUs. A step is forward and backward of one batch. The variants:

    no communication  the bare model on each rank: what a step computes
    DDP               DistributedDataParallel as the scripts use it
    bf16 hook         the gradients travel as bfloat16
    PowerSGD          each large gradient travels as the product of two small matrices; one bucket
    no_sync over 4    only every fourth step averages the gradients and takes an optimizer step
    batch times 4     four times the images in a step; the table has a quarter of its time and bytes
    bucket_cap_mb N   N = 1, 25 and 1000; at 1000 all gradients are in one bucket
    no overlap        the bare model, and one all-reduce after each backward

They take turns, so that a machine that slows down slows them all. The table has the median, lowest
and highest milliseconds of a step, and the megabytes that the host of rank 0 sent in a step. The
kernel counts these: headers, acknowledgements and other programs included.
"""

import argparse
import contextlib
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where the scripts are

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torchvision import models

import mnmc_ddp_env

MODELS = {
    "resnet18": (models.resnet18, (3, 32, 32)),  # ImageNet's 1000 classes: 46.8 MB of gradients
    "convnet": (mnmc_ddp_env.ConvNet, (1, 28, 28)),  # the scripts' own: 0.1 MB
}
BUCKETS = {"bucket_cap_mb 1": 1, "bucket_cap_mb 25": 25, "bucket_cap_mb 1000": 1000}
VARIANTS = ["no communication", "DDP", "bf16 hook", "PowerSGD", "no_sync over 4", "batch times 4"]
VARIANTS += [*BUCKETS, "no overlap"]
# The later all-reduces of PowerSGD start in gloo's threads. With several buckets the ranks can
# start them in different orders, and gloo aborts or waits for ever.
BUCKETS |= {"PowerSGD": 1000}
STEPS = 4  # of a turn: as many as no_sync over 4 needs to communicate once
# So many times each variant communicates before its turns. In the second, DDP makes its final
# buckets, and in the third, PowerSGD compresses for the first time.
WARM_UP = 3


class Variant:
    """A model that is trained in one of the ways."""

    def __init__(self, name, args):
        build, shape = MODELS[args.model]
        torch.manual_seed(0)
        self.name, self.model = name, build().to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.001, momentum=0.9, weight_decay=5e-4, nesterov=True
        )
        # How many steps of DDP communicate as often as this variant does once.
        self.period = 4 if name in ("no_sync over 4", "batch times 4") else 1
        batch_size = 4 * args.batch_size if name == "batch times 4" else args.batch_size
        self.images = torch.randn(batch_size, *shape).to(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (batch_size,))
        if name not in ("no communication", "no overlap"):
            # Without a value, the limit of the first bucket is 1 MiB, and of the others 25 MiB.
            limit = {"bucket_cap_mb": BUCKETS[name]} if name in BUCKETS else {}
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True, **limit)
        if name == "bf16 hook":
            self.model.register_comm_hook(None, send_bfloat16)
        if name == "PowerSGD":
            state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook)

    def run(self, steps):
        """Trains for some steps, counted in the usual batches: a batch times 4 is four steps."""
        for step in range(steps // 4 if self.name == "batch times 4" else steps):
            alone = self.name == "no_sync over 4" and step % 4 < 3
            with self.model.no_sync() if alone else contextlib.nullcontext():
                F.cross_entropy(self.model(self.images), self.labels).backward()
            if self.name == "no overlap":
                average_gradients(self.model)
            if not alone:
                self.optimizer.step()
                self.optimizer.zero_grad()


def send_bfloat16(group, bucket):
    """The hook by another name: on a torch without nccl, DDP refuses it by its own."""
    return bf16_compress_hook(group, bucket)


def average_gradients(model):
    """Averages all gradients over the ranks with one all-reduce."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    flat /= dist.get_world_size()
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def compare(args):
    """Measures all variants in turns; returns the rows of the table."""
    variants = [Variant(name, args) for name in VARIANTS]
    for variant in variants:
        variant.run(WARM_UP * variant.period)
    turns = {name: [] for name in VARIANTS}
    for _ in range(args.repeats):
        for variant in variants:
            turns[variant.name].append(common.measure(variant.run, STEPS))
    ddp = statistics.median(time for time, _ in turns["DDP"])
    rows = []
    for name, measured in turns.items():
        times, megabytes = zip(*measured, strict=True)
        values = {"ms": statistics.median(times), "lowest": min(times), "highest": max(times)}
        row = {"variant": name, "MB": f"{statistics.median(megabytes):.3f}"}
        row |= {key: f"{value:.1f}" for key, value in values.items()}
        rows.append(row | {"to DDP": f"{values['ms'] / ddp:.2f}"})
    return rows


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="resnet18", help="default: resnet18")
    add("--batch-size", type=int, default=32, help="in each process; default: 32")
    add("--repeats", type=int, default=3, help="turns of each variant; default: 3")
    return parser.parse_args()


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rows = compare(args)  # It has returned, and the DDP models are gone.
    if dist.get_rank() == 0:
        network = os.environ.get("CABLE", "this network")  # two_hosts.sh says how fast it is.
        print(f"\n{args.model}, {args.batch_size} images a rank, {network}")
        print(f"{common.describe_machine()}\n")
        common.print_table(rows)
    # PowerSGD's last callbacks may still run in gloo's threads, which must not be the ones to free
    # the group. After a barrier they have ended.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
