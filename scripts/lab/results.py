"""Writes what the programs of this folder measure, for scripts/docs/charts.py."""

import json
import os
import platform
import sys
from pathlib import Path

import torch


def machine():
    """Returns the machine in words."""
    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            cpu = line.partition(": ")[2]
    return f"{os.cpu_count()} cores of {cpu}, torch {torch.__version__}"


def check(path):
    """Exits with a message if the file has figures of another machine. The path can be None."""
    if path and path.exists():
        found = json.loads(path.read_text())["machine"]
        if found != machine():
            sys.exit(f"{path} has figures of another machine: {found}")


def add_rows(path, new, keys):
    """Adds rows to a JSON file. A row takes the place of one with the same values of the keys.

    Exits with a message if the file has figures of another machine.
    """
    check(path)
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    replaced = [[row[key] for key in keys] for row in new]
    rows = [row for row in old if [row[key] for key in keys] not in replaced] + new
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    temporary = path.with_name(path.name + ".tmp")  # so that a crash leaves the old file whole
    temporary.write_text(f'{{\n "machine": {json.dumps(machine())},\n "rows": [\n{lines}\n ]\n}}\n')
    temporary.replace(path)
