"""Multiple nodes, multiple GPUs: DistributedDataParallel (DDP), every process started by hand.

What changes from snmc_dp.py: each GPU has its own process, with a copy of the model and a shard of
the data. DDP averages the gradients of all processes, so the copies stay equal. Each process is
told its number (rank), how many there are (world size), and where they meet: at an address where
rank 0 listens (tcp://) or in a new file that all can write (file://).

Eight things turn a script into a DDP script: 1 join the process group, 2 take your own GPU, 3
download once, 4 take your own shard, 5 wrap the model, 6 scale the learning rate, 7 add up the
metrics, and print and save on one rank, 8 leave. Numbered comments mark them; 2 comes before 1.

    # One machine, two terminals. If they share a GPU, add --backend gloo.
    python mnmc_ddp_tcp.py --dataset synthetic --world-size 2 --rank 0
    python mnmc_ddp_tcp.py --dataset synthetic --world-size 2 --rank 1
    # Two machines with one GPU each, a line on each; 192.0.2.1 is the address of the first:
    python mnmc_ddp_tcp.py --init-method tcp://192.0.2.1:18888 --world-size 2 --rank 0 --gpu 0
    python mnmc_ddp_tcp.py --init-method tcp://192.0.2.1:18888 --world-size 2 --rank 1 --gpu 0
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
import torch.distributed.nn  # not used: see mark 8 and docs/gloo_abort_at_exit.md
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Subset, TensorDataset
from torchvision import datasets, models
from tqdm import tqdm


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dataset", choices=("mnist", "cifar10", "synthetic"), default="mnist")
    add("--data-root", type=Path, default="data", help="default: ./data")
    add("-e", "--epochs", type=int, default=2, help="default: 2")
    add("-b", "--batch-size", type=int, default=64, help="in DDP for each process; default: 64")
    add("--lr", type=float, default=0.1, help="peak learning rate for a batch of 64; default: 0.1")
    add("--seed", type=int, default=0, help="default: 0")
    add("--amp", action="store_true", help="mixed precision (bfloat16)")
    add("--checkpoint", type=Path, metavar="FILE", help="save every epoch; resume if it exists")
    add("--backend", choices=("gloo", "nccl"), help="default: nccl on GPUs, gloo on CPUs")
    add("--timeout", type=float, default=600, help="seconds to wait for a rank; default: 600")
    add("--sync-bn", action="store_true", help="BatchNorm over the images of all ranks (GPU)")
    add("--init-method", default="tcp://127.0.0.1:18888", help="default: tcp://127.0.0.1:18888")
    add("-r", "--rank", type=int, default=0, help="default: 0")
    add("--world-size", type=int, default=1, help="number of processes; default: 1")
    add("-g", "--gpu", type=int, help="local rank, and which GPU; default: the rank")
    return parser.parse_args()


def setup_distributed(args):
    """Joins the process group; returns (local rank, device)."""
    if not 0 <= args.rank < args.world_size:
        sys.exit("--rank must be below --world-size")
    local_rank = args.rank if args.gpu is None else args.gpu
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # Otherwise the processes of a node fight for its cores.
    # 2 Take your own GPU. The local rank is the number of a process on its node. If it is larger
    # than the last GPU's number, % starts again at GPU 0, so that processes share the GPUs.
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)  # Now "cuda" without a number means this GPU.
    else:
        device = torch.device("cpu")
    # The backend is the library that moves tensors between processes. nccl is fast and needs a GPU
    # for each process. gloo is for CPUs, and for processes that share a GPU.
    backend = args.backend or ("nccl" if device.type == "cuda" else "gloo")
    # 1 Join the process group. The call returns when all processes have called it.
    dist.init_process_group(
        backend=backend,
        init_method=args.init_method,
        rank=args.rank,
        world_size=args.world_size,
        timeout=timedelta(seconds=args.timeout),
        # With device_id, nccl opens its connections now, so that a network fault shows here.
        device_id=device if backend == "nccl" else None,
    )
    print(
        f"[init] rank {dist.get_rank()}/{dist.get_world_size()} | local rank {local_rank} | "
        f"{device} | {backend} | {socket.gethostname()}\n",
        end="",  # print would write its newline later, perhaps into another rank's line.
        flush=True,
    )
    return local_rank, device


def train(args, local_rank, device):
    """Loads the data, builds the model, and then trains, tests and saves it epoch by epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # In a collective call (barrier, broadcast, all_reduce) a rank waits for the others. All ranks
    # must make the same collective calls in the same order, or some wait until the time-out.

    # 3 Download once. Rank 0 loads first, and downloads. Then the first process of each other node
    # does, because a node may have a data folder of its own. The third turn is for all other ranks.
    my_turn = 0 if rank == 0 else 1 if local_rank == 0 else 2
    for turn in range(3):
        if turn == my_turn:
            train_set = load_split(args.dataset, args.data_root, train=True)
            test_set = load_split(args.dataset, args.data_root, train=False)
        dist.barrier()  # Here all ranks wait for one another, in each turn.
    # 4 Take your own shard. In each step the ranks average their gradients, so all need the same
    # number of steps. DistributedSampler repeats a few images to make the shards equally long.
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, seed=args.seed)
    # Test shards repeat no image and may differ by one: the test loop waits for no other rank.
    test_set = Subset(test_set, range(rank, len(test_set), world_size))
    # batches yields lists of indices. With batch_size=None the loader returns train_set[list] for
    # each list: one index operation on tensors, which is much faster than image by image.
    batches = BatchSampler(sampler, args.batch_size, drop_last=False)
    pin = device.type == "cuda"  # A GPU can copy from pinned memory while it computes.
    loader = DataLoader(train_set, sampler=batches, batch_size=None, pin_memory=pin)
    test_loader = DataLoader(test_set, batch_size=1000)  # For testing the usual way is fast enough.

    torch.manual_seed(args.seed)  # This makes the initial weights repeatable.
    # channels_last, the channels of a pixel side by side in memory, makes convolutions faster.
    model = build_model(args.dataset).to(device, memory_format=torch.channels_last)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # 5 Wrap the model. DDP copies the weights of rank 0 to all ranks. In each backward it averages
    # the gradients over all ranks, bucket by bucket. A bucket holds the gradients of several
    # parameters, and is sent while backward computes the next bucket. gradient_as_bucket_view makes
    # every .grad a view into its bucket, which saves memory.
    parallel_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # The wrapper has no weights of its own: it trains those of model. We test model, because the
    # wrapper's forward can wait for other ranks: it copies buffers, BatchNorm's statistics, from
    # rank 0. We save model, because the wrapper's state_dict has other names ("module.…").
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    start_epoch = load_checkpoint(args.checkpoint, model, optimizer) if args.checkpoint else 0
    if rank == 0 and start_epoch > 0:
        print(f"resumed {args.checkpoint} after epoch {start_epoch}/{args.epochs}", flush=True)

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)  # 4 Otherwise every epoch would have the same order.
        # A seed for each epoch and rank: a resumed run augments as one that was not interrupted.
        torch.manual_seed(args.seed + epoch * world_size + rank)
        started = time.perf_counter()
        loss, accuracy = train_one_epoch(parallel_model, loader, optimizer, epoch, args, device)
        seconds = time.perf_counter() - started
        correct, count = evaluate(model, test_loader, device)
        if rank > 0:
            continue  # 7 Only rank 0 prints and saves. The others have the same results.
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
    # 8 Leave: close the connections. With gloo, Python can crash at exit if anything still holds
    # the process group. The DDP model did until train() returned. torch.distributed.nn could: its
    # default arguments hold the group that exists at its import. So it is imported before mark 1.
    dist.destroy_process_group()


def train_one_epoch(model, loader, optimizer, epoch, args, device):
    """Trains for one epoch, counted from 0; returns (mean loss, accuracy in percent)."""
    peak_lr = args.lr * args.batch_size / 64  # --lr is meant for a batch of 64 images.
    peak_lr *= dist.get_world_size()  # 6 The batch of a step is now that of all ranks together.
    totals = torch.zeros(3, device=device)  # loss, correct images, images
    model.train()
    # disable=None shows the progress bar on terminals only.
    bar = tqdm(loader, leave=False, disable=None if dist.get_rank() == 0 else True)
    for step, (images, labels) in enumerate(bar):
        # In the first fifth of the training the learning rate rises from 0 to peak_lr, then it
        # falls back to 0. It follows from done alone: there is no scheduler state to save.
        done = (epoch + (step + 0.5) / len(loader)) / args.epochs  # fraction of the training
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * (done / 0.2 if done < 0.2 else (1 - done) / 0.8)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        if args.dataset == "cifar10":
            images = augment(images)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp):
            logits = model(images.float() / 127.5 - 1)
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
    """Returns (correct images, images) over all ranks; computes in float32, also with --amp."""
    # In training, the wrapper's forward copies the buffers of rank 0 to all ranks, and then each
    # rank updates its own. Copy them once more after the last update, so that all ranks test the
    # model that rank 0 saves.
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
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, temporary)
    temporary.replace(path)  # Atomic: a run that is killed leaves the old file or the new one.


def load_checkpoint(path, model, optimizer):
    """Restores what save_checkpoint wrote; returns the number of epochs finished."""
    # Make the folder for saving now: if that fails, no epoch is lost.
    path.parent.mkdir(parents=True, exist_ok=True)
    # Rank 0 decides whether to resume, so that all ranks train the same epochs. All ranks read the
    # file, so all nodes must share its folder.
    found = [path.exists()]
    dist.broadcast_object_list(found, src=0)  # puts rank 0's answer into every rank's list
    if not found[0]:
        return 0
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)  # runs no code in it
    except Exception as error:  # A damaged file makes torch raise almost anything.
        sys.exit(f"{path} cannot be read as a checkpoint ({type(error).__name__})")
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
        # Dividing by a constant keeps the logits small. Large learning rates need that: with --lr
        # 0.8 the accuracy after one epoch is 99% with the division, and 9% without.
        return self.classifier(x.flatten(1)) / 8


def build_model(dataset):
    """Returns an untrained model with 10 classes for the data set's images."""
    if dataset == "cifar10":
        # ResNet-18 was made for larger images. Its first layers shrink 32 x 32 pixels to 8 x 8, so
        # it is fast here. It reaches 75% in 5 epochs. zero_init_residual helps large batches.
        return models.resnet18(weights=None, num_classes=10, zero_init_residual=True)
    return ConvNet()


def load_split(dataset, data_root, train):
    """Returns the training or test split: images uint8 (N, C, H, W) and labels int64 (N,)."""
    if dataset == "synthetic":
        # Each class is a random template of 7 x 7 pixels, enlarged to 28 x 28, under strong noise.
        # Training and test have the same templates, and their own labels and noise.
        generator = torch.Generator().manual_seed(0)
        templates = F.interpolate(torch.rand(10, 1, 7, 7, generator=generator), scale_factor=4)
        generator.manual_seed(1 if train else 2)
        labels = torch.randint(10, (10_000 if train else 2_000,), generator=generator)
        images = torch.normal(255 * templates[labels], 350, generator=generator).clamp(0, 255)
        return TensorDataset(images.to(torch.uint8), labels)
    dataset_class = datasets.MNIST if dataset == "mnist" else datasets.CIFAR10
    try:
        split = dataset_class(data_root, train=train, download=True)
    except (OSError, RuntimeError) as error:
        sys.exit(f"{error}\ncannot load {dataset}: --dataset synthetic needs no download")
    images, labels = torch.as_tensor(split.data), torch.as_tensor(split.targets)
    images = images.unsqueeze(1) if dataset == "mnist" else images.permute(0, 3, 1, 2)
    return TensorDataset(images, labels)


def augment(images):
    """Shifts each image by up to 4 pixels and mirrors half: uint8 (N, C, H, W), same out."""
    n, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    corners = torch.randint(9, (n, 2)).tolist()  # where the window of each image begins: 0 to 8
    images = torch.stack(
        [padded[i, :, y : y + height, x : x + width] for i, (y, x) in enumerate(corners)]
    )
    mirrored = torch.rand(n, 1, 1, 1, device=images.device) < 0.5
    return torch.where(mirrored, images.flip(3), images)


if __name__ == "__main__":
    main()
