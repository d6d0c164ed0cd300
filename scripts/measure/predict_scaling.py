"""What can I expect of several GPUs on this network, and what would help?

    python scripts/measure/predict_scaling.py --gpus 16 --gigabits 10 --ms 87 --megabytes 102
    python scripts/measure/predict_scaling.py --gpus 8 64 --gigabits 10 100 --ms 87 --megabytes 102

--ms is how long one GPU computes a batch: 1000 x batch size / images/s, with the images/s of
snsc.py. --megabytes is the size of the gradients: 4 bytes for each parameter. --gigabits is the
bandwidth of the slowest connection between two GPUs, in Gb/s.

For one number of GPUs and one network it prints the milliseconds of a batch and the efficiency,
with DDP and with what could help: the time to compute a batch without communication, divided by
the time of a batch. For several it prints a table of DDP's efficiency. The estimate is that of
docs/predict.md, which says what it leaves out. Real networks are slower.
"""

import argparse
import math


def predict_step(gpus, compute, megabytes, gigabits, latency=10e-6, bucket=25):
    """Seconds of a step, from its seconds of computing and the network's gigabits per second."""
    buckets = math.ceil(megabytes / bucket)
    bits = 8e6 * megabytes / buckets
    all_reduce = 2 * (gpus - 1) * (bits / gpus / (gigabits * 1e9) + latency)  # of one bucket
    end = 0
    for number in range(1, buckets + 1):
        ready = compute / 3 + compute * 2 / 3 * number / buckets
        end = max(end, ready) + all_reduce  # after the all-reduce of the bucket before it
    return end


def predict_variants(gpus, compute, megabytes, gigabits):
    """Returns the seconds of a batch with DDP, and with each thing that could help."""
    ddp = predict_step(gpus, compute, megabytes, gigabits)
    return {
        "DDP": ddp,
        # DDP fills a bucket with 25 MB of gradients, and the hook sends it as 12.5 MB.
        "bf16 hook": predict_step(gpus, compute, megabytes / 2, gigabits, bucket=12.5),
        # A hundredth of the bytes, and one bucket, so that nothing overlaps. The time that PowerSGD
        # computes is not in it.
        "PowerSGD": predict_step(gpus, compute, megabytes / 100, gigabits, bucket=megabytes),
        "no_sync over 4 batches": (3 * compute + ddp) / 4,
        "batch times 4": predict_step(gpus, 4 * compute, megabytes, gigabits) / 4,
        "network 10 times as fast": predict_step(gpus, compute, megabytes, 10 * gigabits),
    }


def print_variants(gpus, gigabits, compute, megabytes):
    """Prints what could help with so many GPUs on this network."""
    print("ms a batch   efficiency")
    for name, seconds in predict_variants(gpus, compute, megabytes, gigabits).items():
        print(f"{1000 * seconds:10.0f}{100 * compute / seconds:11.0f} %  {name}")


def print_efficiency(counts, networks, compute, megabytes):
    """Prints DDP's efficiency in per cent: a row for a number of GPUs, a column for a network."""
    print("   GPUs" + "".join(f"{gigabits:6g} Gb/s" for gigabits in networks))
    for gpus in counts:
        steps = [predict_step(gpus, compute, megabytes, gigabits) for gigabits in networks]
        print(f"{gpus:7}" + "".join(f"{100 * compute / step:9.0f} %" for step in steps))


def parse_args():
    """Returns the command line's options; exits with one line when a value cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=int, nargs="+", required=True, help="of all machines, at least 2")
    add("--gigabits", type=float, nargs="+", required=True, help="of the network, per second")
    add("--ms", type=float, required=True, help="to compute a batch on one GPU")
    add("--megabytes", type=float, required=True, help="of all gradients")
    args = parser.parse_args()
    if min(args.gpus) < 2 or min(*args.gigabits, args.ms, args.megabytes) <= 0:
        parser.error("--gpus must be at least 2, and the other numbers above 0")
    return args


def main():
    args = parse_args()
    compute = args.ms / 1000
    if len(args.gpus) == len(args.gigabits) == 1:
        print_variants(args.gpus[0], args.gigabits[0], compute, args.megabytes)
    else:
        print_efficiency(args.gpus, args.gigabits, compute, args.megabytes)


if __name__ == "__main__":
    main()
