"""Draws one training step on two ranks from what torch.profiler measured.

    torchrun --standalone --nproc-per-node 2 scripts/lab/timeline.py --svg step.svg
    NPROC=1 RATE=1gbit bash scripts/lab/two_hosts.sh scripts/lab/timeline.py --svg step.svg
    torchrun --standalone --nproc-per-node 2 scripts/lab/timeline.py --model convnet --trace traces

For each rank the drawing has what it computes, and below that what it communicates. A bucket has a
colour: that of the part of backward that fills it, and that of its all-reduce. A bar of an
all-reduce begins when DDP starts it, and ends when it is complete. The profiler slows the step a
little. --trace writes all that it saw, a file for each rank, for a trace viewer.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

# Before torch: else the profiler says when it starts, and that there is no GPU.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import network  # the benchmark beside this file; it finds the scripts
import results
import torch
import torch.distributed as dist
import torch.distributed.nn  # as in the scripts: before the process group, for a clean exit
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

PARTS = ("forward", "backward", "optimizer")
GREY = "#808080"  # readable on white and on black
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]  # Okabe and Ito's


def profile_steps(args, folder):
    """Trains for some steps; returns a list of what happened in each, and writes the trace."""
    build, shape = network.MODELS[args.model]
    torch.manual_seed(0)
    model = build().to(memory_format=torch.channels_last)
    limit = {"bucket_cap_mb": args.bucket_cap_mb} if args.bucket_cap_mb else {}
    model = DistributedDataParallel(model, gradient_as_bucket_view=True, **limit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    images = torch.randn(args.batch_size, *shape).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (args.batch_size,))

    def step():
        with record_function("forward"):
            loss = F.cross_entropy(model(images), labels)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):  # The first backward decides on the final buckets.
        step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(args.steps):
            step()
        dist.barrier()
    path = folder / f"rank{dist.get_rank()}.json"
    profiler.export_chrome_trace(str(path))
    return read_trace(json.loads(path.read_text()))


def read_trace(trace):
    """Returns the steps of a trace; all times are milliseconds since the same moment."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e6
    events = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":  # an event that has a duration
            start = base + event["ts"] / 1000
            events.append((start, start + event["dur"] / 1000, event))
    events.sort(key=lambda event: event[0])

    def named(name):
        return [(start, end) for start, end, event in events if event["name"] == name]

    steps = []
    for parts in zip(*(named(name) for name in PARTS), strict=True):
        begin, end = parts[0][0], parts[-1][1]
        step = {name: list(part) for name, part in zip(PARTS, parts, strict=True)}
        backward = step["backward"]
        # Each operation of backward has an event of this name. After the last one, backward waits
        # for the all-reduces that are still under way.
        operations = [
            stop
            for start, stop, event in events
            if event["name"].startswith("autograd::engine::evaluate_function")
            and backward[0] <= start <= backward[1]
        ]
        step["computed"] = max(operations)
        step["buckets"] = [
            {"start": start, "end": stop, "MB": 4e-6 * elements(event)}
            for start, stop, event in events
            if event["name"] == "gloo:all_reduce" and begin <= start <= end
        ]
        steps.append(step)
    return steps


def elements(event):
    """How many numbers the first tensor of an event has."""
    count = 1
    for size in event["args"]["Input Dims"][0]:
        count *= size
    return count


def relative(ranks):
    """The step of each rank, in milliseconds since the first of them began."""
    zero = min(step["forward"][0] for step in ranks)
    return [
        {name: [round(time - zero, 3) for time in step[name]] for name in PARTS}
        | {"computed": round(step["computed"] - zero, 3)}
        | {
            "buckets": [
                {
                    "start": round(bucket["start"] - zero, 3),
                    "end": round(bucket["end"] - zero, 3),
                    "MB": round(bucket["MB"], 3),
                }
                for bucket in step["buckets"]
            ]
        }
        for step in ranks
    ]


def lanes(buckets):
    """Returns a row for each bucket, so that all-reduces at the same time lie below each other."""
    ends, rows = [], []
    for bucket in buckets:
        free = [row for row, end in enumerate(ends) if end <= bucket["start"]]
        row = free[0] if free else len(ends)
        ends[row : row + 1] = [bucket["end"]]
        rows.append(row)
    return rows


def draw(measured):
    """Returns the SVG of what was measured; nothing else goes into it."""
    ranks = measured["ranks"]
    longest = max(step["optimizer"][1] for step in ranks)
    left, width, height = 150, 730, 22
    bars, words, y = [], [], 34

    def x(time):
        return round(left + width * time / longest, 1)

    def box(start, end, fill, label="", stroke="none"):
        wide = round(x(end) - x(start), 1)
        if wide <= 0:
            return
        bars.append(
            f'<rect x="{x(start)}" y="{y}" width="{wide}" height="{height - 4}" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )
        if wide > 7 * len(label):
            middle = round(x(start) + wide / 2, 1)
            text(middle, y + 13, label, "middle", "#000000" if fill != "none" else GREY)

    def text(where, line, label, anchor="start", colour=GREY):
        if label:
            place = f'x="{where}" y="{line}" text-anchor="{anchor}" fill="{colour}"'
            words.append(f"<text {place}>{label}</text>")

    text(8, 18, measured["title"])
    for number, step in enumerate(ranks):
        buckets = step["buckets"]
        text(8, y + 13, f"rank {number} computes")
        box(*step["forward"], GREY, "forward")
        begin = step["backward"][0]
        for index, bucket in enumerate(buckets):
            end = min(bucket["start"], step["computed"])
            box(begin, end, colour_of(index), "backward")
            begin = end
        box(begin, step["computed"], GREY)
        box(step["computed"], step["backward"][1], "none", "waits", GREY)
        box(*step["optimizer"], GREY, "optimizer")
        y += height
        text(8, y + 13, "all-reduces")
        rows, top = lanes(buckets), y
        for index, (bucket, row) in enumerate(zip(buckets, rows, strict=True)):
            y = top + height * row
            box(bucket["start"], bucket["end"], colour_of(index), f"bucket {index + 1}")
        y = top + height * (max(rows) + 1) + 12
    lines = []
    for tick in ticks(longest):
        lines.append(f'<path d="M{x(tick)} 28V{y}" stroke="{GREY}" stroke-opacity="0.4"/>')
        text(x(tick), y + 14, f"{tick:g}", "middle")
    text(8, y + 14, "milliseconds")
    y += 34
    buckets = ranks[0]["buckets"]
    for index, bucket in enumerate(buckets if len(buckets) <= 8 else []):
        where, line = left + 180 * (index % 4), y + 18 * (index // 4)
        bars.append(
            f'<rect x="{where}" y="{line - 10}" width="12" height="12" fill="{colour_of(index)}"/>'
        )
        text(where + 18, line, f"bucket {index + 1}: {bucket['MB']:.1f} MB")
    y += 18 * ((len(buckets) + 3) // 4) if len(buckets) <= 8 else 0
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {y}" '
    head += 'font-family="sans-serif" font-size="12">'
    title = f"<title>{measured['title']}</title>"
    return "\n".join([head, title, *lines, *bars, *words, "</svg>", ""])


def colour_of(index):
    return COLOURS[index % len(COLOURS)]


def ticks(longest):
    """Round numbers from 0 to the longest time, at most ten steps."""
    size = 1
    while longest / size > 10:
        size *= 2.5 if str(size)[0] == "2" else 2
    return [size * number for number in range(int(longest / size) + 1)]


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
        parser.error("start it with torchrun or scripts/lab/two_hosts.sh")
    if min(args.steps, args.batch_size) < 1:
        parser.error("--steps and --batch-size must be above 0")
    return args


def main():
    args = parse_args()
    dist.init_process_group("gloo")  # without GPUs, as network.py
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.trace or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        steps = profile_steps(args, folder)
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, steps)
    if dist.get_rank() == 0:
        # The step of middle length: the first may be slow, and others may be disturbed.
        order = sorted(
            range(args.steps), key=lambda n: steps[n]["optimizer"][1] - steps[n]["forward"][0]
        )
        chosen = order[len(order) // 2]
        cap = f"bucket_cap_mb={args.bucket_cap_mb:g}" if args.bucket_cap_mb else "DDP's own buckets"
        title = f"{args.model}, {args.batch_size} images a rank, {network.network()}, {cap}"
        ranks = relative([steps[chosen] for steps in everything])
        measured = {"title": title, "machine": results.machine(), "ranks": ranks}
        if args.svg:
            args.svg.write_text(draw(measured))
        if args.json:
            args.json.write_text(json.dumps(measured, indent=1) + "\n")
        for rank, step in enumerate(ranks):
            waits = step["backward"][1] - step["computed"]
            total = step["optimizer"][1] - step["forward"][0]
            count = len(step["buckets"])
            print(f"rank {rank}: a step of {total:.1f} ms waits {waits:.1f} ms; buckets: {count}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
