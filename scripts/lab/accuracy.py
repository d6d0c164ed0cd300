"""Does the accuracy hold with more processes, larger batches, and compressed gradients?

    python scripts/lab/accuracy.py                 # MNIST, one epoch: minutes on two cores
    python scripts/lab/accuracy.py --dataset cifar10 --epochs 5 --processes 2 --ways DDP PowerSGD

Starts mnmc_ddp_env.py by torchrun, as a user would, once for each combination of way, number of
processes and seed. It reads the test accuracy from the last line that the run prints. The ways:

    DDP          mnmc_ddp_env.py as it is
    bf16 hook    with the patch of docs/cookbook.md, "Gradients in bfloat16"
    PowerSGD     with the patch of docs/cookbook.md, "PowerSGD"

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

import results
from update_pages import REPO, patched, read_blocks

WAYS = {"DDP": None, "bf16 hook": "Gradients in bfloat16", "PowerSGD": "PowerSGD"}
IMAGES = {"mnist": 60000, "cifar10": 50000, "synthetic": 10000}  # of the training set
KEYS = ("dataset", "epochs", "way", "processes", "batch_size", "seed")  # What tells runs apart.
EPOCH = re.compile(r"^epoch (\d+)/\1 .*\| test acc ([\d.]+)%", re.MULTILINE)  # the last one


def script_of(way, folder):
    """Returns the path of mnmc_ddp_env.py, or of a copy in folder with the patch of the way."""
    if WAYS[way] is None:
        return REPO / "mnmc_ddp_env.py"
    blocks = read_blocks((REPO / "docs" / "cookbook.md").read_text())
    (block,) = (b for b in blocks if b.heading == WAYS[way] and b.language == "diff")
    (Path(folder) / way).mkdir(exist_ok=True)
    return patched(block, Path(folder) / way)


def train(script, processes, batch_size, seed, args):
    """Returns the test accuracy in per cent; exits if the training fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", processes, script]
    command += ["--dataset", args.dataset, "--data-root", args.data_root, "--seed", seed]
    command += ["--epochs", args.epochs, "--batch-size", batch_size]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // processes))}
    words = [str(word) for word in command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as run:
        try:
            printed, _ = run.communicate()
        finally:
            run.terminate()  # torchrun then ends its workers, also after Ctrl-C.
    if run.returncode:
        sys.exit(f"the training failed: {shlex.join(words)}")
    return float(EPOCH.search(printed)[2])


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
        script = script_of(way, folder)
        for seed in args.seeds:
            accuracy = train(script, processes, batch_size, seed, args)
            print(f"{accuracy:8.2f}", end="", flush=True)
            if args.json:
                results.add_rows(args.json, [row | {"seed": seed, "accuracy": accuracy}], KEYS)
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
    results.check(args.json)
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
