"""Multiple nodes, multiple GPUs: DistributedDataParallel (DDP), started by torchrun.

Each GPU has its own process, with a copy of the model and a shard of the data. What changes from
mnmc_ddp_tcp.py: torchrun starts the processes of each node (machine), and ends them if one fails.
It tells each process by environment variables its rank (number among all processes), its local rank
(number on its node), the world size (how many processes there are) and the address where they meet.

Eight things turn a script into a DDP script. Comments such as "# 6" mark them:

    1 take your own GPU
    2 join the process group
    3 one process downloads
    4 take your own shard, and set_epoch
    5 wrap the model
    6 a learning rate for the larger batch
    7 add up the metrics, print and save on one rank
    8 leave

    # One machine, two processes. On a machine with one GPU add --backend gloo.
    torchrun --standalone --nproc-per-node 2 mnmc_ddp_env.py --dataset synthetic
    # Two machines, a line on each. 192.0.2.1 is the first's address; "gpu" means a process per GPU:
    torchrun --nnodes 2 --node-rank 0 --master-addr 192.0.2.1 --nproc-per-node gpu mnmc_ddp_env.py
    torchrun --nnodes 2 --node-rank 1 --master-addr 192.0.2.1 --nproc-per-node gpu mnmc_ddp_env.py
"""

import argparse
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets, models
from tqdm import tqdm


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dataset", choices=("mnist", "cifar10", "synthetic"), default="mnist")
    add("--data-root", type=Path, default="data", help="default: ./data")
    add("-e", "--epochs", type=int, default=2, help="default: 2")
    add("-b", "--batch-size", type=int, default=64, help="for one process; default: 64")
    add("--lr", type=float, default=0.1, help="peak learning rate for a batch of 64; default: 0.1")
    add("--seed", type=int, default=0, help="default: 0")
    add("--amp", action="store_true", help="mixed precision (bfloat16)")
    add("--checkpoint", type=Path, metavar="FILE", help="save every epoch; resume if it exists")
    add("--backend", choices=("gloo", "nccl", "xccl"), help="default: nccl on GPUs, gloo on CPUs")
    add("--timeout", type=float, default=600, help="seconds to wait for a rank; default: 600")
    add("--sync-bn", action="store_true", help="BatchNorm over all ranks; needs GPUs")
    return parser.parse_args()


def setup_distributed(args):
    """Joins the process group; returns (local rank, device)."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start this script with torchrun: torchrun --nproc-per-node 2 mnmc_ddp_env.py")
    local_rank = int(os.environ["LOCAL_RANK"])
    # 1 Take your own GPU. If there are too few, processes share one: nccl refuses, gloo does not.
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # None without a GPU
    if accelerator and accelerator.type != "mps":  # A Mac's GPU cannot communicate.
        device = torch.device(accelerator.type, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)  # Now "cuda" means this GPU.
    else:
        device = torch.device("cpu")
    # The backend moves tensors between processes: nccl on GPUs, xccl on Intel's, gloo on CPUs.
    backend = args.backend or dist.get_default_backend_for_device(device)
    # 2 Join the process group, all processes that train together. The call returns when all are in.
    dist.init_process_group(
        backend=backend,
        init_method="env://",  # torchrun has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
        timeout=timedelta(seconds=args.timeout),
        # With its GPU known, nccl connects now, and not at its first call: a fault shows here.
        device_id=device if backend == "nccl" else None,
    )
    print(
        f"[init] rank {dist.get_rank()}/{dist.get_world_size()} | local rank {local_rank} | "
        f"{device} | {backend} | {socket.gethostname()}\n",
        end="",  # torchrun's Python is unbuffered: with print's own newline, lines would mix.
        flush=True,
    )
    return local_rank, device


def train(args, local_rank, device):
    """Loads the data, builds the model, and then trains, tests and saves it epoch by epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # In a collective call the ranks wait for one another: barrier() only waits, broadcast() copies
    # from one rank to all, all_reduce() gives every rank the sum. DDP makes such calls, too: its
    # constructor copies the weights of rank 0, a forward in training begins with a copy of rank 0's
    # BatchNorm statistics, and backward averages gradients. All ranks must make the same calls in
    # the same order, or they wait until --timeout, and fail.

    # 3 One process downloads, because two would write the same files: rank 0, in the first of three
    # turns. The second is for the first process of each other node, in case the nodes share no data
    # folder, and the third for all others, who find the files.
    for my_turn in (rank == 0, rank > 0 and local_rank == 0, rank > 0 and local_rank > 0):
        if my_turn:
            train_set = load_split(args.dataset, args.data_root, train=True)
            test_set = load_split(args.dataset, args.data_root, train=False)
        dist.barrier()
    # 4 Take your own shard. DistributedSampler shuffles by seed and epoch, on all ranks alike, and
    # gives each rank its part. It repeats a few images so that all parts are equally long: backward
    # is a collective call, so all ranks need the same number of steps.
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, seed=args.seed)
    # batch_sampler yields lists, each with the indices of a batch. With batch_size=None the loader
    # takes a list as it is, and reads train_set[list], a whole batch in one operation. With
    # batch_size=64, the usual way, it would read images one by one, and stack them.
    batch_sampler = BatchSampler(sampler, args.batch_size, drop_last=False)
    pin = device.type in ("cuda", "xpu")  # Such a GPU copies from pinned memory while it computes.
    loader = DataLoader(train_set, sampler=batch_sampler, batch_size=None, pin_memory=pin)
    # Each test image is used once. Some ranks get one image more than others. That is allowed here,
    # because no rank waits for another between test batches.
    test_sampler = BatchSampler(range(rank, len(test_set), world_size), 1000, drop_last=False)
    test_loader = DataLoader(test_set, sampler=test_sampler, batch_size=None)

    torch.manual_seed(args.seed)  # This makes the initial weights repeatable.
    # Convolutions are fast if weights and images are channels_last. All images here are.
    model = build_model(args.dataset).to(device, memory_format=torch.channels_last)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # 5 Wrap the model. backward then packs gradients into buckets, tensors of many gradients, and
    # averages a full bucket over all ranks while it fills the next. With gradient_as_bucket_view
    # each backward makes .grad a view of a bucket, which saves a copy.
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # model and ddp_model share parameters and buffers. We test and save model: its forward makes no
    # collective call, and its state_dict has plain names, without "module.".
    optimizer = torch.optim.SGD(  # train_one_epoch() replaces lr in each step.
        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    if args.checkpoint:  # Make its folder now. If that fails, no epoch is lost.
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    start_epoch = load_checkpoint(args.checkpoint, model, optimizer) if args.checkpoint else 0
    if rank == 0 and start_epoch > 0:
        print(f"resumed {args.checkpoint} after epoch {start_epoch}/{args.epochs}", flush=True)

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)  # 4 Otherwise every epoch would have the same order.
        # augment() draws from this seed, which differs between ranks and epochs. A resumed run
        # repeats an uninterrupted one, if options and world size are the same.
        torch.manual_seed(args.seed + epoch * world_size + rank)
        started = time.perf_counter()
        loss, accuracy = train_one_epoch(ddp_model, loader, optimizer, epoch, args, device)
        seconds = time.perf_counter() - started
        correct, count = evaluate(model, test_loader, device)
        if rank == 0:  # 7 One rank prints and saves. No collective call may stand under this if.
            if args.checkpoint:
                save_checkpoint(args.checkpoint, model, optimizer, epoch + 1)
            print(
                f"epoch {epoch + 1}/{args.epochs} | train loss {loss:.4f} acc {accuracy:.2f}% | "
                f"test acc {100 * correct / count:.2f}% ({correct}/{count}) | "
                f"{len(train_set) / seconds:.0f} img/s | {seconds:.1f} s",
                flush=True,
            )


def main():
    args = parse_args()
    local_rank, device = setup_distributed(args)
    train(args, local_rank, device)
    # 8 Leave: close the connections to the other ranks. Otherwise gloo can crash Python at exit.
    dist.destroy_process_group()


def train_one_epoch(model, loader, optimizer, epoch, args, device):
    """Trains the wrapped model for an epoch; returns (mean loss, accuracy in percent)."""
    peak_lr = args.lr * args.batch_size / 64  # --lr is meant for a batch of 64 images.
    # 6 A learning rate for the larger batch of all ranks together: fewer steps, so larger ones.
    peak_lr *= dist.get_world_size()
    totals = torch.zeros(3, device=device)  # loss, correct images, images
    model.train()
    # disable=None shows the bar if the output is a terminal. All ranks but 0 hide it.
    bar = tqdm(loader, leave=False, disable=None if dist.get_rank() == 0 else True)
    for step, (images, labels) in enumerate(bar):
        # From 0 to 1 over all epochs. The learning rate is highest at 0.2, and 0 at both ends.
        progress = (epoch + (step + 0.5) / len(loader)) / args.epochs  # in the middle of a step
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(progress / 0.2, (1 - progress) / 0.8)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        if args.dataset == "cifar10":
            images = augment(images)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp):
            logits = model(images.float() / 127.5 - 1)  # pixels from -1 to 1
            loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals[0] += loss.detach() * len(labels)
        totals[1] += (logits.argmax(1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)  # 7 Add up the metrics: totals becomes the sum over all ranks.
    # The totals leave the GPU once an epoch: an .item() in each step would wait for the GPU.
    loss_sum, correct, count = totals.tolist()
    return loss_sum / count, 100 * correct / count


@torch.inference_mode()
def evaluate(model, loader, device):
    """Tests the bare model, always in float32; returns (correct images, images) of all ranks."""
    # In the last forward each rank has updated BatchNorm's statistics by its own images. Copy those
    # of rank 0, so that all ranks test the model that rank 0 saves.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    model.eval()
    for images, labels in loader:
        logits = model(images.to(device).float() / 127.5 - 1)
        totals[0] += (logits.argmax(1) == labels.to(device)).sum()
        totals[1] += len(labels)
    dist.all_reduce(totals)  # 7 Add up the counts.
    return totals.tolist()


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
    # Rank 0 decides whether to resume, so that all ranks train the same epochs. Its answer is a
    # tensor on the device of the model, because nccl sends nothing else.
    found = torch.tensor(path.exists(), device=next(model.parameters()).device)
    dist.broadcast(found, src=0)
    if not found:
        return 0
    # Every rank reads the file, so every node must see it. DDP has copied the weights of rank 0
    # already, in its constructor, and never copies the optimizer's state.
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)  # runs no code of the file
    except Exception as error:  # torch raises many types, and does not name the file.
        sys.exit(f"{path} cannot be read as a checkpoint: {repr(error)[:90]}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


# From here on the six scripts are the same: model and data.


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
        # The division keeps the logits small, so that training survives large learning rates. With
        # --lr 0.8 an epoch of MNIST gives 99%, and without the division 11%, which is guessing.
        return self.classifier(x.flatten(1)) / 8


def build_model(dataset):
    """Returns an untrained model with 10 classes for the data set's images."""
    if dataset == "cifar10":
        # ResNet-18 is made for larger images: its first layers shrink 32 x 32 pixels to 8 x 8. This
        # is fast, but limits it to 75% after 5 epochs. zero_init_residual makes the start stable.
        return models.resnet18(weights=None, num_classes=10, zero_init_residual=True)
    return ConvNet()


def load_split(dataset, data_root, train):
    """Returns a split: images uint8 (N, C, H, W), channels_last, and labels int64 (N,)."""
    if dataset == "synthetic":
        # Each class has a template, 7 x 7 random pixels enlarged to 28 x 28. An image is a template
        # with noise, so strong that a model needs many images. Both splits have the same templates.
        generator = torch.Generator().manual_seed(0)
        templates = F.interpolate(torch.rand(10, 1, 7, 7, generator=generator), scale_factor=4)
        generator.manual_seed(1 if train else 2)
        labels = torch.randint(10, (10_000 if train else 2_000,), generator=generator)
        images = torch.normal(255 * templates[labels], 350, generator=generator).clamp(0, 255)
        return TensorDataset(images.to(torch.uint8, memory_format=torch.channels_last), labels)
    dataset_class = datasets.MNIST if dataset == "mnist" else datasets.CIFAR10
    try:
        split = dataset_class(data_root, train=train, download=True)
    except (OSError, RuntimeError) as error:
        sys.exit(f"{error}\ncannot load {dataset}: --dataset synthetic needs no download")
    images, labels = torch.as_tensor(split.data), torch.as_tensor(split.targets)
    images = images.unsqueeze(3) if dataset == "mnist" else images  # Now both are (N, H, W, C).
    return TensorDataset(images.permute(0, 3, 1, 2), labels)  # in memory N, H, W, C: channels_last


def augment(images):
    """Shifts each image by up to 4 pixels and mirrors half: uint8 (N, C, H, W), same out."""
    n, _, height, width = images.shape
    # A view (N, 9, 9, C, H, W): windows[i, y, x] is padded image i from row y and column x on.
    windows = F.pad(images, (4, 4, 4, 4)).unfold(2, height, 1).unfold(3, width, 1).movedim(1, 3)
    y, x = torch.randint(9, (2, n), device=images.device)
    images = windows[torch.arange(n, device=images.device), y, x]  # one part of each image
    mirrored = torch.rand(n, 1, 1, 1, device=images.device) < 0.5
    return torch.where(mirrored, images.flip(3), images)


if __name__ == "__main__":
    main()
