"""What the programs of this folder share: the machine in words, a table, and timed steps."""

import os
import platform
import re
import time
from pathlib import Path

import torch
import torch.distributed as dist


def describe_machine():
    """Returns the machine in words, for the line above a table."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", re.M)
    cpu = model[1] if model else platform.machine()
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return ", ".join([f"{os.cpu_count()} cores of {cpu}", *gpus, f"torch {torch.__version__}"])


def measure(train, steps):
    """Returns (milliseconds, megabytes sent by this host) of a step of train(steps)."""
    dist.barrier()
    sent, started = count_sent_bytes(), time.perf_counter()
    train(steps)
    dist.barrier()  # The slowest rank ends the turn.
    seconds, sent = time.perf_counter() - started, count_sent_bytes() - sent
    return 1000 * seconds / steps, sent / 1e6 / steps


def count_sent_bytes():
    """Returns how many bytes all network interfaces of this host have sent, from the kernel."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def print_table(rows):
    """Prints rows, dictionaries with the same keys, as a table in Markdown."""
    lines = [list(rows[0])] + [[str(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print(" | ".join([first.ljust(widths[0]), *cells]), flush=True)
