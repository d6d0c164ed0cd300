"""How long a training step takes with DDP, and with DDP written by hand.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 scripts/lab/by_hand.py
    NPROC=1 RATE=100mbit bash scripts/lab/two_hosts.sh scripts/lab/by_hand.py --steps 5

The versions are mnmc_ddp_env.py as it is, and with each patch of docs/by_hand.md. They train
ResNet-18 on noise of CIFAR-10's shape. They take turns, so that a machine that slows down slows
them all. A turn is an epoch that warms up, and a second one that counts.
"""

import argparse
import contextlib
import importlib.util
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where the scripts are
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

import torch
import torch.distributed as dist
import torch.distributed.nn  # as in the scripts: before the process group, for a clean exit
import update_pages
from torch.utils.data import TensorDataset

import mnmc_ddp_env

PAGE = update_pages.REPO / "docs" / "by_hand.md"


def load_versions(page):
    """Returns a page's patched scripts and mnmc_ddp_env as modules, by name."""
    versions = {}
    for block in update_pages.read_blocks(page.read_text()):
        if block.mark.startswith("patch "):
            with tempfile.TemporaryDirectory() as folder:
                path = update_pages.patched(block, folder)
                spec = importlib.util.spec_from_file_location(f"version_{len(versions)}", path)
                versions[block.heading] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(versions[block.heading])
    return versions | {"DDP": mnmc_ddp_env}


def measure(module, args, local_rank, device):
    """Trains for two epochs; returns the milliseconds of a step in the second."""
    count = args.steps * args.batch_size * dist.get_world_size()
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)
    module.load_split = lambda *_, **__: TensorDataset(images, torch.randint(10, (count,)))
    module.evaluate = lambda *_: (0, 1)
    train_one_epoch, seconds = module.train_one_epoch, []

    def timed(*words):
        started = time.perf_counter()
        result = train_one_epoch(*words)  # ends with an all_reduce, so with all ranks
        seconds.append(time.perf_counter() - started)
        return result

    module.train_one_epoch = timed
    with contextlib.redirect_stdout(io.StringIO()):  # without the lines of the epochs
        module.train(args, local_rank, device)
    module.train_one_epoch = train_one_epoch
    return 1000 * seconds[1] / args.steps


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--batch-size", type=int, default=32, help="in each process; default: 32")
    add("--steps", type=int, default=10, help="of an epoch; default: 10")
    add("--repeats", type=int, default=5, help="turns of each version; default: 5")
    args = parser.parse_args()
    # What the scripts read, too.
    rest = {"dataset": "cifar10", "data_root": None, "epochs": 2, "lr": 0.01, "seed": 0}
    rest |= {"amp": False, "checkpoint": None, "sync_bn": False, "backend": None, "timeout": 600}
    return argparse.Namespace(**vars(args) | rest)


def main():
    args = parse_args()
    local_rank, device = mnmc_ddp_env.setup_distributed(args)
    versions = load_versions(PAGE)
    turns = {name: [] for name in versions}
    for _ in range(args.repeats):
        for name, module in versions.items():
            turns[name].append(measure(module, args, local_rank, device))
    if dist.get_rank() == 0:
        print("ms a step: median, lowest, highest")
        for name, values in turns.items():
            row = statistics.median(values), min(values), max(values)
            print("".join(f"{value:8.1f}" for value in row), name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
