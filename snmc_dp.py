"""Single node, multiple GPUs, one process: nn.DataParallel around the model.

What changes from snsc.py: the model is wrapped, and --gpu is gone, because all visible GPUs are
used. In every step one process copies the model to all GPUs, splits the batch between them, and
gathers the outputs and the gradients on the first GPU. So this GPU needs more memory than the
others, and no second machine can join. DDP has neither limit. On a CPU the wrapper changes nothing.

    python snmc_dp.py                                       # all GPUs
    CUDA_VISIBLE_DEVICES=0,2 python snmc_dp.py -b 256       # two of them, 128 images each
    python snmc_dp.py --dataset synthetic --epochs 1        # no download, seconds on a laptop
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchvision import datasets, models
from tqdm import tqdm


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dataset", choices=("mnist", "cifar10", "synthetic"), default="mnist")
    add("--data-root", default="data", help="default: ./data")
    add("-j", "--workers", type=int, default=0, help="processes that read batches; default: 0")
    add("-e", "--epochs", type=int, default=2, help="default: 2")
    add("-b", "--batch-size", type=int, default=64, help="default: 64")
    add("--lr", type=float, default=0.1, help="peak learning rate for a batch of 64; default: 0.1")
    add("--seed", type=int, default=0, help="default: 0")
    add("--amp", action="store_true", help="mixed precision (bfloat16)")
    add("--checkpoint", type=Path, help="save every epoch; resume if it exists")
    return parser.parse_args()


def train(args, device):
    """Loads the data, builds the model, and then trains, tests and saves it epoch by epoch."""
    train_set = load_split(args.dataset, args.data_root, train=True)
    test_set = load_split(args.dataset, args.data_root, train=False)
    options = {
        "num_workers": args.workers,  # processes that read batches ahead
        "persistent_workers": args.workers > 0,  # They stay from epoch to epoch.
        # Starting workers draws their seed. A resumed run starts them in another epoch, and must
        # not draw other numbers in augment() because of that. So this has its own generator.
        "generator": torch.Generator().manual_seed(args.seed),
        "pin_memory": device.type in ("cuda", "xpu"),  # makes the copies to the GPU faster
    }
    # The sampler shuffles with the global generator, which gets a seed in each epoch below. With
    # shuffle=True the loader would shuffle with its own generator, which gets none.
    train_sampler = RandomSampler(train_set)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **options)
    test_loader = DataLoader(test_set, 1000, **options)

    torch.manual_seed(args.seed)  # The initial weights follow from this seed.
    model = build_model(args.dataset).to(device, memory_format=torch.channels_last)
    # The wrapper has no weights of its own: it trains those of model. We test and save model.
    dp_model = nn.DataParallel(model)
    peak_lr = args.lr * args.batch_size / 64  # --lr is meant for a batch of 64 images.
    optimizer = torch.optim.SGD(
        model.parameters(), lr=peak_lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    start_epoch = 0
    if args.checkpoint:
        args.checkpoint = args.checkpoint.expanduser()  # The shell does not, in --checkpoint=~/x.
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)  # Fail here, not after an epoch.
        if args.checkpoint.exists():
            start_epoch = load_checkpoint(args.checkpoint, model, optimizer)
            print(f"resumed {args.checkpoint} after epoch {start_epoch}/{args.epochs}", flush=True)

    for epoch in range(start_epoch, args.epochs):
        # The order of the images and those that augment() mirrors follow from this seed. So a
        # resumed run repeats what an uninterrupted one would have done.
        torch.manual_seed(args.seed + epoch)
        started = time.perf_counter()
        loss, accuracy = train_one_epoch(
            dp_model, train_loader, optimizer, peak_lr, epoch, args, device
        )
        seconds = time.perf_counter() - started
        correct, count = evaluate(model, test_loader, device)
        if args.checkpoint:
            save_checkpoint(args.checkpoint, model, optimizer, epoch + 1)
        print(
            f"epoch {epoch + 1}/{args.epochs} | train loss {loss:.4f} acc {accuracy:.2f}% | "
            f"test acc {100 * correct / count:.2f}% ({correct}/{count}) | "
            f"{len(train_set) / seconds:.0f} img/s | {seconds:.1f} s",
            flush=True,
        )


def train_one_epoch(model, train_loader, optimizer, peak_lr, epoch, args, device):
    """Trains for one epoch; returns (mean loss, accuracy in percent)."""
    totals = torch.zeros(3, device=device)  # loss, correct images, images
    model.train()
    bar = tqdm(train_loader, leave=False)
    for step, (images, labels) in enumerate(bar):
        # progress goes from 0 to 1 over all epochs. The learning rate rises in the first fifth,
        # then falls to 0. The + 0.5 keeps it above 0 in the first step.
        progress = (epoch + (step + 0.5) / len(train_loader)) / args.epochs
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(progress / 0.2, (1 - progress) / 0.8)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        if args.dataset == "cifar10":
            images = augment(images)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp):
            logits = model(normalize(images))
            loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals[0] += loss.detach() * len(labels)
        totals[1] += (logits.argmax(1) == labels).sum()
        totals[2] += len(labels)
        if step % 50 == 0:  # The bar shows the loss of this batch. item() waits for the GPU.
            bar.set_postfix(loss=loss.item(), refresh=False)
    loss_sum, correct, count = totals.tolist()
    return loss_sum / count, 100 * correct / count


@torch.inference_mode()
def evaluate(model, test_loader, device):
    """Tests the model; returns (correct images, images)."""
    totals = torch.zeros(2, dtype=torch.int64, device=device)  # correct images, images
    model.eval()
    for images, labels in test_loader:
        # Without autocast, so that one can compare the accuracies of runs with and without --amp.
        logits = model(normalize(images.to(device)))
        totals[0] += (logits.argmax(1) == labels.to(device)).sum()
        totals[1] += len(labels)
    return totals.tolist()


# From here to main() the six scripts are the same.


def save_checkpoint(path, model, optimizer, epoch):
    """Writes what a resumed run needs; epoch is the number of epochs finished."""
    temporary = path.with_name(path.name + ".tmp")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
        temporary,
    )
    temporary.replace(path)  # Atomic: a run that is killed leaves the old file or the new one.


def load_checkpoint(path, model, optimizer):
    """Restores what save_checkpoint wrote; returns the number of epochs finished."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many errors, and does not name the file.
        raise RuntimeError(f"{path} cannot be read as a checkpoint") from error
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


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
        # The division by 8, found by trial, keeps training stable at the high learning rates of
        # large batches.
        return self.classifier(x.flatten(1)) / 8


def build_model(dataset):
    """Returns an untrained model with 10 classes for the data set's images."""
    if dataset == "cifar10":
        # ResNet-18 is made for larger images: its first layers shrink 32 x 32 pixels to 8 x 8. This
        # is fast, but limits its accuracy. zero_init_residual makes the start of training stable.
        return models.resnet18(weights=None, num_classes=10, zero_init_residual=True)
    return ConvNet()


def load_split(dataset, data_root, train):
    """Returns a split as a Dataset of pairs: image uint8 (C, H, W), label int64 ()."""
    if dataset == "synthetic":
        # Each class has a template, a grid of 7 x 7 random gray squares. An image is its class's
        # template plus noise, cut off at 0 and 255. The noise is strong: its standard deviation is
        # 350. With less noise the task would be too easy.
        generator = torch.Generator().manual_seed(0)  # the same templates for both splits
        templates = F.interpolate(torch.rand(10, 1, 7, 7, generator=generator), scale_factor=4)
        generator.manual_seed(1 if train else 2)
        labels = torch.randint(10, (10_000 if train else 2_000,), generator=generator)
        images = torch.normal(255 * templates[labels], 350, generator=generator).clamp(0, 255)
        return TensorDataset(images.to(torch.uint8), labels)
    dataset_class = datasets.MNIST if dataset == "mnist" else datasets.CIFAR10
    try:
        split = dataset_class(data_root, train=train, download=True)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(
            f"{error}\ncannot load {dataset}: if {data_root} holds a part of it, delete that part; "
            "--dataset synthetic needs no download"
        )
    images, labels = torch.as_tensor(split.data), torch.as_tensor(split.targets)
    # MNIST's images are (N, H, W), and those of CIFAR-10 (N, H, W, C).
    images = images.unsqueeze(1) if dataset == "mnist" else images.permute(0, 3, 1, 2)
    return TensorDataset(images, labels)


def augment(images):
    """Mirrors about half of the images, (N, C, H, W). Longer trainings need more than mirroring."""
    mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(mirrored, images.flip(3), images)


def normalize(images):
    """Turns pixels from 0 to 255 into float32 from -1 to 1, in the model's channels_last layout."""
    # In this layout, where the channels of a pixel lie side by side, convolutions are faster.
    return images.to(torch.float32, memory_format=torch.channels_last) / 127.5 - 1


def main():
    args = parse_args()
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # None without a GPU
    if args.amp and torch.accelerator.device_count() > 1:
        # Autocast's dtype holds for one thread; the threads of DataParallel would use float16.
        sys.exit("--amp needs a single GPU in this script: set CUDA_VISIBLE_DEVICES")
    device = torch.device(accelerator.type, 0) if accelerator else torch.device("cpu")
    print(f"[init] {device}", flush=True)
    train(args, device)


if __name__ == "__main__":
    main()
