"""Draws the charts of docs/performance.md, and writes its tables, from docs/measured/.

    python scripts/docs/charts.py

Needs matplotlib, which tests/requirements.txt has. Two runs on the same figures make the same
files. On the page a table stands between <!-- table NAME --> and <!-- end of table -->.
"""

import json
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
MEASURED = REPO / "docs" / "measured"
IMAGES = REPO / "docs" / "images"
PAGE = REPO / "docs" / "performance.md"

GREY = "#808080"  # readable on white and on black
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = {"no communication": GREY, "DDP": "#0072B2", "no overlap": "#D55E00"}
REMEDY, BUCKETS = "#009E73", "#E69F00"
MEGABITS = {"1gbit": 1000, "100mbit": 100}


def load_network():
    """Returns the rows of the benchmark by (model, network, variant)."""
    rows = read_network()["rows"]
    return {(row["model"], row["network"], row["variant"]): row for row in rows}


def read_network():
    return json.loads((MEASURED / "network.json").read_text())


def names(rows, place):
    """The models, networks or variants of the rows, in their order."""
    return list(dict.fromkeys(key[place] for key in rows))


def draw_network(path, rows):
    """Milliseconds of a step of ResNet-18: a panel for each network, a bar for each variant."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "the same names in every run",
        "font.family": "sans-serif",
        "text.color": GREY,
        "axes.labelcolor": GREY,
        "axes.edgecolor": GREY,
        "xtick.color": GREY,
        "ytick.color": GREY,
    }
    networks, variants = names(rows, 1), names(rows, 2)
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(
            1, len(networks), figsize=(10, 3.6), sharey=True, squeeze=False
        )
        for panel, network in zip(panels[0], networks, strict=True):
            values = [rows["resnet18", network, variant] for variant in variants]
            middle = [row["ms"] for row in values]
            spread = [
                [row["ms"] - row["lowest"] for row in values],
                [row["highest"] - row["ms"] for row in values],
            ]
            panel.barh(variants, middle, color=[colour(v) for v in variants])
            panel.errorbar(middle, variants, xerr=spread, fmt="none", ecolor=GREY, capsize=2)
            for place, row in enumerate(values):
                panel.annotate(
                    f"{row['ms']:.0f}",
                    (row["highest"], place),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            panel.set_title(network, fontsize=10)
            panel.set_xlabel("ms a step")
            panel.set_xlim(0, 1.25 * max(row["highest"] for row in values))
            panel.spines[["top", "right"]].set_visible(False)
        panels[0][0].invert_yaxis()  # the first variant on top
        figure.tight_layout()
        # Without the date the file depends on the figures alone, and on matplotlib's version.
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def colour(variant):
    return COLOURS.get(variant, BUCKETS if variant.startswith("bucket_cap") else REMEDY)


def network_table(rows, model):
    """Medians with lowest and highest, and the ratio to DDP, for each network."""
    networks = names(rows, 1)
    heads = ["variant", "MB a step", *(f"{network}: ms a step | to DDP" for network in networks)]
    lines = [f"| {' | '.join(heads)} |", "| --- " * (2 + 2 * len(networks)) + "|"]
    for variant in names(rows, 2):
        cells = [variant, f"{rows[model, networks[0], variant]['MB']:.2f}"]
        for network in networks:
            row, ddp = rows[model, network, variant], rows[model, network, "DDP"]
            cells.append(f"{short(row['ms'])} ({short(row['lowest'])} to {short(row['highest'])})")
            cells.append(f"{row['ms'] / ddp['ms']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def short(milliseconds):
    """Three digits are more than the noise allows."""
    return f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:.0f}"


def estimate(compute, communication, variant):
    """Milliseconds of a step, from those of computing it and of its bytes on the cable."""
    backward = compute * 2 / 3
    if variant in ("no overlap", "bucket_cap_mb 1000"):
        overlap = 0  # The only all-reduce starts after backward.
    elif variant == "no_sync over 4":
        overlap = backward / 4  # Only every fourth backward communicates.
    else:
        overlap = backward
    return compute + max(0, communication - overlap)


def estimate_table(rows):
    """ResNet-18: what was measured, what the formula says, and how far it is off."""
    networks = [network for network in names(rows, 1) if network in MEGABITS]
    heads = ["variant"]
    for network in networks:
        heads += [f"{network}: measured", "estimated", "off by"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for variant in names(rows, 2)[1:]:  # without that which does not communicate
        cells = [variant]
        for network in networks:
            compute = rows["resnet18", network, "no communication"]["ms"]
            row = rows["resnet18", network, variant]
            communication = 1000 * row["MB"] * 8 / MEGABITS[network]
            guess = estimate(compute, communication, variant)
            off = f"{100 * (guess / row['ms'] - 1):+.0f} %"
            cells += [short(row["ms"]), short(guess), off]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tables():
    """Returns the tables of the page by name."""
    rows = load_network()
    found = {f"network {model}": network_table(rows, model) for model in names(rows, 0)}
    batch_size, turns = ({row[key] for row in rows.values()} for key in ("batch_size", "turns"))
    images, most = ", ".join(map(str, sorted(batch_size))), max(turns)
    machine = f"Measured on {read_network()['machine']}, with {images} images per rank in a step."
    machine += f" {most} turns." if most > 1 else ""
    return found | {"machine": machine, "estimate": estimate_table(rows)}


def write_tables(text):
    """Returns the text of the page with its tables made new."""
    for name, table in tables().items():
        before, begin, rest = text.partition(f"<!-- table {name} -->\n")
        _, end, after = rest.partition("<!-- end of table -->")
        assert begin and end, f"{PAGE.name} has no place for the table {name}"
        text = before + begin + table + "\n" + end + after
    return text


def main():
    IMAGES.mkdir(exist_ok=True)
    draw_network(IMAGES / "network.svg", load_network())
    PAGE.write_text(write_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()
