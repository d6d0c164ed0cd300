"""Multiple nodes, multiple cards: DistributedDataParallel under Slurm.

What changes from mnmc_ddp_env.py: srun starts the processes, so rank, local rank and world size
come from SLURM_*, the address from the step's first node and the port from the job id, unless
MASTER_ADDR and MASTER_PORT are set. Where torchrun started the process, alone or inside srun,
its variables win.

Two nodes, four GPUs each, one task per GPU; and without Slurm:

    srun --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 python mnmc_ddp_slurm.py
    torchrun --nproc-per-node 2 mnmc_ddp_slurm.py --dataset synthetic

A real Slurm with two virtual nodes on this machine, to try it with:

    eval "$(bash scripts/local_slurm.sh start)"
    srun --nodes 2 --ntasks-per-node 2 python mnmc_ddp_slurm.py --dataset synthetic --epochs 1

As a batch job that goes on when it is requeued, with python or with one torchrun per node:

    sbatch scripts/mnmc_ddp_slurm.sbatch --dataset cifar10
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

# Unless set: none of torch's C++ error pages, for each has an exception that says it in one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
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


def setup_distributed(args):
    """Joins the process group; returns (rank, local rank, world size, device)."""
    if "RANK" in os.environ:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    elif "SLURM_STEP_NODELIST" in os.environ:  # set by srun, and not by sbatch or salloc alone
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
        # The address by which Slurm itself reaches the step's first node, where rank 0 is.
        if "MASTER_ADDR" not in os.environ:
            shown = subprocess.getoutput('scontrol --oneliner show node "$SLURM_STEP_NODELIST"')
            address = re.search(r"NodeAddr=(\S+)", shown)
            if not address:
                sys.exit("scontrol does not tell the first node's address: set MASTER_ADDR to it")
            os.environ["MASTER_ADDR"] = address[1]
        # Jobs on one node get different ports, below those that the kernel hands out.
        os.environ.setdefault("MASTER_PORT", str(10000 + int(os.environ["SLURM_JOB_ID"]) % 20000))
    else:
        sys.exit("neither srun nor torchrun started this: srun --ntasks 2 python mnmc_ddp_slurm.py")
    rank, local_rank, world_size = (int(os.environ[name]) for name in names)
    gpus = torch.cuda.device_count()
    # With --gpus-per-task each task sees one GPU alone, as number 0; gloo lets ranks share one.
    has_own_gpu = gpus == 1 and "RANK" not in os.environ
    if args.backend == "nccl" and local_rank >= gpus and not has_own_gpu:
        sys.exit(f"no GPU {local_rank} for rank {rank}, {gpus} on this node: start fewer ranks")
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    torch.cuda.set_device(device.index if gpus else -1)  # -1 sets nothing
    # The cores that Slurm gave to the task; more threads would fight for them.
    torch.set_num_threads(
        int(os.environ.get("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", 1)))
    )
    try:
        timeout = timedelta(seconds=args.timeout)
        dist.init_process_group(args.backend, "env://", timeout, world_size, rank)
    except Exception as error:  # torch has a dozen kinds for a bad address or an absent rank
        sys.exit(f"rank {rank} cannot join (address? old file? all up?): {error}".split("\n")[0])
    where = f"local rank {local_rank} | {device} | {args.backend} | {socket.gethostname()}"
    # One write a line, or the lines of several ranks would mix.
    print(f"[init] rank {rank}/{world_size} | {where}\n", end="", flush=True)
    return rank, local_rank, world_size, device


@contextmanager
def exit_together():
    """Ends all ranks when one exits inside, so that none waits for it; the first one says why."""
    words = None
    try:
        yield
    except SystemExit as error:
        words = error.code
    dist.all_gather_object(everyone := [None] * dist.get_world_size(), words)
    if any(everyone):
        sys.exit(1 if any(everyone[: dist.get_rank()]) else words or 1)


def train_one_epoch(model, loader, optimizer, scaler, epoch, args, device):
    """Trains for one epoch; returns (mean loss, accuracy in percent, images per second)."""
    started = time.perf_counter()
    peak_lr = args.lr * args.batch_size / 64  # --lr is per 64 images of a step
    peak_lr *= dist.get_world_size()  # a step averages the gradients of all ranks' images
    totals = torch.zeros(3, device=device)  # loss, correct, images: read once, after the epoch
    model.train()
    # disable=None shows the bar on terminals only; that is enough once, on rank 0.
    bar = tqdm(loader, f"epoch {epoch + 1}", leave=False, disable=dist.get_rank() > 0 or None)
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
    for buffer in model.buffers():  # BatchNorm's statistics differ by rank: all take rank 0's
        dist.broadcast(buffer, src=0)
    dist.all_reduce(totals)
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
    dist.all_reduce(totals)
    return totals.tolist()


def report(line):
    """Prints a line at once, so that logs and pipes show it while training goes on; rank 0 only."""
    if dist.get_rank() > 0:
        return
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


@exit_together()
def load_checkpoint(path, dataset, model, optimizer, scaler):
    """Restores what save_checkpoint wrote; returns the number of epochs finished, 0 if no file."""
    try:
        # Rank 0 knows whether there is a file; a rank that cannot see it fails, and with it all.
        dist.broadcast_object_list(exists := [os.path.exists(path)], src=0)
        if not exists[0]:
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


def leave_quietly(message):
    """Exits after the rank that complains: sooner, and the launcher would end that one, too."""
    time.sleep(5)
    sys.exit(2)


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
    add("--backend", choices=("gloo", "nccl"), default=("gloo", "nccl")[torch.cuda.is_available()])
    add("--timeout", type=float, default=600, help="seconds to wait for a rank; default: 600")
    add("--sync-bn", action="store_true", help="BatchNorm over all ranks' images (GPU)")
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
        parser.error = leave_quietly
    # --batch_size means --batch-size, as in torchrun.
    dashed = [re.sub("^--[^=]+", lambda m: m[0].replace("_", "-"), word) for word in sys.argv[1:]]
    args = parser.parse_args(dashed)
    for name in ("epochs", "batch_size", "lr"):
        if not 0 < getattr(args, name) < 1e9:
            parser.error(f"--{name.replace('_', '-')} must be above 0 and below 1e9")
    if not 0 <= args.seed < 2**32:
        parser.error("--seed must be between 0 and 2**32 - 1")
    if args.sync_bn and not torch.cuda.is_available():
        parser.error("--sync-bn needs GPUs: leave it out")
    return args


def main():
    args = parse_args()
    rank, local_rank, world_size, device = setup_distributed(args)

    # One process downloads: rank 0, then the first of every other node. Then everyone reads.
    for turn in (rank == 0, local_rank == 0, True):
        with exit_together():
            if turn:
                data = [load_split(args.dataset, args.data_root, train) for train in (True, False)]
    train_set, test_set = (TensorDataset(*split) for split in data)
    # Each rank trains on its own shard, padded to equal length, and tests on its own, not padded.
    # The sampler adds the epoch to its seed: times 1000, or seed 1 would repeat seed 0's orders.
    sampler = DistributedSampler(train_set, world_size, rank, seed=1000 * args.seed)
    test_sampler = range(rank, len(test_set), world_size)
    batches = BatchSampler(sampler, args.batch_size, drop_last=False)
    test_batches = BatchSampler(test_sampler, 1000, drop_last=False)
    pin = device.type == "cuda"  # pinned memory lets the copy to the GPU overlap with computing
    loader = DataLoader(train_set, sampler=batches, batch_size=None, pin_memory=pin)
    test_loader = DataLoader(test_set, sampler=test_batches, batch_size=None, pin_memory=pin)

    torch.manual_seed(args.seed)
    model = build_model(args.dataset).to(device, memory_format=torch.channels_last)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if args.sync_bn else model
    # DDP starts all ranks from rank 0's weights and averages gradients while backward still runs.
    parallel_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parallel_model.broadcast_buffers = False  # once an epoch will do: see train_one_epoch
    # DDP reorders gradients after the first backward, and sums in another order from then on: let
    # that one pass before the training, or a resumed run would differ in the last bit.
    parallel_model.eval()(train_set[:1][0].to(device).float()).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=5e-4, nesterov=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp and device.type == "cuda")
    start_epoch = 0
    if args.checkpoint:
        start_epoch = load_checkpoint(args.checkpoint, args.dataset, model, optimizer, scaler)

    started = time.perf_counter()
    for epoch in range(start_epoch, args.epochs):
        epoch_started = time.perf_counter()
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        torch.manual_seed(args.seed + 1000 * epoch + rank)  # augmentation, another on each rank
        loss, train_accuracy, speed = train_one_epoch(
            parallel_model, loader, optimizer, scaler, epoch, args, device
        )
        correct, count = evaluate(model, test_loader, device)
        if args.checkpoint and rank == 0:
            save_checkpoint(args.checkpoint, args.dataset, model, optimizer, scaler, epoch + 1)
        seconds = time.perf_counter() - epoch_started
        report(
            f"epoch {epoch + 1}/{args.epochs} | train loss {loss:.4f} acc {train_accuracy:.2f}% | "
            f"test acc {100 * correct / count:.2f}% ({correct}/{count}) | "
            f"{speed:.0f} img/s | {seconds:.1f} s"
        )
    report(f"training finished in {time.perf_counter() - started:.1f} s")
    # Gloo's threads drop the last tensors meanwhile: they need Python for it, and abort at exit.
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
