"""Draws one training step on two ranks from what torch.profiler measured.

    torchrun --standalone --nproc-per-node 2 scripts/measure/timeline.py --svg step.svg
    NPROC=1 RATE=1gbit bash scripts/cluster/two_hosts.sh scripts/measure/timeline.py --svg step.svg
    torchrun --standalone --nproc-per-node 2 scripts/measure/timeline.py --model convnet --trace DIR

For each rank the drawing has what it computes, and below that what it communicates. A bucket has a
colour: that of the part of backward that fills it, and that of its all-reduce. A bar of an
all-reduce begins when DDP starts it, and ends when it is complete. The profiler slows the step a
little. --trace writes all that it saw, a file for each rank, for a trace viewer. --svg needs
matplotlib, which tests/requirements.txt has.
"""

import argparse
import json
import math
import os
import tempfile
from pathlib import Path

# Before torch: else the profiler says when it starts, and that there is no GPU.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import common
import network  # the benchmark beside this file; it finds the scripts
import torch
import torch.distributed as dist
import torch.distributed.nn  # as in the scripts: before the process group, for a clean exit
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

PARTS = ("forward", "backward", "optimizer")


def build_step(args):
    """Returns a function that trains a DDP model for a step, with a name for each part."""
    build, shape = network.MODELS[args.model]
    torch.manual_seed(0)
    model = build().to(memory_format=torch.channels_last)
    limit = {"bucket_cap_mb": args.bucket_cap_mb} if args.bucket_cap_mb else {}
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True, **limit)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001, momentum=0.9)
    images = torch.randn(args.batch_size, *shape).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (args.batch_size,))

    def step():
        with record_function("forward"):
            loss = F.cross_entropy(ddp_model(images), labels)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    return step


def profile_steps(args, folder):
    """Trains for some steps; writes the trace into folder; returns what happened in each step."""
    step = build_step(args)
    for _ in range(3):  # The first backward decides on the final buckets.
        step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(args.steps):
            step()
        dist.barrier()
    path = folder / f"rank{dist.get_rank()}.json"
    profiler.export_chrome_trace(str(path))
    return read_steps(read_events(json.loads(path.read_text())))


def read_events(trace):
    """Returns the events of a trace as (name, start, end, args), in milliseconds, sorted."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e6
    events = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":  # an event that has a duration
            start = base + event["ts"] / 1000
            events.append((event["name"], start, start + event["dur"] / 1000, event.get("args")))
    return sorted(events, key=lambda event: event[1])


def read_steps(events):
    """Returns for each step when its parts began and ended, and its all-reduces."""
    intervals = ([event[1:3] for event in events if event[0] == name] for name in PARTS)
    steps = []
    for parts in zip(*intervals, strict=True):
        step = {name: list(part) for name, part in zip(PARTS, parts, strict=True)}
        step["computed"] = find_last_operation(events, *step["backward"])
        step["buckets"] = [
            {"start": start, "end": end, "MB": 4e-6 * math.prod(args["Input Dims"][0])}
            for name, start, end, args in events
            if name == "gloo:all_reduce" and parts[0][0] <= start <= parts[-1][1]
        ]
        steps.append(step)
    return steps


def find_last_operation(events, begin, end):
    """Returns when the last operation of backward ended.

    Each operation of backward has an event of this name. After the last operation, backward waits
    for the all-reduces that are still under way.
    """
    return max(
        stop
        for name, start, stop, _ in events
        if name.startswith("autograd::engine::evaluate_function") and begin <= start <= end
    )


def choose_step(ranks):
    """Returns one step of each rank: that of middle length on rank 0.

    The first step may be slow, and others may be disturbed.
    """
    lengths = [step["optimizer"][1] - step["forward"][0] for step in ranks[0]]
    chosen = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
    return [steps[chosen] for steps in ranks]


def shift_step(step, zero):
    """Returns a step with its times in milliseconds since zero."""
    shifted = {name: [round(time - zero, 3) for time in step[name]] for name in PARTS}
    shifted["computed"] = round(step["computed"] - zero, 3)
    shifted["buckets"] = [
        {
            "start": round(bucket["start"] - zero, 3),
            "end": round(bucket["end"] - zero, 3),
            "MB": round(bucket["MB"], 3),
        }
        for bucket in step["buckets"]
    ]
    return shifted


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=network.MODELS, default="resnet18", help="default: resnet18")
    add("--bucket-cap-mb", type=float, help="DDP's argument; default: 1 for the first bucket, 25")
    add("--batch-size", type=int, default=32, help="in each process; default: 32")
    add("--steps", type=int, default=5, help="to profile; the drawing has one; default: 5")
    add("--svg", type=Path, metavar="FILE", help="the drawing")
    add("--json", type=Path, metavar="FILE", help="what the drawing shows")
    add("--trace", type=Path, metavar="FOLDER", help="what the profiler saw")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun or scripts/cluster/two_hosts.sh")
    if min(args.steps, args.batch_size) < 1:
        parser.error("--steps and --batch-size must be above 0")
    return args


def describe_run(args):
    """Returns the title of the drawing."""
    cap = f"bucket_cap_mb={args.bucket_cap_mb:g}" if args.bucket_cap_mb else "DDP's own buckets"
    return f"{args.model}, {args.batch_size} images a rank, {network.describe_network()}, {cap}"


def report(ranks, args):
    """Prints the step of each rank in a line; writes the files that the options name."""
    measured = {"title": describe_run(args), "machine": common.describe_machine(), "ranks": ranks}
    if args.svg:
        import charts  # of scripts/docs; common has put it on the path

        charts.draw_timeline(args.svg, measured)
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")
    for rank, step in enumerate(ranks):
        waits = step["backward"][1] - step["computed"]
        total = step["optimizer"][1] - step["forward"][0]
        count = len(step["buckets"])
        print(f"rank {rank}: a step of {total:.1f} ms waits {waits:.1f} ms; buckets: {count}")


def main():
    args = parse_args()
    dist.init_process_group("gloo")  # without GPUs, as network.py
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.trace or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        steps = profile_steps(args, folder)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, steps)
    if dist.get_rank() == 0:
        ranks = choose_step(ranks)
        zero = min(step["forward"][0] for step in ranks)
        report([shift_step(step, zero) for step in ranks], args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
