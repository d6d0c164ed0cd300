"""Multiple nodes, multiple GPUs: DistributedDataParallel (DDP); the script starts its processes.

Each GPU has its own process with a copy of the model and a shard of the data. All copies start from
equal weights, and each step applies the same averaged gradient to them, so they stay equal. The
rank of a process is its number, from 0. The world size is how many processes there are.

Eight things turn a training script into this one. Comments such as "# 6" mark them:

    1 take your own GPU
    2 join the process group
    3 one process downloads
    4 take your own shard, and set_epoch
    5 wrap the model
    6 a learning rate for the larger batch
    7 add up the metrics, print and save on one rank
    8 leave

Four more places are easily forgotten. Comments such as "# a" mark them:

    a each test image counts once
    b rank 0 decides whether to resume
    c each rank draws random numbers of its own
    d all ranks test with the BatchNorm statistics of rank 0, because they do not stay equal

The rule: in a collective call, such as barrier() or all_reduce(), the ranks wait for one another.
So all ranks make the same collective calls in the same order. DDP makes such calls, too, in its
constructor, forward and backward (mark 5). If a rank leaves one out, the others wait until
--timeout, and fail.

What changes from mnmc_ddp_env.py: there is no launcher. The script is started once on each node and
spawns a worker for each GPU. A worker computes its rank from the number of its node, so all nodes
must start the same number of workers.

    # Two processes on one machine. If they must share one GPU, add --backend gloo.
    python mnmc_ddp_mp.py --dataset synthetic --nproc-per-node 2
    # Two machines with as many GPUs each, a line on each; 192.0.2.1 is the address of the first:
    python mnmc_ddp_mp.py --nodes 2 --node-rank 0 --init-method tcp://192.0.2.1:18888
    python mnmc_ddp_mp.py --nodes 2 --node-rank 1 --init-method tcp://192.0.2.1:18888
"""

import argparse
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
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
    add("--backend", choices=("gloo", "nccl", "xccl"), help="default: nccl on GPUs, gloo on CPUs")
    add("--timeout", type=float, default=600, help="seconds to wait for a rank; default: 600")
    add("--sync-bn", action="store_true", help="BatchNorm over all ranks; needs GPUs")
    add("--nodes", type=int, default=1, help="number of nodes; default: 1")
    add("--node-rank", type=int, default=0, help="which of them this is; default: 0")
    workers = torch.accelerator.device_count() or 2
    add("--nproc-per-node", type=int, default=workers, help="default: the number of GPUs, or 2")
    add("--init-method", default="tcp://127.0.0.1:18888", help="default: tcp://127.0.0.1:18888")
    return parser.parse_args()


def setup_distributed(args, local_rank):
    """Joins the process group; returns the device."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # Otherwise the processes of a node fight for its cores.
    # 1 Take your own GPU. If a node has more processes than GPUs, several processes share one. With
    # nccl this is an error, with gloo it works.
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # None without a GPU
    if accelerator and accelerator.type != "mps":  # DDP cannot use a Mac's GPU.
        device = torch.device(accelerator.type, local_rank % torch.accelerator.device_count())
        # .cuda() and libraries that name no GPU use the current one, which is GPU 0 without this
        # line. This script names its GPU everywhere, but what you add may not.
        torch.accelerator.set_device_index(device.index)
    else:
        device = torch.device("cpu")
    # The backend is the library that sends tensors from process to process: nccl for NVIDIA's and
    # AMD's GPUs, xccl for Intel's, gloo for CPUs. gloo sends a GPU's tensors through the CPU.
    backend = args.backend or dist.get_default_backend_for_device(device)
    # 2 Join the process group: all processes of this training. They meet at one address, and the
    # call returns when all are there.
    dist.init_process_group(
        backend=backend,
        init_method=args.init_method,
        rank=args.node_rank * args.nproc_per_node + local_rank,
        world_size=args.nodes * args.nproc_per_node,
        timeout=timedelta(seconds=args.timeout),
        # Joining exchanges the addresses. nccl connects the GPUs in the first collective call, or,
        # given a device_id, here: then a fault of the network shows here. gloo takes no device_id.
        device_id=None if backend == "gloo" else device,
    )
    # One write for the whole line: print() can write its newline separately, and lines would mix.
    sys.stdout.write(
        f"[init] rank {dist.get_rank()}/{dist.get_world_size()} | local rank {local_rank} | "
        f"{device} | {backend} | {socket.gethostname()}\n"
    )
    sys.stdout.flush()
    return device


def train(args, local_rank, device):
    """Loads the data, builds the model, and then trains, tests and saves it epoch by epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # 3 One process downloads, because two that download into one folder can spoil its files. First
    # rank 0 alone, in case all nodes share one folder.
    if rank == 0:
        load_split(args.dataset, args.data_root, train=True)  # This downloads both splits.
    dist.barrier()  # waits for rank 0's download, up to --timeout
    # Then one process of each other node, in case each node has a folder of its own. In a shared
    # folder it finds rank 0's files, and downloads nothing.
    if local_rank == 0 and rank != 0:
        load_split(args.dataset, args.data_root, train=True)
    dist.barrier()  # waits for these downloads. From here on all ranks only read.
    train_set = load_split(args.dataset, args.data_root, train=True)
    test_set = load_split(args.dataset, args.data_root, train=False)
    options = {
        "num_workers": args.workers,  # processes that read batches ahead
        "persistent_workers": args.workers > 0,  # They stay from epoch to epoch.
        # Starting workers draws their seed. A resumed run starts them in another epoch, and must
        # not draw other numbers in augment() because of that. So this has its own generator.
        # Each rank gives it another seed. Random transforms of your own would run in the workers.
        "generator": torch.Generator().manual_seed(args.seed + rank),
        "pin_memory": device.type in ("cuda", "xpu"),  # makes the copies to the GPU faster
    }
    # 4 Take your own shard. The sampler shuffles all images into one common order, which follows
    # from args.seed and the epoch. Each rank takes a different part of it. Rank and world size come
    # from the process group. A few images are repeated, so that all ranks have equally many
    # batches, because each backward waits for all ranks.
    train_sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **options)
    # a Each test image counts once. DistributedSampler would repeat some. Rank r tests images r,
    # r + world_size, and so on. Some ranks may get a batch more. That is safe, because evaluate()
    # makes no collective call between its batches.
    test_loader = DataLoader(
        test_set, 1000, sampler=range(rank, len(test_set), world_size), **options
    )

    torch.manual_seed(args.seed)  # The initial weights follow from this seed.
    model = build_model(args.dataset).to(device, memory_format=torch.channels_last)
    if args.sync_bn:  # In train mode, and only there, it normalizes with the images of all ranks.
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # 5 Wrap the model, which is on its device already. The constructor copies the weights of rank 0
    # to all ranks. ddp_model and model share their weights. We train ddp_model. We test model,
    # because ddp_model makes a collective call in each forward, and ranks can have unequal numbers
    # of test batches. We save model, because the names in ddp_model's state begin with "module.".
    ddp_model = DistributedDataParallel(model)
    peak_lr = args.lr * args.batch_size / 64  # --lr is meant for a batch of 64 images.
    # 6 A learning rate for the larger batch. --batch-size is for each process, so a step has
    # world_size times the images. An epoch has fewer steps then, and each should go further. If you
    # divide --batch-size by world_size, peak_lr and the steps are those of one process.
    peak_lr *= world_size
    optimizer = torch.optim.SGD(
        model.parameters(), lr=peak_lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    start_epoch = 0
    if args.checkpoint:
        args.checkpoint = args.checkpoint.expanduser()  # The shell does not, in --checkpoint=~/x.
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)  # Fail here, not after an epoch.
        # b Rank 0 decides whether to resume, because it saves the file. All ranks read it, so nodes
        # need a shared folder. If each rank decided for itself, a rank that cannot see the file
        # would begin with epoch 0 while the others resume. Now it fails in load_checkpoint().
        exists = torch.tensor(args.checkpoint.exists(), device=device)  # nccl sends GPU tensors.
        dist.broadcast(exists, src=0)  # Rank 0's answer replaces those of the others.
        if exists:
            start_epoch = load_checkpoint(args.checkpoint, model, optimizer)
    if rank == 0 and start_epoch > 0:
        print(f"resumed {args.checkpoint} after epoch {start_epoch}/{args.epochs}", flush=True)

    for epoch in range(start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)  # 4 Otherwise every epoch would have the same order.
        # c Each rank draws random numbers of its own. With one seed for all, augment() would make
        # the same choices for the batches of all ranks. The factor world_size keeps the seeds of
        # one epoch apart from those of the next.
        torch.manual_seed(args.seed + epoch * world_size + rank)
        started = time.perf_counter()
        loss, accuracy = train_one_epoch(
            ddp_model, train_loader, optimizer, peak_lr, epoch, args, device
        )
        seconds = time.perf_counter() - started
        # d All ranks test with rank 0's BatchNorm statistics, which rank 0 saves. They are buffers
        # of the model, and each rank updates them with its own images. Each forward of ddp_model
        # first copies rank 0's buffers to all ranks, but none follows the last step. So copy here.
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        correct, count = evaluate(model, test_loader, device)
        if rank == 0:  # 7 One rank prints and saves, others go on: no collective calls in here.
            if args.checkpoint:
                save_checkpoint(args.checkpoint, model, optimizer, epoch + 1)
            print(
                f"epoch {epoch + 1}/{args.epochs} | train loss {loss:.4f} acc {accuracy:.2f}% | "
                f"test acc {100 * correct / count:.2f}% ({correct}/{count}) | "
                f"{len(train_set) / seconds:.0f} img/s | {seconds:.1f} s",
                flush=True,
            )


def train_one_epoch(ddp_model, train_loader, optimizer, peak_lr, epoch, args, device):
    """Trains for one epoch; returns (mean loss, accuracy in percent) of all ranks."""
    totals = torch.zeros(3, device=device)  # loss, correct images, images
    ddp_model.train()
    bar = tqdm(train_loader, leave=False, disable=dist.get_rank() > 0)
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
            logits = ddp_model(normalize(images))
            loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()  # 5 Here DDP averages the gradients of all ranks.
        optimizer.step()
        totals[0] += loss.detach() * len(labels)
        totals[1] += (logits.argmax(1) == labels).sum()
        totals[2] += len(labels)
        if step % 50 == 0:  # The bar shows the loss of rank 0's batch. item() waits for the GPU.
            bar.set_postfix(loss=loss.item(), refresh=False)
    dist.all_reduce(totals)  # 7 Add up the metrics: totals becomes the sum over all ranks.
    loss_sum, correct, count = totals.tolist()
    return loss_sum / count, 100 * correct / count


@torch.inference_mode()
def evaluate(model, test_loader, device):
    """Tests the model; returns (correct images, images) of all ranks."""
    totals = torch.zeros(2, dtype=torch.int64, device=device)  # correct images, images
    model.eval()
    for images, labels in test_loader:
        # Without autocast, so that one can compare the accuracies of runs with and without --amp.
        logits = model(normalize(images.to(device)))
        totals[0] += (logits.argmax(1) == labels.to(device)).sum()
        totals[1] += len(labels)
    dist.all_reduce(totals)  # 7 Add up the counts.
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


def worker(local_rank, args):
    """Runs in every spawned process: what main() does in the other scripts."""
    device = setup_distributed(args, local_rank)
    train(args, local_rank, device)
    # 8 Leave: close this rank's connections to the others. Otherwise gloo can crash Python at exit.
    dist.destroy_process_group()


def main():
    args = parse_args()
    if not 0 <= args.node_rank < args.nodes:
        sys.exit("--node-rank must be below --nodes")
    # An interrupt of this process alone, as by an IDE's button, ends it at once, and its workers
    # with it. Otherwise Python would wait here until the workers have trained to the end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Starts the processes, which call worker(local_rank, args), and ends all when one fails.
    mp.spawn(worker, args=(args,), nprocs=args.nproc_per_node)


if __name__ == "__main__":
    main()
