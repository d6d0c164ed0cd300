"""What the programs of this folder share: the machine in words, and a table."""

import os
import platform
import re
from pathlib import Path

import torch


def describe_machine():
    """Returns the machine in words, for the line above a table."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", re.M)
    cpu = model[1] if model else platform.machine()
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return ", ".join([f"{os.cpu_count()} cores of {cpu}", *gpus, f"torch {torch.__version__}"])


def print_table(rows):
    """Prints rows, dictionaries with the same keys, as a table in Markdown."""
    for first, *others in (rows[0], ["-" * 9] * len(rows[0]), *(row.values() for row in rows)):
        print(" | ".join([f"{first:<18}", *(f"{cell:>9}" for cell in others)]))
