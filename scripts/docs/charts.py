"""Draws the charts of docs/, and writes the tables beside them, from docs/measured/.

    python scripts/docs/charts.py

Needs matplotlib, which tests/requirements.txt has. Two runs on the same figures make the same
files. On a page a table stands between <!-- table NAME --> and <!-- end of table -->.
"""

import contextlib
import json
import re
import statistics
from functools import partial
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
MEASURED = REPO / "docs" / "measured"
IMAGES = REPO / "docs" / "images"
NAMES = ("performance.md", "slow_network.md", "predict.md", "beyond_ddp.md")
PAGES = [REPO / "docs" / name for name in NAMES]
TABLE = re.compile(r"(<!-- table (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)

GREY = "#808080"  # readable on white and on black
# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, RED, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
BUCKETS = [BLUE, ORANGE, GREEN, "#CC79A7", "#56B4E9", RED]  # and again from the first
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "the same names in every run",
    "font.family": "sans-serif",
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "lines.markersize": 5,
}
MEGABITS = {"no limit": None, "1gbit": 1000, "100mbit": 100}
VARIANTS = ["no communication", "DDP", "bf16 hook", "PowerSGD", "no_sync over 4", "batch times 4"]
VARIANTS += ["bucket_cap_mb 1", "bucket_cap_mb 25", "bucket_cap_mb 1000", "no overlap"]
VERSIONS = ["DDP", "ZeRO-1", "FSDP2"]


def read(name):
    """Returns the rows of a file of docs/measured."""
    return json.loads((MEASURED / f"{name}.json").read_text())["rows"]


def network_rows():
    """Returns the rows of the benchmark with ResNet-18 by (network, variant)."""
    rows = [r for r in read("network") if r["model"] == "resnet18" and r["batch_size"] == 32]
    return {(row["network"], row["variant"]): row for row in rows}


@contextlib.contextmanager
def drawing(path, columns=1, width=10, height=3.6, **options):
    """Gives the panels of a chart, side by side, and writes it as an SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        size = (width, height)
        figure, panels = pyplot.subplots(1, columns, figsize=size, squeeze=False, **options)
        yield panels[0]
        for panel in panels[0]:
            panel.spines[["top", "right"]].set_visible(False)
            panel.title.set_fontsize(10)
        figure.tight_layout()
        # Without the date the file depends on the figures alone, and on matplotlib's version.
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def legend(panel, **options):
    panel.legend(frameon=False, fontsize=9, **options)


def label_bars(panel, rows):
    """Writes the milliseconds of each row to the right of its bar."""
    for position, row in enumerate(rows):
        panel.annotate(
            f"{row['ms']:.0f}",
            (row["highest"], position),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )


def draw_network(path):
    """Milliseconds of a step of ResNet-18: a panel for each network, a bar for each variant."""
    rows = network_rows()
    colours = {"no communication": GREY, "DDP": BLUE, "no overlap": RED}
    with drawing(path, len(MEGABITS), sharey=True) as panels:
        for panel, network in zip(panels, MEGABITS, strict=True):
            values = [rows[network, variant] for variant in VARIANTS]
            bars = [
                colours.get(variant, ORANGE if variant.startswith("bucket_cap") else GREEN)
                for variant in VARIANTS
            ]
            middle = [row["ms"] for row in values]
            below = [row["ms"] - row["lowest"] for row in values]
            above = [row["highest"] - row["ms"] for row in values]
            panel.barh(VARIANTS, middle, color=bars)
            spread = {"fmt": "none", "ecolor": GREY, "capsize": 2}
            panel.errorbar(middle, VARIANTS, xerr=[below, above], **spread)
            label_bars(panel, values)
            panel.set_title(network)
            panel.set_xlabel("ms a step")
            panel.set_xlim(0, 1.25 * max(row["highest"] for row in values))
        panels[0].invert_yaxis()  # the first variant on top


def draw_prediction(path):
    """Efficiency of two ranks with ResNet-18 by the speed of the network: estimated, measured."""
    rows = network_rows()
    with drawing(path, width=7) as (panel,):
        for variant, colour in (("DDP", BLUE), ("bf16 hook", GREEN), ("PowerSGD", ORANGE)):
            speeds = [10 * 10 ** (n / 20) for n in range(61)]  # 10 to 10,000 Mb/s
            guesses = [estimate(variant, "100mbit", speed) for speed in speeds]
            compute = rows["no limit", "no communication"]["ms"]
            panel.plot(speeds, [100 * compute / ms for ms in guesses], color=colour, label=variant)
            for network in ("1gbit", "100mbit"):
                ms = rows[network, variant]["ms"]
                alone = rows[network, "no communication"]["ms"]
                panel.plot(MEGABITS[network], 100 * alone / ms, "o", color=colour)
        panel.set_xscale("log")
        panel.set_xlabel("Mb/s of the network (lines: estimated, points: measured)")
        panel.set_ylabel("efficiency, %")
        panel.set_ylim(0, 105)
        legend(panel, loc="lower right")


def draw_variants(path):
    """Images/s of the ConvNet: the median of each variant, with its lowest and highest turn."""
    rows = read("speed")
    names = {"bare": "bare", "ours": "ours", "ours_ddp": "DDP", "textbook": "textbook"}
    colours = [GREY, GREEN, BLUE, RED]
    with drawing(path, len(rows), sharey=True) as panels:
        for panel, row in zip(panels, rows, strict=True):
            turns = [row["turns"][variant] for variant in names]
            middle = [statistics.median(values) for values in turns]
            below = [m - min(values) for m, values in zip(middle, turns, strict=True)]
            above = [max(values) - m for m, values in zip(middle, turns, strict=True)]
            panel.bar(list(names.values()), middle, color=colours)
            panel.errorbar(
                list(names.values()),
                middle,
                yerr=[below, above],
                fmt="none",
                ecolor=GREY,
                capsize=3,
            )
            processes = "1 process" if row["W"] == 1 else f"{row['W']} processes"
            panel.set_title(f"{processes}, batch size {row['batch']}")
        panels[0].set_ylabel("images/s of all processes")


def draw_processes(path):
    """Milliseconds of a step by processes on two cores, and those without any communication."""
    rows = read("many")
    processes = [row["W"] for row in rows]
    ideal = [rows[0]["ms/step"] * max(1, count / 2) for count in processes]
    with drawing(path, width=7) as (panel,):
        panel.plot(processes, ideal, color=GREY, label="ideal: two cores share the work")
        panel.plot(processes, [row["ms/step"] for row in rows], "o-", color=BLUE, label="measured")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(processes, [str(count) for count in processes])
        panel.set_xlabel("processes")
        panel.set_ylabel("ms a step")
        legend(panel)


def accuracy_rows(dataset, epochs, **wanted):
    """Returns the rows of these runs of DDP, or of another way, sorted by processes and seed."""
    wanted = {"dataset": dataset, "epochs": epochs, "way": "DDP"} | wanted
    rows = [row for row in read("accuracy") if wanted.items() <= row.items()]
    return sorted(rows, key=lambda row: (row["processes"], row["seed"]))


def draw_accuracy(path):
    """Test accuracy by global batch size, 64 images in each process: a dot for each seed."""
    with drawing(path, len(ACCURACY), width=6) as panels:
        for panel, (dataset, epochs) in zip(panels, ACCURACY.items(), strict=True):
            rows = accuracy_rows(dataset, epochs, batch_size=64)
            sizes = sorted({row["global_batch_size"] for row in rows})
            means = [
                statistics.mean(r["accuracy"] for r in rows if r["global_batch_size"] == size)
                for size in sizes
            ]
            panel.plot(sizes, means, color=GREY, label="mean")
            dots = [(row["global_batch_size"], row["accuracy"]) for row in rows]
            panel.plot(*zip(*dots, strict=True), "o", color=BLUE, alpha=0.7, label="one seed each")
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.set_xlabel("global batch size")
            panel.set_title(f"{TITLES[dataset]}, {count(epochs, 'epoch')}")
            legend(panel)
        panels[0].set_ylabel("test accuracy, %")


def draw_memory(path):
    """MB that a rank keeps with DDP, ZeRO-1 and FSDP2; a line for what the formula says."""
    rows = [row for row in read("memory") if row["network"] == "one host"]
    parts = {"weights": BLUE, "gradients": GREEN, "optimizer": ORANGE}
    counts = sorted({row["processes"] for row in rows})
    with drawing(path, len(counts), width=9, sharey=True) as panels:
        for panel, processes in zip(panels, counts, strict=True):
            found = {row["version"]: row for row in rows if row["processes"] == processes}
            bottom = [0] * len(VERSIONS)
            for part, colour in parts.items():
                values = [found[version][part] for version in VERSIONS]
                label = "momentum" if part == "optimizer" else part
                panel.bar(VERSIONS, values, bottom=bottom, color=colour, label=label)
                bottom = [low + value for low, value in zip(bottom, values, strict=True)]
            formula = [found[version]["formula"] for version in VERSIONS]
            left = [position - 0.4 for position in range(len(VERSIONS))]
            right = [position + 0.4 for position in range(len(VERSIONS))]
            panel.hlines(formula, left, right, colors=GREY, label="formula")
            panel.set_title(count(processes, "process", "es"))
        panels[0].set_ylabel("MB of a rank")
        panels[0].set_ylim(0, 180)  # room for the legend
        legend(panels[-1])


def find_lanes(buckets):
    """Returns a row for each bucket, so that all-reduces at the same time lie below each other."""
    ends, rows = [], []
    for bucket in buckets:
        free = [row for row, end in enumerate(ends) if end <= bucket["start"]]
        row = free[0] if free else len(ends)
        ends[row : row + 1] = [bucket["end"]]
        rows.append(row)
    return rows


def split_step(step):
    """Returns what a rank computes in a step: (start, end, colour, label) of each part."""
    parts, start = [(*step["forward"], GREY, "forward")], step["backward"][0]
    for number, bucket in enumerate(step["buckets"]):
        end = min(bucket["start"], step["computed"])
        parts.append((start, end, BUCKETS[number % len(BUCKETS)], "backward"))
        start = end
    parts.append((start, step["computed"], GREY, ""))
    parts.append((step["computed"], step["backward"][1], "none", "waits"))
    return [*parts, (*step["optimizer"], GREY, "optimizer")]


def draw_bars(panel, row, parts, longest):
    """Draws parts, (start, end, colour, label), as bars side by side; labels where they fit."""
    for start, end, colour, label in parts:
        frame = GREY if colour == "none" else colour
        panel.broken_barh(
            [(start, end - start)], (row - 0.4, 0.8), facecolors=colour, edgecolors=frame
        )
        if end - start > 0.009 * len(label) * longest:
            text_colour = GREY if colour == "none" else "black"
            centre = ((start + end) / 2, row)
            panel.annotate(label, centre, ha="center", va="center", fontsize=9, color=text_colour)


def draw_timeline(path, measured):
    """A step on each rank: what it computes, and below that its all-reduces, a colour a bucket."""
    ranks, ticks = measured["ranks"], {}
    longest = max(step["optimizer"][1] for step in ranks)
    heights = [2.5 + max(find_lanes(step["buckets"])) for step in ranks]
    with drawing(path, height=1 + 0.32 * sum(heights)) as (panel,):
        for rank, step in enumerate(ranks):
            top = sum(heights[:rank])
            draw_bars(panel, top, split_step(step), longest)
            ticks |= {top: f"rank {rank} computes", top + 1: "all-reduces"}
            for number, lane in enumerate(find_lanes(step["buckets"])):
                bucket, colour = step["buckets"][number], BUCKETS[number % len(BUCKETS)]
                label = f"bucket {number + 1}: {bucket['MB']:.1f} MB"
                bar = (bucket["start"], bucket["end"], colour, label)
                draw_bars(panel, top + 1 + lane, [bar], longest)
        panel.set_yticks(list(ticks), list(ticks.values()))
        panel.tick_params(axis="y", length=0)
        panel.invert_yaxis()
        panel.set_xlim(0, longest)
        panel.set_xlabel("milliseconds")
        panel.grid(axis="x", color=GREY, alpha=0.4)
        panel.set_axisbelow(True)
        panel.set_title(measured["title"])


def draw_measured_timeline(name, path):
    """Draws a timeline of docs/measured."""
    draw_timeline(path, json.loads((MEASURED / f"{name}.json").read_text()))


CHARTS = {
    "network": draw_network,
    "prediction": draw_prediction,
    "variants": draw_variants,
    "processes": draw_processes,
    "accuracy": draw_accuracy,
    "memory": draw_memory,
    "timeline_buckets": partial(draw_measured_timeline, "timeline_buckets"),
    "timeline_one_bucket": partial(draw_measured_timeline, "timeline_one_bucket"),
}
ACCURACY = {"mnist": 1}  # Data sets that were trained with three seeds, and for how many epochs.
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}


def count(number, noun, plural="s"):
    return f"{number} {noun}{'' if number == 1 else plural}"


def table(heads, rows):
    """Returns a table in Markdown from the names of its columns and its rows of cells."""
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def short(milliseconds):
    """Three digits are more than the noise allows."""
    return f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:.0f}"


def with_spread(row):
    return f"{short(row['ms'])} ({short(row['lowest'])} to {short(row['highest'])})"


def network_table():
    """Medians with lowest and highest, and the ratio to DDP, for each network."""
    rows = network_rows()
    heads = ["variant", "MB a step"]
    for network in MEGABITS:
        heads += [f"{network}: ms a step", "to DDP"]
    lines = []
    for variant in VARIANTS:
        cells = [variant, f"{rows['no limit', variant]['MB']:.2f}"]
        for network in MEGABITS:
            row, ddp = rows[network, variant], rows[network, "DDP"]
            cells += [with_spread(row), f"{row['ms'] / ddp['ms']:.1f}"]
        lines.append(cells)
    return table(heads, lines)


def gain_table():
    """How many times as fast as DDP a step of ResNet-18 becomes."""
    rows = network_rows()

    def gain(slow, fast, network):
        gained = rows[network, slow]["ms"] / rows[network, fast]["ms"]
        return f"{gained:.0f}" if gained >= 10 else f"{gained:.1f}"

    lines = [["overlap, which DDP has", *(gain("bucket_cap_mb 1000", "DDP", n) for n in MEGABITS)]]
    for variant in VARIANTS[2:6]:
        lines.append([variant, *(gain("DDP", variant, network) for network in MEGABITS)])
    return table(["technique", *MEGABITS], lines)


def estimate(variant, network, megabits=None):
    """Milliseconds of a step on a slow network, from what was measured without a limit.

    Also from the megabytes on the cable, which headers and acknowledgements make a little more on a
    slow cable. megabits: of another network, per second.
    """
    rows = network_rows()
    unlimited = rows["no limit", variant]["ms"]
    communication = 8000 * rows[network, variant]["MB"] / (megabits or MEGABITS[network])
    backward = rows["no limit", "no communication"]["ms"] * 2 / 3
    if variant in ("no overlap", "bucket_cap_mb 1000", "PowerSGD"):
        overlap = 0  # There is one bucket, and its all-reduce starts after backward.
    elif variant == "no_sync over 4":
        overlap = backward / 4  # Only every fourth backward communicates.
    elif variant == "batch times 4":
        overlap = unlimited * 2 / 3  # A larger batch computes an image faster.
    else:
        overlap = backward
    return unlimited + max(0, communication - overlap)


def estimate_table():
    """What was measured, what the formula says, and how far it is off."""
    rows, heads, lines = network_rows(), ["variant"], []
    networks = [network for network, speed in MEGABITS.items() if speed]
    for network in networks:
        heads += [f"{network}: measured", "estimated", "off by"]
    for variant in VARIANTS:
        cells = [variant]
        for network in networks:
            row = rows[network, variant]
            guess = estimate(variant, network)
            off = f"{100 * (guess / row['ms'] - 1):+.0f} %"
            cells += [short(row["ms"]), short(guess), off]
        if variant != "no communication":
            lines.append(cells)
    return table(heads, lines)


def speed_table():
    """Images/s of the ConvNet, and their ratios."""
    names = ["bare", "ours", "ours_ddp", "textbook"]
    ratios = ["ours/bare", "ddp/ours", "ours/textbook"]
    heads = ["batch size per process", "processes", "bare", "ours", "DDP", "textbook"]
    heads += ["ours / bare", "DDP / ours", "ours / textbook", "input's share"]
    lines = []
    for row in read("speed"):
        cells = [row["batch"], row["W"], *(row[name] for name in names)]
        cells += [f"{row[name]:.1f}" for name in ratios]
        lines.append([*cells, f"{100 * row['input/ours']:.1f} %"])
    return table(heads, lines)


def processes_table():
    rows = read("many")
    heads = ["processes", *(str(row["W"]) for row in rows)]
    lines = [["ms a step", *(f"{row['ms/step']:.1f}" for row in rows)]]
    lines.append(["peak memory of a process, MiB", *(str(row["MiB"]) for row in rows)])
    return table(heads, lines)


def accuracy_table(**wanted):
    """Test accuracy in per cent: a row for each number of processes, a column for each seed."""
    heads, lines = ["data set", "processes", "batch size per process", "global", "steps"], []
    for dataset, epochs in ACCURACY.items():
        rows = accuracy_rows(dataset, epochs, **wanted)
        for processes in sorted({row["processes"] for row in rows}):
            found = [row for row in rows if row["processes"] == processes]
            cells = [TITLES[dataset], processes, found[0]["batch_size"]]
            cells += [found[0]["global_batch_size"], found[0]["steps"]]
            lines.append([*cells, *(f"{row['accuracy']:.2f}" for row in found)])
    return table([*heads, *(f"seed {seed}" for seed in range(3))], lines)


def hooks_table():
    """Test accuracy of the communication hooks on CIFAR-10 after five epochs."""
    lines = []
    for way in ("DDP", "bf16 hook", "PowerSGD"):
        (row,) = accuracy_rows("cifar10", 5, way=way, processes=2, seed=0)
        lines.append([way, f"{row['accuracy']:.2f}"])
    return table(["gradients", "test accuracy, %"], lines)


def memory_table():
    """What the rank with the most keeps, and what it sends in a step."""
    heads = ["processes", "script", "weights", "gradients", "momentum", "all three, MB", "formula"]
    heads.append("sent in a step, MB")
    names = ["weights", "gradients", "optimizer", "all", "formula", "sent"]
    rows = [row for row in read("memory") if row["network"] == "one host"]
    rows.sort(key=lambda row: (row["processes"], VERSIONS.index(row["version"])))
    lines = [[row["processes"], row["version"], *(row[name] for name in names)] for row in rows]
    return table(heads, lines)


def memory_times():
    """Milliseconds of a step with each version, by processes and network."""
    rows = read("memory")
    networks = ["one host", "1gbit", "100mbit"]
    setups = sorted(
        {(row["processes"], row["network"]) for row in rows},
        key=lambda setup: (networks.index(setup[1]), setup[0]),
    )
    heads = ["processes", "network", *VERSIONS]
    lines = []
    for processes, network in setups:
        found = {
            r["version"]: r for r in rows if (r["processes"], r["network"]) == (processes, network)
        }
        lines.append([processes, network, *(with_spread(found[name]) for name in heads[2:])])
    return table(heads, lines)


def machine():
    """The processor and torch's version, the same in all files."""
    (description,) = {json.loads(path.read_text())["machine"] for path in MEASURED.glob("*.json")}
    return description


TABLES = {
    "network": network_table,
    "gains": gain_table,
    "estimate": estimate_table,
    "speed": speed_table,
    "processes": processes_table,
    "accuracy, fixed global batch size": lambda: accuracy_table(global_batch_size=256),
    "accuracy, fixed batch size per process": lambda: accuracy_table(batch_size=64),
    "accuracy of the hooks": hooks_table,
    "memory": memory_table,
    "milliseconds": memory_times,
}


def write_tables(text):
    """Returns the text of a page with its tables made new."""
    return TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def main():
    IMAGES.mkdir(exist_ok=True)
    for name, draw in CHARTS.items():
        draw(IMAGES / f"{name}.svg")
    for page in PAGES:
        page.write_text(write_tables(page.read_text()))


if __name__ == "__main__":
    main()
