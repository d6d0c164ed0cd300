"""What torch and the scripts say when something is wrong: one table for several test files.

Tests look for these texts with `says` in what processes print; any of a row's texts can come,
because versions differ, and threads and ranks race. The page on troubleshooting names them.
"""

import re

MESSAGES = {
    # The start.
    "port is taken": ("EADDRINUSE",),
    "ranks are missing": ("Timed out after",),
    "nobody listens": ("The client socket has timed out",),
    "name is unknown": ("no.such.host.invalid",),
    "file is left over": ("Connect", "connect", "timed out", "Timed out"),
    "without torchrun": (
        "start it with: torchrun --standalone --nproc-per-node 2 mnmc_ddp_env.py",
    ),
    "without srun": ("start this script with srun: srun --ntasks 2 python mnmc_ddp_slurm.py",),
    "old launcher": ("unrecognized arguments: --local-rank=0",),
    "nccl without a GPU": (
        "device_id parameter must be an accelerator with an index",  # up to torch 2.14
        "device_id parameter must be a device with a valid index",
    ),
    "SyncBatchNorm without a GPU": ("SyncBatchNorm layers only work with GPU modules",),
    "nobody opens the store": (
        "RendezvousConnectionError: The connection to the C10d store has failed",
    ),
    "interface is missing": ("Unable to find address for: ib0",),
    "name leads to itself": ("remote=[127.0.0.1]", "remote=[127.0.1.1]"),
    # A run that ends.
    "rank died": ("Connection closed by peer", "Connection reset by peer"),
    "rank stalled": (
        "Timed out waiting {N}ms for recv",
        "Timed out waiting {N}ms for send",
        "Application timeout caused pair closure",
    ),
    "rank stalled in training": ("in train_one_epoch", "in evaluate"),
    # Data and checkpoints.
    "download failed": ("cannot load mnist",),
    "other model": ("Unexpected key(s) in state_dict", "Missing key(s) in state_dict"),
    "no checkpoint": ("cannot be read as a checkpoint",),
}


def pattern(name, number=None):
    """A regular expression for a message, by its name or itself, with this number or any."""
    texts = "|".join(map(re.escape, MESSAGES.get(name, (name,))))
    return texts.replace(r"\{N\}", str(number or r"\d+"))


def says(name, output, number=None):
    """Whether a process said this message; the number is that of {N}, such as milliseconds."""
    return re.search(pattern(name, number), output) is not None


def hide_numbers(text):
    """The text with {N} in place of each number."""
    return re.sub(r"\d+", "{N}", text)
