"""How much memory a rank needs with DDP, ZeRO-1 and FSDP2, and what that costs.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 scripts/lab/memory.py
    NPROC=1 RATE=100mbit bash scripts/lab/two_hosts.sh scripts/lab/memory.py --steps 3 --repeats 1

The versions are mnmc_ddp_env.py as it is, and with each patch of docs/beyond_ddp.md. They train
ResNet-18 on noise of CIFAR-10's shape. They take turns, so that a machine that slows down slows
them all. A turn is an epoch that warms up, and a second one that counts.

The table has, in MB, what the rank with the most keeps after a step, and what a formula says. Then
the median, lowest and highest milliseconds of a step, and how many MB a rank sends in a step. The
last number comes from the kernel: it counts all that this host sends, its other programs included.
"""

import argparse
import contextlib
import io
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where the scripts are

import by_hand
import results
import torch
import torch.distributed as dist
import torch.distributed.nn  # as in the scripts: before the process group, for a clean exit
import update_pages
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import mnmc_ddp_env

PAGE = update_pages.REPO / "docs" / "beyond_ddp.md"


def bytes_of(tensors):
    """Returns how many bytes of these tensors this rank holds."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(tensor.nbytes for tensor in local)


def kept(model, optimizer):
    """Returns this rank's bytes of weights, of gradients, and of optimizer state."""
    optimizer = getattr(optimizer, "optim", optimizer)  # the one inside ZeroRedundancyOptimizer
    rows = optimizer.state.values()
    state = [value for row in rows for value in row.values() if torch.is_tensor(value)]
    parameters = list(model.parameters())
    return bytes_of(parameters), bytes_of(p.grad for p in parameters), bytes_of(state)


def formula(name, weights, world_size):
    """Returns what a rank should keep; gradients and momentum are as large as the weights."""
    if name.startswith("ZeRO-1"):
        return 2 * weights + weights / world_size
    if name.startswith("FSDP2"):
        return 3 * weights / world_size
    return 3 * weights


def sent_by_host():
    """Returns the bytes that all network interfaces of this host have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def measure(module, args, local_rank, device):
    """Trains for two epochs; returns what a rank keeps, and ms and bytes sent of a step."""
    count = args.steps * args.batch_size * dist.get_world_size()
    # The channels of a pixel lie side by side, as in CIFAR-10's files.
    images = torch.randint(256, (count, 32, 32, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    module.load_split = lambda *_, **__: TensorDataset(images, torch.randint(10, (count,)))
    module.evaluate = lambda *_: (0, 1)
    train_one_epoch, turns = module.train_one_epoch, []

    def watched(model, loader, optimizer, *rest):
        sent, started = sent_by_host(), time.perf_counter()
        result = train_one_epoch(model, loader, optimizer, *rest)  # ends with an all_reduce
        seconds = time.perf_counter() - started
        sent = (sent_by_host() - sent) / int(os.environ["LOCAL_WORLD_SIZE"])
        turns.append((*kept(model, optimizer), 1000 * seconds / args.steps, sent / args.steps))
        return result

    module.train_one_epoch = watched
    with contextlib.redirect_stdout(io.StringIO()):  # without the lines of the epochs
        module.train(args, local_rank, device)
    module.train_one_epoch = train_one_epoch
    most = torch.tensor(turns[1], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)  # of all ranks
    return most.tolist()


def row_of(name, turns):
    """Returns a row of the table: MB that a rank keeps, ms of a step, and MB sent in a step."""
    parts = [turns[0][place] / 1e6 for place in range(3)]
    times, sent = [turn[3] for turn in turns], statistics.median(turn[4] for turn in turns)
    row = {"processes": dist.get_world_size(), "network": os.environ.get("CABLE", "one host")}
    row |= {"version": name.partition(":")[0]}
    row |= dict(
        zip(("weights", "gradients", "optimizer"), (round(n, 1) for n in parts), strict=True)
    )
    weights = bytes_of(mnmc_ddp_env.build_model("cifar10").parameters())
    row |= {"all": round(sum(parts), 1)}
    row |= {"formula": round(formula(name, weights, dist.get_world_size()) / 1e6, 1)}
    row |= {"ms": round(statistics.median(times)), "lowest": round(min(times))}
    return row | {"highest": round(max(times)), "sent": round(sent / 1e6, 1)}


def print_table(rows):
    print("weights gradients optimizer     all formula |  ms: median lowest highest |  MB sent")
    for row in rows:
        sizes = [row[name] for name in ("weights", "gradients", "optimizer", "all", "formula")]
        print("".join(f"{megabytes:8.1f}" for megabytes in sizes), end=" | ")
        times = [row[name] for name in ("ms", "lowest", "highest")]
        print("".join(f"{n:8d}" for n in times), f"| {row['sent']:8.1f} {row['version']}")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--batch-size", type=int, default=32, help="in each process; default: 32")
    add("--steps", type=int, default=5, help="of an epoch; default: 5")
    add("--repeats", type=int, default=3, help="turns of each version; default: 3")
    add("--json", type=Path, metavar="FILE", help="add the rows to this file")
    args = parser.parse_args()
    if min(args.batch_size, args.steps, args.repeats) < 1:
        parser.error("all numbers must be above 0")
    results.check(args.json)
    # What the scripts read, too.
    rest = {"dataset": "cifar10", "data_root": None, "epochs": 2, "lr": 0.01, "seed": 0}
    rest |= {"amp": False, "checkpoint": None, "sync_bn": False, "backend": None, "timeout": 600}
    return argparse.Namespace(**vars(args) | rest)


def main():
    args = parse_args()
    local_rank, device = mnmc_ddp_env.setup_distributed(args)
    versions = by_hand.load_versions(PAGE)
    turns = {name: [] for name in versions}
    for _ in range(args.repeats):
        for name, module in versions.items():
            turns[name].append(measure(module, args, local_rank, device))
    if dist.get_rank() == 0:
        rows = [row_of(name, values) for name, values in turns.items()]
        print_table(rows)
        if args.json:
            results.add_rows(args.json, rows, ("processes", "network", "version"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
