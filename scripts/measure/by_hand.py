"""How long a training step takes with DDP, and with DDP written by hand.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 scripts/measure/by_hand.py
    NPROC=1 RATE=100mbit bash scripts/cluster/two_hosts.sh scripts/measure/by_hand.py --steps 5

The versions are mnmc_ddp_env.py as it is, and with each patch of docs/by_hand.md. They train
ResNet-18 on noise of CIFAR-10's shape. They take turns, so that a machine that slows down slows
them all. A turn is an epoch that warms up, and a second one that counts.
"""

import argparse

import common
import torch.distributed as dist

VERSIONS = {
    "version 1": "by_hand_1_after_backward",
    "version 2": "by_hand_2_during_backward",
    "version 3": "by_hand_3_buckets",
}  # and DDP, which needs no patch


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--batch-size", type=int, default=32, help="in each process; default: 32")
    add("--steps", type=int, default=10, help="of an epoch; default: 10")
    add("--repeats", type=int, default=5, help="turns of each version; default: 5")
    return parser.parse_args()


def main():
    args = parse_args()
    versions = common.load_versions(VERSIONS)
    argv = ["--dataset", "cifar10", "--epochs", 2, "--batch-size", args.batch_size]
    options = common.read_options(versions["DDP"], *argv)
    local_rank, device = versions["DDP"].setup_distributed(options)
    turns = {name: [] for name in versions}
    for _ in range(args.repeats):
        for name, module in versions.items():
            turn = common.take_turn(module, options, local_rank, device, args.steps)
            turns[name].append(turn[0])
    if dist.get_rank() == 0:
        print("ms a step")
        common.print_table(
            [common.summarize(values) | {"version": name} for name, values in turns.items()]
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
