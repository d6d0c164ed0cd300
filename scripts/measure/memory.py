"""How much memory a rank needs with DDP, ZeRO-1 and FSDP2, and what that costs.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 scripts/measure/memory.py
    NPROC=1 RATE=100mbit bash scripts/cluster/two_hosts.sh scripts/measure/memory.py --steps 3

The versions are mnmc_ddp_env.py as it is, and with each patch of docs/beyond_ddp.md. They train
ResNet-18 on noise of CIFAR-10's shape. They take turns, so that a machine that slows down slows
them all. A turn is an epoch that warms up, and a second one that counts.

The table has, in MB, what the rank with the most keeps after a step, and what a formula says. Then
the median, lowest and highest milliseconds of a step, and how many MB a rank sends in a step. The
last number comes from the kernel: it counts all that this host sends, its other programs included.
"""

import argparse
import os
import statistics
from pathlib import Path

import common
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

VERSIONS = {"ZeRO-1": "zero1", "FSDP2": "fsdp2"}  # and DDP, which needs no patch
PARTS = ("weights", "gradients", "optimizer")
COLUMNS = (*PARTS, "all", "formula", "ms", "lowest", "highest", "sent", "version")  # printed


def count_bytes(tensors):
    """Returns how many bytes of these tensors this rank holds."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(tensor.nbytes for tensor in local)


def count_kept_bytes(model, optimizer):
    """Returns this rank's bytes of weights, of gradients, and of optimizer state."""
    optimizer = getattr(optimizer, "optim", optimizer)  # the one inside ZeroRedundancyOptimizer
    rows = optimizer.state.values()
    state = [value for row in rows for value in row.values() if torch.is_tensor(value)]
    parameters = list(model.parameters())
    return count_bytes(parameters), count_bytes(p.grad for p in parameters), count_bytes(state)


def predict_bytes(version, weights, world_size):
    """Returns what a rank should keep; gradients and momentum are as large as the weights."""
    predicted = {"ZeRO-1": 2 * weights + weights / world_size, "FSDP2": 3 * weights / world_size}
    return predicted.get(version, 3 * weights)


def find_most(turn, device):
    """Returns (ms, bytes sent, bytes kept of each kind) of the rank that has the most of it."""
    milliseconds, sent, kept = turn
    most = torch.tensor([milliseconds, sent, *kept], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


def make_row(version, turns, weights):
    """Returns a row of the table: MB that a rank keeps, ms of a step, and MB sent in a step."""
    times, sent, *kept = zip(*turns, strict=True)
    parts = {name: round(values[0] / 1e6, 1) for name, values in zip(PARTS, kept, strict=True)}
    whole = sum(values[0] for values in kept)
    row = {"processes": dist.get_world_size(), "network": os.environ.get("CABLE", "one host")}
    row |= {"version": version} | parts | {"all": round(whole / 1e6, 1)}
    row["formula"] = round(predict_bytes(version, weights, dist.get_world_size()) / 1e6, 1)
    row |= {"ms": round(statistics.median(times))}
    row |= {"lowest": round(min(times)), "highest": round(max(times))}
    return row | {"sent": round(statistics.median(sent) / 1e6, 1)}


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
    common.check_file(args.json)
    return args


def measure_versions(versions, args):
    """Returns the turns of each version: the ms, bytes sent and bytes kept of each turn."""
    argv = ["--dataset", "cifar10", "--epochs", 2, "--batch-size", args.batch_size]
    options = common.read_options(versions["DDP"], *argv)
    local_rank, device = versions["DDP"].setup_distributed(options)
    turns = {name: [] for name in versions}
    for _ in range(args.repeats):
        for name, module in versions.items():
            turn = common.take_turn(
                module, options, local_rank, device, args.steps, count_kept_bytes
            )
            turns[name].append(find_most(turn, device))
    return turns


def main():
    args = parse_args()
    versions = common.load_versions(VERSIONS)
    turns = measure_versions(versions, args)
    if dist.get_rank() == 0:
        weights = count_bytes(versions["DDP"].build_model("cifar10").parameters())
        rows = [make_row(name, values, weights) for name, values in turns.items()]
        print("MB of a rank, ms of a step (median, lowest, highest), MB sent in a step")
        common.print_table([{name: row[name] for name in COLUMNS} for row in rows])
        if args.json:
            common.add_rows(args.json, rows, ("processes", "network", "version"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
