"""How fast the scripts train, against the bare arithmetic, a textbook's loop, and without DDP.

    source scripts/env.sh      # the launchers' settings
    torchrun --standalone --nproc-per-node 2 scripts/measure/benchmark.py
    torchrun --standalone --nproc-per-node 4 scripts/measure/benchmark.py --dataset cifar10

Each batch size is measured with:

    bare      forward, backward and step on one batch that stays on the device
    ours      snsc.py's train_one_epoch, in processes that do not communicate
    ddp       mnmc_ddp_env.py's train_one_epoch, its model wrapped as the script wraps it
    textbook  a PIL image at a time, ToTensor, Normalize, an .item() in each step, the default
              memory format, and DDP with its defaults where there are several processes

The variants take turns, --repeats times, so that a machine that slows down slows them all. The
table has medians in images/s of all processes together. The images are noise of the data set's
shape.
"""

import argparse
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

# Before torch: one thread a process, so that N processes use N times the cores of one.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where the scripts are

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import transforms
from torchvision.transforms.functional import to_pil_image

import mnmc_ddp_env
import snsc

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


class PilImages(Dataset):
    """The images as a textbook reads them, one at a time: (float tensor (C, H, W), label)."""

    def __init__(self, data):
        self.images = [to_pil_image(image) for image, _ in data]
        self.labels = [int(label) for _, label in data]
        mirror = [transforms.RandomHorizontalFlip()] if self.images[0].mode == "RGB" else []
        self.transform = transforms.Compose(
            [*mirror, transforms.ToTensor(), transforms.Normalize(0.5, 0.5)]
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


def prepare(variant, data, args, device):
    """Returns what a variant trains with: its model, optimizer and loader."""
    layout = torch.contiguous_format if variant == "textbook" else torch.channels_last
    model = snsc.build_model(args.dataset).to(device, memory_format=layout)
    if variant == "ddp" or (variant == "textbook" and dist.get_world_size() > 1):
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    data = PilImages(data) if variant == "textbook" else data
    pin = device.type == "cuda" and variant != "textbook"
    options = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    loader = DataLoader(data, args.batch_size, shuffle=True, pin_memory=pin, **options)
    return SimpleNamespace(
        model=model, optimizer=optimizer, loader=loader, args=args, device=device
    )


def step(setup, images, labels):
    """The arithmetic of a step; returns (loss, logits)."""
    logits = setup.model(images)
    loss = F.cross_entropy(logits, labels)
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss, logits


def run_bare(setup):
    images, labels = (tensor.to(setup.device) for tensor in next(iter(setup.loader)))
    images = images.to(torch.float32, memory_format=torch.channels_last) / 127.5 - 1
    for _ in range(len(setup.loader)):
        step(setup, images, labels)


def run_script(script, setup):
    train = script.train_one_epoch
    # This is always the first of five epochs.
    train(setup.model, setup.loader, setup.optimizer, 0.01, 0, setup.args, setup.device)


def run_textbook(setup):
    loss_sum = correct = 0
    for images, labels in setup.loader:
        images, labels = images.to(setup.device), labels.to(setup.device)
        loss, logits = step(setup, images, labels)
        loss_sum += loss.item()
        correct += (logits.argmax(1) == labels).sum().item()


VARIANTS = {
    "bare": run_bare,
    "ours": partial(run_script, snsc),
    "ddp": partial(run_script, mnmc_ddp_env),
    "textbook": run_textbook,
}


def measure(args, device):
    """Runs all variants in turn, again and again; returns the row of the table."""
    images = torch.randint(256, (args.images, *SHAPES[args.dataset]), dtype=torch.uint8)
    data = TensorDataset(images, torch.randint(10, (args.images,)))
    setups = {variant: prepare(variant, data, args, device) for variant in VARIANTS}
    speeds = {variant: [] for variant in VARIANTS}
    for repeat in range(args.repeats + 1):
        for variant, setup in setups.items():
            dist.barrier()
            started = time.perf_counter()
            VARIANTS[variant](setup)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = torch.tensor(time.perf_counter() - started, device=device)
            dist.all_reduce(seconds)  # the sum over the processes: W times their mean
            if repeat > 0:  # The first turn warms up.
                speeds[variant].append(args.images * dist.get_world_size() ** 2 / seconds.item())
    medians = {variant: statistics.median(turns) for variant, turns in speeds.items()}
    row = {"data": args.dataset, "batch": args.batch_size, "processes": dist.get_world_size()}
    row |= {variant: round(speed) for variant, speed in medians.items()}
    return row | {"ddp/ours": f"{medians['ddp'] / medians['ours']:.2f}"}


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dataset", choices=SHAPES, default="mnist", help="default: mnist")
    add("--batch-size", nargs="+", type=int, default=[64, 256], help="default: 64 256")
    add("--images", type=int, default=5120, help="of a turn, in each process; default: 5120")
    add("--workers", type=int, default=0, help="of each process and variant; default: 0")
    add("--repeats", type=int, default=5, help="turns of each variant; default: 5")
    return parser.parse_args()


def main():
    args = parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    rows = []
    for batch_size in args.batch_size:
        setting = vars(args) | {"batch_size": batch_size, "epochs": 5, "amp": False}
        rows.append(measure(argparse.Namespace(**setting), device))
    if dist.get_rank() == 0:
        print(f"{common.describe_machine()}, {args.images} images a turn, {args.repeats} turns\n")
        common.print_table(rows)
    dist.destroy_process_group()  # measure() has returned, and the DDP models are gone.


if __name__ == "__main__":
    main()
