"""What torch and its backends say when something is wrong: one table, by version.

Tests look for these texts in the output of processes that they have started, with `says`. The page
on troubleshooting names a test for a symptom; the test of that page looks the symptom up here, with
`find`.
"""

import re
from typing import NamedTuple

import torch


def parse(version):
    """The first two numbers of a version, which compare as they should: 2.8 is older than 2.15."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


CURRENT = parse(torch.__version__)


class Message(NamedTuple):
    """One symptom. Any of its texts can come, because threads and ranks race to say it."""

    shown_by: tuple  # the files of the tests that see it; () for what nobody could run
    texts: tuple = ()  # in all versions of torch from 2.8 on
    # Where versions or backends differ: "2.15" stands for torch 2.15 and what follows, up to the
    # next number; "legacy" and "nccl2" stand for torch's two implementations of nccl.
    by_version: dict = {}  # noqa: RUF012

    def all_texts(self):
        """The texts of every version."""
        return (*self.texts, *(text for texts in self.by_version.values() for text in texts))

    def current_texts(self, nccl=None):
        """The texts of the torch that runs, and of one implementation of nccl."""
        reached = [key for key in self.by_version if key[0].isdigit() and parse(key) <= CURRENT]
        key = nccl or max(reached, key=parse, default=None)
        texts = self.texts + self.by_version.get(key, ())
        assert texts, "torch says this in other versions only, or nccl is to be named"
        return texts


START, FAILURES, HOSTS = ("test_command_line.py",), ("test_failures.py",), ("test_two_hosts.py",)
SYMPTOMS = ("test_symptoms.py",)

MESSAGES = {
    # The start.
    "port is taken": Message(FAILURES, ("EADDRINUSE",)),
    "ranks are missing": Message(FAILURES, ("Timed out after",)),
    "nobody listens": Message(FAILURES, ("The client socket has timed out",)),
    "name is unknown": Message(FAILURES, ("no.such.host.invalid",)),
    "file is left over": Message(FAILURES, ("Connect", "connect", "timed out", "Timed out")),
    "without torchrun": Message(
        START, ("start this script with torchrun: torchrun --nproc-per-node 2",)
    ),
    "without srun": Message(
        START, ("start this script with srun: srun --ntasks 2 python mnmc_ddp_slurm.py",)
    ),
    "old launcher": Message(START, ("unrecognized arguments: --local-rank=0",)),
    "nccl without a GPU": Message(
        START,
        by_version={
            "2.8": ("device_id parameter must be an accelerator with an index",),
            "2.15": ("device_id parameter must be a device with a valid index",),
        },
    ),
    "SyncBatchNorm without a GPU": Message(
        START, ("SyncBatchNorm layers only work with GPU modules",)
    ),
    "nobody opens the store": Message(
        HOSTS, ("RendezvousConnectionError: The connection to the C10d store has failed",)
    ),
    "interface is missing": Message(HOSTS, ("Unable to find address for: ib0",)),
    "name leads to itself": Message(HOSTS, ("remote=[127.0.0.1]", "remote=[127.0.1.1]")),
    "torchrun is not found": Message(SYMPTOMS, ("torchrun: command not found",)),
    "torchrun finds no GPU": Message(SYMPTOMS, ("ValueError: Cuda is not available.",)),
    # A run that ends.
    "rank died": Message(FAILURES, ("Connection closed by peer", "Connection reset by peer")),
    "rank stalled": Message(
        FAILURES + SYMPTOMS + HOSTS,
        (
            "Timed out waiting {N}ms for recv",
            "Timed out waiting {N}ms for send",
            "Application timeout caused pair closure",
        ),
    ),
    "rank stalled in training": Message(FAILURES, ("in train_one_epoch", "in evaluate")),
    # Messages of torchrun.
    "no traceback": Message(SYMPTOMS, ("ChildFailedError",)),
    "how to get the traceback": Message(SYMPTOMS, ("To enable traceback see",)),
    "process was killed": Message(SYMPTOMS, ("Signal {N} (SIGKILL) received by PID {N}",)),
    "exit code of a killed process": Message(SYMPTOMS, ("exitcode  : -9", "exitcode: -9")),
    "node is missing": Message(SYMPTOMS, ("{N}/{N} clients joined",)),
    "node is missing with c10d": Message(SYMPTOMS, ("RendezvousTimeoutError",)),
    "spawn without main": Message(
        SYMPTOMS, ("An attempt has been made to start a new process before",)
    ),
    "process is ended": Message(SYMPTOMS, ("Sending process {N} closing signal SIGTERM",)),
    # Mistakes in a script.
    "RANK is not set": Message(SYMPTOMS, ("environment variable RANK expected, but not set",)),
    "no process group": Message(SYMPTOMS, ("Default process group has not been initialized",)),
    "two process groups": Message(
        SYMPTOMS, ("trying to initialize the default process group twice",)
    ),
    "two servers": Message(SYMPTOMS, ("OSError: [Errno 98] Address already in use",)),
    "unused parameter": Message(
        SYMPTOMS, ("Expected to have finished reduction in the prior iteration",)
    ),
    "no unused parameter": Message(
        SYMPTOMS,
        (
            "find_unused_parameters=True was specified in DDP constructor, but did not find any "
            "unused parameters",
        ),
    ),
    "another graph": Message(SYMPTOMS, ("Your training graph has changed in this iteration",)),
    "models differ": Message(SYMPTOMS, ("DDP expects same model across all ranks",)),
    "shapes differ": Message(SYMPTOMS, ("appears not to match sizes",)),
    "attribute of the model": Message(
        SYMPTOMS, ("'DistributedDataParallel' object has no attribute",)
    ),
    "device_ids on a CPU": Message(
        SYMPTOMS, ("DistributedDataParallel device_ids and output_device arguments",)
    ),
    # Data and checkpoints.
    "more than tensors": Message(SYMPTOMS, ("Weights only load failed",)),
    "worker died": Message(SYMPTOMS, ("DataLoader worker (pid(s) {N}) exited unexpectedly",)),
    "a single image": Message(SYMPTOMS, ("Expected more than 1 value per channel when training",)),
    "download failed": Message(("test_downloads.py", *START), ("cannot load mnist",)),
    "other model": Message(("test_checkpoints.py",), ("Unexpected key(s) in state_dict",)),
    "no checkpoint": Message(("test_checkpoints.py", *START), ("cannot be read as a checkpoint",)),
}


def pattern(name, number=None, nccl=None):
    """The regular expression of a message in the torch that runs, with this number or with any."""
    texts = "|".join(map(re.escape, MESSAGES[name].current_texts(nccl)))
    return texts.replace(r"\{N\}", str(number or r"\d+"))


def says(name, output, number=None, nccl=None):
    """Whether a process said this message; the number is that of {N}, such as milliseconds."""
    return re.search(pattern(name, number, nccl), output) is not None


def find(part, shown_by):
    """Names of the messages with this part, but for numbers, that a test shows."""
    return [
        name
        for name, message in MESSAGES.items()
        if shown_by in message.shown_by
        and any(hide_numbers(part) in hide_numbers(text) for text in message.all_texts())
    ]


def hide_numbers(text):
    """The text with {N} in place of each number."""
    return re.sub(r"\d+", "{N}", text)
