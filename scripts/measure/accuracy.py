"""Does the accuracy hold with more processes, larger batches, and compressed gradients?

    python scripts/measure/accuracy.py                 # MNIST, one epoch: minutes on two cores
    python scripts/measure/accuracy.py --dataset cifar10 --epochs 5 --processes 2 --ways PowerSGD

Starts mnmc_ddp_env.py by torchrun, as a user would, once for each combination of way, number of
processes and seed. It reads the test accuracy from the last line that the run prints. The ways:

    DDP          mnmc_ddp_env.py as it is
    bf16 hook    with docs/patches/bf16_hook.diff
    PowerSGD     with docs/patches/powersgd.diff

With --global-batch-size, the processes share this many images in a step. Otherwise each process
takes --batch-size images. Prints the test accuracy in per cent, one column for each seed. With
GPUs, there can be at most as many processes.
"""

import argparse
import itertools
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import patches  # of scripts/docs, which common puts on the path

REPO = patches.REPO
WAYS = {"DDP": None, "bf16 hook": "bf16_hook", "PowerSGD": "powersgd"}  # and their patches
IMAGES = {"mnist": 60000, "cifar10": 50000, "synthetic": 10000}  # of the training set
KEYS = ("dataset", "epochs", "way", "processes", "batch_size", "seed")  # What tells runs apart.
EPOCH = re.compile(r"^epoch (\d+)/\1 .*\| test acc ([\d.]+)%", re.MULTILINE)  # the last one


def write_script(way, folder):
    """Returns the path of mnmc_ddp_env.py, or of a copy in folder with the patch of the way."""
    if WAYS[way] is None:
        return REPO / "mnmc_ddp_env.py"
    return patches.write_patched([WAYS[way]], folder)


def count_cores():
    """Returns how many cores this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def train(script, processes, batch_size, seed, args):
    """Returns the test accuracy in per cent; exits if the training fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", processes, script]
    command += ["--dataset", args.dataset, "--data-root", args.data_root, "--seed", seed]
    command += ["--epochs", args.epochs, "--batch-size", batch_size]
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, count_cores() // processes))}
    argv = [str(word) for word in command]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            output, _ = process.communicate()
        finally:
            process.terminate()  # torchrun then ends its workers, also after Ctrl-C.
    if process.returncode:
        sys.exit(f"the training failed: {shlex.join(argv)}")
    return float(EPOCH.search(output)[2])


def compare_seeds(way, processes, args):
    """Trains once for each seed; prints each accuracy, and writes it, as soon as it is there."""
    batch_size = args.batch_size
    if args.global_batch_size:
        batch_size = args.global_batch_size // processes
    row = {"dataset": args.dataset, "epochs": args.epochs, "way": way, "processes": processes}
    row |= {"batch_size": batch_size, "global_batch_size": processes * batch_size}
    row["steps"] = args.epochs * math.ceil(IMAGES[args.dataset] / processes / batch_size)
    sizes = f"{batch_size:19d}{row['global_batch_size']:8d}{row['steps']:7d}"
    print(f"{way:11}{processes:9d}{sizes}", end="", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        script = write_script(way, folder)
        for seed in args.seeds:
            accuracy = train(script, processes, batch_size, seed, args)
            print(f"{accuracy:8.2f}", end="", flush=True)
            if args.json:
                common.add_rows(args.json, [row | {"seed": seed, "accuracy": accuracy}], KEYS)
    print()


def parse_args():
    """Returns the command line's options; exits with one line when a value cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dataset", choices=IMAGES, default="mnist", help="default: mnist")
    add("--data-root", type=Path, default=REPO / "data", help="default: the repository's data")
    add("--epochs", type=int, default=1, help="default: 1")
    add("--processes", nargs="+", type=int, default=[1, 2, 4, 8], help="default: 1 2 4 8")
    add("--batch-size", type=int, default=64, help="in each process; default: 64")
    add("--global-batch-size", type=int, help="of all processes; default: not fixed")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    add("--ways", nargs="+", choices=WAYS, default=["DDP"], help="default: DDP")
    add("--json", type=Path, metavar="FILE", help="add the rows to this file")
    args = parser.parse_args()
    if min(*args.processes, args.epochs, args.batch_size, args.global_batch_size or 1) < 1:
        parser.error("processes, epochs and batch sizes must be above 0")
    if args.global_batch_size and any(args.global_batch_size % n for n in args.processes):
        parser.error("--global-batch-size must be a multiple of each number of processes")
    common.check_file(args.json)
    return args


def main():
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that train() ends its torchrun.
    seeds = "".join(f"  seed {seed}" for seed in args.seeds)
    print(f"{args.dataset}, {args.epochs} epochs: test accuracy in %")
    print(f"way        processes  batch size of each, of all  steps{seeds}")
    for way, processes in itertools.product(args.ways, args.processes):
        compare_seeds(way, processes, args)


if __name__ == "__main__":
    main()
