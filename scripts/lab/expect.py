"""What can I expect of several GPUs on this network, and what would help?

    python scripts/lab/expect.py --gpus 16 --gigabits 10 --ms 87 --megabytes 102

--ms is how long one GPU computes a batch: 1000 x batch size / images/s, with the images/s of
snsc.py. --megabytes is the size of the gradients: 4 bytes for each parameter. --gigabits is the
bandwidth of the slowest connection between two GPUs, in Gb/s.

Prints the milliseconds of a batch and the efficiency: the time to compute a batch without
communication, divided by the time of a batch. The estimate is that of docs/performance.md, which
says what it leaves out. Real networks are slower.
"""

import argparse
import math


def step_seconds(gpus, compute, megabytes, gigabits, latency=10e-6, bucket=25):
    """Seconds of a step, from its seconds of computing and the network's gigabits per second."""
    buckets = math.ceil(megabytes / bucket)
    bits = 8e6 * megabytes / buckets
    all_reduce = 2 * (gpus - 1) * (bits / gpus / (gigabits * 1e9) + latency)  # of one bucket
    done = 0
    for number in range(1, buckets + 1):
        ready = compute / 3 + compute * 2 / 3 * number / buckets
        done = max(done, ready) + all_reduce
    return done


def ways(gpus, compute, megabytes, gigabits):
    """Returns the seconds of a batch with DDP, and with each thing that could help."""
    ddp = step_seconds(gpus, compute, megabytes, gigabits)
    return {
        "DDP": ddp,
        # DDP fills a bucket with 25 MB of gradients, and the hook sends it as 12.5 MB.
        "bf16 hook": step_seconds(gpus, compute, megabytes / 2, gigabits, bucket=12.5),
        # A hundredth of the bytes, and one bucket, so that nothing overlaps. The time that PowerSGD
        # computes is not in it.
        "PowerSGD": step_seconds(gpus, compute, megabytes / 100, gigabits, bucket=megabytes),
        "no_sync over 4 batches": (3 * compute + ddp) / 4,
        "batch times 4": step_seconds(gpus, 4 * compute, megabytes, gigabits) / 4,
        "network 10 times as fast": step_seconds(gpus, compute, megabytes, 10 * gigabits),
    }


def parse_args():
    """Returns the command line's options; exits with one line when a value cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=int, required=True, help="of all machines together, at least 2")
    add("--gigabits", type=float, required=True, help="of the network, per second")
    add("--ms", type=float, required=True, help="to compute a batch on one GPU")
    add("--megabytes", type=float, required=True, help="of all gradients")
    args = parser.parse_args()
    if args.gpus < 2 or min(args.gigabits, args.ms, args.megabytes) <= 0:
        parser.error("--gpus must be at least 2, and the other numbers above 0")
    return args


def main():
    args = parse_args()
    compute = args.ms / 1000
    print("ms a batch   efficiency")
    for name, seconds in ways(args.gpus, compute, args.megabytes, args.gigabits).items():
        print(f"{1000 * seconds:10.0f}{100 * compute / seconds:11.0f} %  {name}")


if __name__ == "__main__":
    main()
