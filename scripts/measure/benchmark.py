"""How fast the scripts train, against the bare arithmetic and against the usual pipeline.

Without options, the ConvNet on MNIST's images, 64 and 256 at a time, in 1 and 2 processes:

    bash scripts/measure/scaling.sh   # with the launchers' environment, and more processes
    python scripts/measure/benchmark.py --dataset cifar10 --batch-size 256 --json cifar10.json

What is measured, in W processes at a time:

    bare      forward, backward and step on one resident batch: no data, no metrics
    ours      snsc.py's train_one_epoch; for W > 1, in W processes that do not communicate
    ours_ddp  mnmc_ddp_env.py's train_one_epoch, its model wrapped as the script wraps it
    textbook  a PIL image at a time, ToTensor, Normalize, default collate, .item() at every step,
              default memory format, default DistributedDataParallel (for W = 1 none)
    input     ours without the training: only the batches

They take turns, --repeats times, so that a machine that slows down slows them all. The table has
the medians in images/s of all processes together, and rank 0's peak memory in MiB: on its GPU what
torch's tensors took, on a CPU all that the process took.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

# Before torch: one thread a process, so that W processes have W times the cores of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where the scripts are

import common
import torch
import torch.distributed as dist
import torch.distributed.nn  # as in the scripts: before the process group, for a clean exit
import torch.nn.functional as F
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset
from torchvision import transforms
from tqdm import tqdm

import mnmc_ddp_env
import snsc

REPO = Path(snsc.__file__).parent


def load_images(dataset, data_root, count):
    """Returns count training images and labels as a data set; noise where there are none."""
    file, shape = {
        "mnist": ("MNIST/raw/train-images-idx3-ubyte", (1, 28, 28)),
        "cifar10": ("cifar-10-batches-py/data_batch_1", (3, 32, 32)),
    }[dataset]
    if (data_root / file).exists():  # A failed download can leave an empty folder.
        train_set = snsc.load_split(dataset, data_root, train=True)
        return TensorDataset(*train_set[:count])
    noise = torch.randint(256, (count, *shape), dtype=torch.uint8)
    return TensorDataset(noise, torch.randint(10, (count,)))


class PilImages(Dataset):
    """The images as the usual pipeline reads them, one at a time: (float (C, H, W), label)."""

    def __init__(self, images, labels):
        augmentation = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        self.transform = transforms.Compose(
            (augmentation if images.shape[1] == 3 else [])
            + [transforms.ToTensor(), transforms.Normalize(0.5, 0.5)]
        )
        self.images = images.permute(0, 2, 3, 1).squeeze(3).numpy()
        self.labels = labels.tolist()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def prepare(variant, data, args, device):
    """Returns what a variant trains with: its model, optimizer and loader."""
    memory_format = torch.contiguous_format if variant == "textbook" else torch.channels_last
    model = snsc.build_model(args.dataset).to(device, memory_format=memory_format)
    if variant == "ours_ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif variant == "textbook" and dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    if variant == "textbook":
        loader = DataLoader(PilImages(*data.tensors), args.batch_size, shuffle=True)
    else:
        batches = BatchSampler(RandomSampler(data), args.batch_size, drop_last=False)
        pin = device.type == "cuda"
        loader = DataLoader(data, sampler=batches, batch_size=None, pin_memory=pin)
    return SimpleNamespace(
        model=model, optimizer=optimizer, loader=loader, args=args, device=device
    )


def step(setup, images, labels):
    """The arithmetic of a step; returns (loss, logits)."""
    with torch.autocast(setup.device.type, dtype=torch.bfloat16, enabled=setup.args.amp):
        logits = setup.model(images)
        loss = F.cross_entropy(logits, labels)
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss, logits


def bare(setup):
    images, labels = (tensor.to(setup.device) for tensor in next(iter(setup.loader)))
    images = (images.float() / 127.5 - 1).to(memory_format=torch.channels_last)
    for _ in range(len(setup.loader)):
        step(setup, images, labels)


def ours(setup):
    snsc.train_one_epoch(**vars(setup), epoch=0)


def ours_ddp(setup):
    mnmc_ddp_env.train_one_epoch(**vars(setup), epoch=0)


def textbook(setup):
    loss_sum = correct = 0
    for images, labels in setup.loader:
        images, labels = images.to(setup.device), labels.to(setup.device)
        loss, logits = step(setup, images, labels)
        loss_sum += loss.item()
        correct += (logits.argmax(1) == labels).sum().item()


def read_input(setup):
    for images, labels in setup.loader:
        images.to(setup.device, non_blocking=True)
        labels.to(setup.device, non_blocking=True)


VARIANTS = {
    "bare": bare,
    "ours": ours,
    "ours_ddp": ours_ddp,
    "textbook": textbook,
    "input": read_input,
}


def worker(rank, args, folder):
    """One process of a world: joins it, measures, and leaves."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    join(rank, args.world_size, f"file://{folder}/meeting-point", device)
    measure(rank, args, folder, device)
    dist.destroy_process_group()  # measure() has returned, and the DDP model with it


def join(rank, world_size, address, device):
    """Joins the process group as the scripts do."""
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        backend="nccl" if on_gpu else "gloo",
        init_method=address,
        rank=rank,
        world_size=world_size,
        device_id=device if on_gpu else None,
    )


def measure_peak(device):
    """Returns the most memory in MiB that this process has had: on its GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(rank, args, folder, device):
    """Runs every variant in turn, and again and again; rank 0 writes the seconds into folder."""
    data = load_images(args.dataset, args.data_root, args.images)
    setups = {variant: prepare(variant, data, args, device) for variant in args.variants}
    seconds = {variant: [] for variant in args.variants}
    label = f"{args.dataset}, batch {args.batch_size}, {args.world_size} processes"
    for repeat in tqdm(range(args.repeats + 1), label, leave=False, disable=rank > 0 or None):
        for variant, setup in setups.items():
            dist.barrier()
            started = time.perf_counter()
            VARIANTS[variant](setup)
            if device.type == "cuda":
                torch.cuda.synchronize()
            took = torch.tensor(time.perf_counter() - started, device=device)
            dist.all_reduce(took)
            if repeat > 0:  # the first one warms up
                seconds[variant].append(took.item() / args.world_size)
    if rank == 0:
        result = {"seconds": seconds, "MiB": measure_peak(device)}
        (folder / "result.json").write_text(json.dumps(result))


def run_world(args):
    """Measures args' combination; returns its row of the table, names to figures."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (args, Path(folder)), nprocs=args.world_size)
        result = json.loads((Path(folder) / "result.json").read_text())
    images = args.world_size * args.images
    medians = {name: statistics.median(seconds) for name, seconds in result["seconds"].items()}
    row = {"dataset": args.dataset, "batch": args.batch_size, "W": args.world_size}
    row |= {name: round(images / seconds) for name, seconds in medians.items()}
    speed = SimpleNamespace(**dict.fromkeys(VARIANTS, float("nan")) | row)
    ratios = {
        "ours/bare": speed.ours / speed.bare,
        "ddp/ours": speed.ours_ddp / speed.ours,
        "ours/textbook": (speed.ours if args.world_size == 1 else speed.ours_ddp) / speed.textbook,
        "input/ours": speed.ours / speed.input,
    }
    # Those of variants that were not measured are NaN, the only number that is not itself.
    row |= {name: round(ratio, 3) for name, ratio in ratios.items() if ratio == ratio}
    if "ours_ddp" in medians:
        row["ms/step"] = round(1000 * medians["ours_ddp"] * args.batch_size / args.images, 1)
    row["MiB"] = round(result["MiB"])
    # Of each turn, for the chart. The table has their medians.
    turns = {name: [round(images / s) for s in took] for name, took in result["seconds"].items()}
    return row | {"turns": turns}


def parse_args():
    """Returns the command line's options; exits with one line when a value cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dataset", nargs="+", choices=("mnist", "cifar10"), default=["mnist"])
    add("--data-root", type=Path, default=REPO / "data", help="default: the repository's data")
    add("--batch-size", nargs="+", type=int, default=[64, 256], help="default: 64 256")
    add("--world-size", nargs="+", type=int, help="default: 1 and 2, with one GPU 1")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    add("--images", type=int, default=5120, help="of a turn, in each process; default: 5120")
    add("--repeats", type=int, default=7, help="turns of each variant; default: 7")
    add("--amp", action="store_true", help="mixed precision (bfloat16)")
    add("--json", type=Path, metavar="FILE", help="add the rows to this file")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    args.world_size = args.world_size or ([1] if gpus == 1 else [1, 2])
    if min(*args.batch_size, *args.world_size, args.images, args.repeats) < 1:
        parser.error("sizes, images and repeats must be above 0")
    if gpus and max(args.world_size) > gpus:
        parser.error(f"--world-size: {gpus} GPUs here")
    return args


def main():
    args = parse_args()
    rows = []
    for dataset, batch_size, world_size in itertools.product(
        args.dataset, args.batch_size, args.world_size
    ):
        setting = {"dataset": dataset, "batch_size": batch_size, "world_size": world_size}
        # What train_one_epoch reads, too; the rate stays near its peak.
        setting |= {"lr": 0.01, "epochs": 5}
        rows.append(run_world(argparse.Namespace(**vars(args) | setting)))
    if args.json:
        common.add_rows(args.json, rows, ("dataset", "batch", "W"))
    common.print_table(rows)


if __name__ == "__main__":
    main()
