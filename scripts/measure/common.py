"""What the programs of this folder share: versions of a script, a turn, tables, and files.

A version is mnmc_ddp_env.py with one of the patches of docs/patches. The programs train the
versions in turns, so that a machine that slows down slows them all.
"""

import contextlib
import importlib.util
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where the scripts are
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

import patches
import torch
from torch.utils.data import TensorDataset

REPO = patches.REPO


def load_module(path):
    """Returns a script as a module. Its name is not registered, so that two versions can stay."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_versions(names):
    """Returns the patched scripts as modules by their names, and mnmc_ddp_env.py as "DDP".

    names: the patch of each version, {"version 1": "by_hand_1_after_backward", ...}.
    """
    versions = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, patch in names.items():
            versions[name] = load_module(patches.write_patched([patch], folder))
    return versions | {"DDP": load_module(REPO / "mnmc_ddp_env.py")}


def read_options(module, *argv):
    """Returns what a script makes of this command line, with its own defaults."""
    with mock.patch.object(sys, "argv", [module.__file__, *map(str, argv)]):
        return module.parse_args()


def make_noise(count):
    """Returns images of CIFAR-10's shape and labels, as mnmc_ddp_env.py's load_split does."""
    # The channels of a pixel lie side by side, as in CIFAR-10's files.
    images = torch.randint(256, (count, 32, 32, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    return TensorDataset(images, torch.randint(10, (count,)))


def count_sent_bytes():
    """Returns how many bytes all network interfaces of this host have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def take_turn(module, options, local_rank, device, steps, inspect=lambda model, optimizer: ()):
    """Trains a version on noise for an epoch that warms up, and for one that is measured.

    Returns the milliseconds of a step, the bytes that a rank sends in a step, and what
    inspect(model, optimizer) returns after the last step. The kernel counts the bytes: all that
    this host sends, its other programs included.
    """
    count = steps * options.batch_size * int(os.environ["WORLD_SIZE"])
    train_one_epoch, epochs = module.train_one_epoch, []

    def measured(model, loader, optimizer, *rest):
        sent, started = count_sent_bytes(), time.perf_counter()
        totals = train_one_epoch(model, loader, optimizer, *rest)  # ends with an all_reduce
        milliseconds = 1000 * (time.perf_counter() - started) / steps
        sent = (count_sent_bytes() - sent) / steps / int(os.environ["LOCAL_WORLD_SIZE"])
        epochs.append((milliseconds, sent, inspect(model, optimizer)))
        return totals

    changes = {"load_split": lambda *_, **__: make_noise(count), "evaluate": lambda *_: (0, 1)}
    changes |= {"train_one_epoch": measured}
    without_lines = contextlib.redirect_stdout(io.StringIO())
    with mock.patch.multiple(module, **changes), without_lines:
        module.train(options, local_rank, device)
    return epochs[1]


def summarize(values, digits=1):
    """Returns the median, lowest and highest of some measurements, as columns of a table."""
    middle = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {name: round(value, digits) for name, value in middle.items()}


def print_table(rows):
    """Prints rows, dictionaries with the same keys, as a table; a name at the end is to the left.

    A value that is a list or a dictionary is left out.
    """
    heads = [key for key, value in rows[0].items() if not isinstance(value, list | dict)]
    lines = [heads] + [[str(row[key]) for key in heads] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    name_last = isinstance(rows[0][heads[-1]], str)
    for line in lines:
        cells = [cell.rjust(width + 2) for cell, width in zip(line, widths, strict=True)]
        if name_last:
            cells[-1] = f" {line[-1]}"
        print("".join(cells), flush=True)


def describe_machine():
    """Returns the machine in words."""
    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            cpu = line.partition(": ")[2]
    return f"{os.cpu_count()} cores of {cpu}, torch {torch.__version__}"


def check_file(path):
    """Exits with a message if the file has figures of another machine. The path can be None."""
    if path and path.exists():
        found = json.loads(path.read_text())["machine"]
        if found != describe_machine():
            sys.exit(f"{path} has figures of another machine: {found}")


def add_rows(path, new, keys):
    """Adds rows to a JSON file. A row takes the place of one with the same values of the keys.

    Exits with a message if the file has figures of another machine.
    """
    check_file(path)
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    replaced = [[row[key] for key in keys] for row in new]
    rows = [row for row in old if [row[key] for key in keys] not in replaced] + new
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    machine = json.dumps(describe_machine())
    temporary = path.with_name(path.name + ".tmp")  # so that a crash leaves the old file whole
    temporary.write_text(f'{{\n "machine": {machine},\n "rows": [\n{lines}\n ]\n}}\n')
    temporary.replace(path)
