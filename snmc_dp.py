"""Single node, multiple cards, one process: nn.DataParallel around the model.

What changes from snsc.py: the model is wrapped, and --gpu is gone, for all visible GPUs are used.
Each step, one process copies the model to every GPU, splits the batch between them, gathers the
outputs on the first and adds the gradients up there: one Python process drives all GPUs, with
threads that hold each other up, the first GPU holds more than the rest, and it ends at one machine.
The next step, DDP, has none of these limits.
Without a GPU the wrapper does nothing and the script trains as snsc.py does.

    python snmc_dp.py                                       # all GPUs
    CUDA_VISIBLE_DEVICES=0,2 python snmc_dp.py -b 256       # two of them, 128 images each
    python snmc_dp.py --dataset synthetic --epochs 1        # no download, seconds on a laptop
    python snmc_dp.py --dataset cifar10 --amp               # ResNet-18, mixed precision
"""

import argparse
import os
import re
import socket
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from tqdm import tqdm


class ConvNet(nn.Module):
    """Small MNIST network: float images (N, 1, 28, 28) to float logits (N, 10)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, padding=2)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, padding=2)
        self.norm2 = nn.BatchNorm2d(32)
        self.classifier = nn.Linear(32 * 7 * 7, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.classifier(x.flatten(1)) / 8  # small logits keep large learning rates stable


def build_model(dataset):
    """Returns an untrained model with 10 classes for the data set's images."""
    if dataset == "cifar10":
        from torchvision.models import resnet18  # here, for torchvision takes a second to import

        # Residual branches that begin as zero learn faster from large batches (Goyal et al., 2017).
        return resnet18(weights=None, num_classes=10, zero_init_residual=True)
    return ConvNet()


def load_split(dataset, data_root, train):
    """Returns the training or test split as (images uint8 (N, C, H, W), labels int64 (N,)).

    Downloads what is not under data_root; exits with one line when that fails.
    """
    if dataset == "synthetic":
        # Ten fixed random templates under noise: learnable, and nothing to download.
        generator = torch.Generator().manual_seed(0)
        templates = torch.randint(256, (10, 1, 7, 7), generator=generator)
        templates = templates.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        generator.manual_seed(1 if train else 2)
        labels = torch.randint(10, (10_000 if train else 2_000,), generator=generator)
        noise = torch.randn(len(labels), 1, 28, 28, generator=generator)
        return (templates[labels] + 350 * noise).clamp(0, 255).to(torch.uint8), labels
    try:
        from torchvision import datasets

        if dataset == "mnist":
            split = datasets.MNIST(data_root, train=train, download=True)
            return split.data.unsqueeze(1), split.targets
        split = datasets.CIFAR10(data_root, train=train, download=True)
        return torch.from_numpy(split.data).permute(0, 3, 1, 2), torch.tensor(split.targets)
    except Exception as error:  # no network, no space, a damaged file: torchvision raises many
        reason = " ".join(str(error).split())  # in one line
        sys.exit(
            f"cannot load {dataset} from {data_root} ({reason}): check the network, delete damaged "
            "files, or train with --dataset synthetic"
        )


def augment(images):
    """Shifts each image by up to 4 pixels and mirrors half: uint8 (N, C, H, W), same out."""
    n, _, height, width = images.shape
    device = images.device
    rows = torch.arange(height, device=device) + torch.randint(9, (n, 1), device=device)
    columns = torch.arange(width, device=device) + torch.randint(9, (n, 1), device=device)
    mirrored = torch.rand(n, 1, device=device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    pixels = F.pad(images, (4, 4, 4, 4)).permute(0, 2, 3, 1)  # channels last: one gather a pixel
    index = torch.arange(n, device=device)[:, None, None]
    return pixels[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def train_one_epoch(model, loader, optimizer, scaler, epoch, args, device):
    """Trains for one epoch; returns (mean loss, accuracy in percent, images per second)."""
    started = time.perf_counter()
    peak_lr = args.lr * args.batch_size / 64  # --lr is per 64 images of a step
    totals = torch.zeros(3, device=device)  # loss, correct, images: read once, after the epoch
    model.train()
    # disable=None shows the bar on terminals only.
    bar = tqdm(loader, f"epoch {epoch + 1}", leave=False, disable=None)
    for step, (images, labels) in enumerate(bar):
        # One cycle, warm-up and anneal, by the fraction of training done: no state to save.
        done = (epoch + (step + 0.5) / len(loader)) / args.epochs
        optimizer.param_groups[0]["lr"] = peak_lr * min(done / 0.2, (1 - done) / 0.8)
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        if args.dataset == "cifar10":
            images = augment(images)
        with torch.autocast(device.type, enabled=args.amp):  # fp16 on CUDA, bf16 on CPU
            logits = model(images.float() / 127.5 - 1)
            loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        totals[0] += loss.detach() * len(labels)
        totals[1] += (logits.argmax(1) == labels).sum()
        totals[2] += len(labels)
    loss_sum, correct, count = totals.tolist()
    return loss_sum / count, 100 * correct / count, count / (time.perf_counter() - started)


@torch.inference_mode()
def evaluate(model, loader, device):
    """Returns (correct images, all images) over the loader."""
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    model.eval()
    for images, labels in loader:
        logits = model(images.to(device).float() / 127.5 - 1)
        totals[0] += (logits.argmax(1) == labels.to(device)).sum()
        totals[1] += len(labels)
    return totals.tolist()


def report(line):
    """Prints a line at once, so that logs and pipes show it while training goes on."""
    print(line, flush=True)


def save_checkpoint(path, dataset, model, optimizer, scaler, epoch):
    """Writes what a resume needs to path, whole or not at all; epoch is the number finished."""
    temporary = path.with_name(path.name + ".tmp")
    state = {"dataset": dataset, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    try:
        torch.save(state | {"scaler": scaler.state_dict(), "epoch": epoch}, temporary)
        os.replace(temporary, path)  # atomic: a crash leaves the old file or the new one
    except (OSError, RuntimeError) as error:
        sys.exit(f"cannot write the checkpoint {path}: {error}")


def load_checkpoint(path, dataset, model, optimizer, scaler):
    """Restores what save_checkpoint wrote; returns the number of epochs finished, 0 if no file."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()  # fails now, not after an epoch
            return 0
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["dataset"] != dataset:
            raise ValueError(f"it was trained on {state['dataset']}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:  # empty when saved without fp16
            scaler.load_state_dict(state["scaler"])
        return state["epoch"]
    except Exception as error:  # a damaged file makes torch.load raise almost anything
        # In one line, without the second sentence: torch advises there to switch weights_only off.
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 250).split(". ")[0]
        sys.exit(f"cannot use the checkpoint {path} ({reason}): name another file")


def parse_args():
    """Returns the command line's options; exits with one line when a value cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dataset", choices=("mnist", "cifar10", "synthetic"), default="mnist")
    add("--data-root", type=Path, default="data", help="default: ./data")
    add("-e", "--epochs", type=int, default=2, help="default: 2")
    add("-b", "--batch-size", type=int, default=64, help="images per process; default: 64")
    add("--lr", type=float, default=0.1, help="peak, per 64 images of a step; default: 0.1")
    add("--seed", type=int, default=0, help="default: 0")
    add("--amp", "--use-mix-precision", action="store_true", help="mixed precision")
    add("--checkpoint", type=Path, metavar="FILE", help="save every epoch; resume if it exists")
    # --batch_size means --batch-size, as in torchrun.
    dashed = [re.sub("^--[^=]+", lambda m: m[0].replace("_", "-"), word) for word in sys.argv[1:]]
    args = parser.parse_args(dashed)
    for name in ("epochs", "batch_size", "lr"):
        if not 0 < getattr(args, name) < 1e9:
            parser.error(f"--{name.replace('_', '-')} must be above 0 and below 1e9")
    if not 0 <= args.seed < 2**32:
        parser.error("--seed must be between 0 and 2**32 - 1")
    return args


def main():
    args = parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    print(f"[init] rank 0/1 | local rank 0 | {device} | none | {socket.gethostname()}", flush=True)

    data = [load_split(args.dataset, args.data_root, train) for train in (True, False)]
    train_set, test_set = (TensorDataset(*split) for split in data)
    sampler = RandomSampler(train_set)
    test_sampler = range(len(test_set))
    batches = BatchSampler(sampler, args.batch_size, drop_last=False)
    test_batches = BatchSampler(test_sampler, 1000, drop_last=False)
    pin = device.type == "cuda"  # pinned memory lets the copy to the GPU overlap with computing
    loader = DataLoader(train_set, sampler=batches, batch_size=None, pin_memory=pin)
    test_loader = DataLoader(test_set, sampler=test_batches, batch_size=None, pin_memory=pin)

    torch.manual_seed(args.seed)
    model = build_model(args.dataset).to(device, memory_format=torch.channels_last)
    # Every forward replicates the model to all GPUs and gives each its part of the batch.
    parallel_model = nn.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=5e-4, nesterov=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp and device.type == "cuda")
    start_epoch = 0
    if args.checkpoint:
        start_epoch = load_checkpoint(args.checkpoint, args.dataset, model, optimizer, scaler)

    started = time.perf_counter()
    for epoch in range(start_epoch, args.epochs):
        epoch_started = time.perf_counter()
        torch.manual_seed(args.seed + 1000 * epoch)  # order and augmentation depend on nothing else
        loss, train_accuracy, speed = train_one_epoch(
            parallel_model, loader, optimizer, scaler, epoch, args, device
        )
        correct, count = evaluate(model, test_loader, device)
        if args.checkpoint:
            save_checkpoint(args.checkpoint, args.dataset, model, optimizer, scaler, epoch + 1)
        seconds = time.perf_counter() - epoch_started
        report(
            f"epoch {epoch + 1}/{args.epochs} | train loss {loss:.4f} acc {train_accuracy:.2f}% | "
            f"test acc {100 * correct / count:.2f}% ({correct}/{count}) | "
            f"{speed:.0f} img/s | {seconds:.1f} s"
        )
    report(f"training finished in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
