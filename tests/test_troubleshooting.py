"""docs/troubleshooting.md: what it says without a mark is made here or in another test."""

import re

import pytest
from launch import REPO, quick_for, run_forked_ranks
from messages import MESSAGES, hide_numbers, says

PAGE = (REPO / "docs" / "troubleshooting.md").read_text()

# Mistakes by what torch says of them: how many ranks make them, with 0 a plain python, and lines
# that follow START. The model has two outputs; `pick` is what a step takes of them.
START = """
import argparse, os, signal, socket
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

class Layers(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.first, self.second, self.output = nn.Linear(4, 4), nn.Linear(4, 4), output

    def forward(self, x, both=True):
        first = self.first(x)
        return self.output(first, self.second(first) if both else first)

class Dies(list):
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)

rank = int(os.environ.get("RANK", 0))

def join():
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))

def wrap(model, **options):
    join()
    return DistributedDataParallel(model, **options)

def two(output=lambda *both: both, **options):
    return wrap(Layers(output), **options)

def step(model, pick=lambda both: both[1], **options):
    pick(model(torch.ones(2, 4), **options)).sum().backward()

"""
STATIC, FIND = "model = two(static_graph=True)\n", "find_unused_parameters=True"
MISTAKES = {
    "environment variable RANK expected, but not set": (0, "join()"),
    "Default process group has not been initialized": (0, "DistributedSampler(range(4))"),
    "trying to initialize the default process group twice": (1, "join(); join()"),
    "OSError: [Errno {N}] Address already in use": (
        0,
        "servers = [socket.create_server(('', 18889)) for _ in range(2)]",
    ),
    "Expected to have finished reduction in the prior iteration": (
        1,
        "model = two()\nfor _ in range(2): step(model, both=False)",
    ),
    "Parameters which did not receive grad for rank": (
        1,
        "dist.set_debug_level(dist.DebugLevel.INFO)\n"
        "model = two()\nfor _ in range(2): step(model, both=False)",
    ),
    "not compatible with static_graph set to True": (  # an output that is never in the loss
        1,
        STATIC + "for _ in range(3): step(model, lambda both: both[0])",
    ),
    "Your training graph has changed in this iteration": (
        1,
        STATIC + "for both in (False, True, True): step(model, both=both)",
    ),
    f"{FIND} was specified in DDP constructor, but did not find any unused parameters": (
        1,
        f"step(two({FIND}))",
    ),
    "DDP expects same model across all ranks": (2, "two() if rank else wrap(nn.Linear(4, 4))"),
    "appears not to match sizes": (2, "wrap(nn.Linear(4, 4 + rank))"),
    "appears not to match strides": (
        2,
        "model = nn.Conv2d(3, 4, 3)\n"
        "wrap(model.to(memory_format=torch.channels_last) if rank else model)",
    ),
    "'DistributedDataParallel' object has no attribute": (1, "two().first"),
    "DistributedDataParallel device_ids and output_device arguments": (1, "two(device_ids=[0])"),
    "op.preamble.length <= op.nbytes": (  # twice the bytes, because integers are int64
        2,
        "join(); dist.broadcast(torch.zeros(2) if rank else torch.tensor([1, 2]), 0)",
    ),
    "ProcessGroupGloo::allgather: invalid tensor size at index": (
        2,
        "join(); dist.all_gather([torch.zeros(2), torch.zeros(3)], torch.zeros(2 + rank))",
    ),
    "Detected mismatch between collectives on ranks": (
        2,
        "dist.set_debug_level(dist.DebugLevel.DETAIL)\n"
        "join(); dist.all_reduce(torch.ones(2 + rank))",
    ),
    "Rank {N} failed to pass monitoredBarrier": (
        2,
        "join()\nif rank == 0: dist.monitored_barrier(timeout=timedelta(seconds=1))",
    ),
    "Missing key(s) in state_dict": (
        1,
        "model = two(); model.module.load_state_dict(model.state_dict())",
    ),
    "Weights only load failed": (
        0,
        "torch.save(argparse.Namespace(), 'last.pt'); torch.load('last.pt', weights_only=True)",
    ),
    "DataLoader worker (pid(s) {N}) exited unexpectedly": (
        0,
        "list(DataLoader(Dies([1, 2]), num_workers=1))",
    ),
    "Expected more than 1 value per channel when training": (
        0,
        "nn.BatchNorm1d(4)(torch.ones(1, 4))",
    ),
}
# What must be launched, by all that is said then: the command, and the program for its last word.
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node"]
NODES = ["torchrun", "--nnodes", 2, "--rdzv-id", "x", "--rdzv-conf"]
HANDLER = ["env", "PYTHONFAULTHANDLER=1", *TORCHRUN, 2]
DETAIL = ["env", "TORCH_DISTRIBUTED_DEBUG=DETAIL", *TORCHRUN, 2]
EARLY = """
model = wrap(nn.Sequential(nn.Linear(4, 4), {}))
for i in range(6):
    if rank == 1 and i == 3:
        break
    step(model, lambda y: y)
dist.all_reduce(torch.zeros(2))
"""
KILLED = (
    "ChildFailedError",
    "Signal {N} (SIGKILL) received by PID",
    "exitcode: -9",
    "Sending process {N} closing signal SIGTERM",
)
LAUNCHES = {
    KILLED: ([*TORCHRUN, 2], "os.kill(os.getpid(), signal.SIGKILL) if rank else signal.pause()"),
    ("To enable traceback see",): ([*TORCHRUN, 1], "raise ValueError('no labels')"),
    ("traceback : Traceback (most recent call last)", "ValueError: no labels"): (
        [*TORCHRUN, 1],
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main(): raise ValueError('no labels')\nmain()",
    ),
    ("torchrun: command not found",): (["bash", "-c", "PATH=/; torchrun"], ""),
    ("ValueError: Cuda is not available.",): ([*TORCHRUN, "gpu"], ""),
    ("{N}/{N} clients joined",): ([*NODES, "timeout=3", "--master-port", 0], ""),
    ("RendezvousTimeoutError",): (
        [*NODES, "join_timeout=3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"],
        "",
    ),
    ("An attempt has been made to start a new process before",): (
        ["python"],
        "torch.multiprocessing.spawn(print)",
    ),
    # An early exit aborts at a named line, or hangs, by what comes next; DETAIL crashes.
    ("op.preamble.length <= op.nbytes", "Signal {N} (SIGABRT)", 'py", line {N} in <module>'): (
        HANDLER,
        EARLY.format("nn.ReLU()"),
    ),
    ("rank stalled",): (HANDLER, EARLY.format("nn.BatchNorm1d(4)")),
    ("Signal {N} (SIGSEGV) received by PID",): (DETAIL, EARLY.format("nn.ReLU()")),
}


def read_rows():
    """(symptom, line) of each row below `you see` or `where it hangs`, but for those of nccl."""
    text = re.sub(r"(?ms)^### Messages of nccl$.*?^## ", "## ", PAGE)
    tables = re.findall(
        r"^\| (?:you see|where it hangs) \|.*\n\| --- .*\n((?:\|.*\n)+)", text, re.M
    )
    return [(re.split(r" (?<!\\)\| ", line)[0][2:], line) for line in "".join(tables).splitlines()]


ROWS = read_rows()
MADE = [text for texts in MESSAGES.values() for text in texts] + [*MISTAKES, *sum(LAUNCHES, ())]


assert len(ROWS) > 80, "docs/troubleshooting.md has no tables any more"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:50])
def test_row_says_truly_how_we_know(row):
    """Its mark, which holds until the next one, is neither too weak nor too strong."""
    symptom, line = row
    mark = ""
    for new_mark, message in re.findall(r"(?:^|, )([●○?]?) ?\[?`([^`]+)`", symptom):
        mark = new_mark or mark
        made = any(hide_numbers(message) in hide_numbers(text) for text in MADE)
        assert made == (mark == ""), (message, mark)
    assert "○" not in symptom or "](" in line, "a link to the source"


def run_ranks(tmp_path, processes, lines):
    """Returns (statuses, stdout, stderr) of a program of these lines."""
    (tmp_path / "program.py").write_text(START + lines)
    return run_forked_ranks(tmp_path / "program.py", processes, tmp_path / "run")


@pytest.mark.parametrize("message", MISTAKES)
def test_mistake_says_its_message(tmp_path, message):
    codes, _, err = run_ranks(tmp_path, *MISTAKES[message])
    assert says(message, err), err
    assert any(codes) == (not message.startswith(FIND)), (codes, err)  # that one is a warning


# A rank is through before the other, and stays, or that one would see a closed connection.
STAY = """
store = dist.distributed_c10d._get_default_store()
store.set(f"{rank}", "")
try: store.wait([f"{1 - rank}"], timedelta(seconds=20))
except RuntimeError: pass
"""
EVALUATE = "model = wrap(nn.BatchNorm1d(4)); step(model, lambda y: y); model.eval()\n"
WAITS = {
    "one rank calls": ("join()\nif rank == 0: dist.all_reduce(torch.ones(1))", [1, 0]),
    "through DDP": (EVALUATE + "for _ in range(3 + rank): model(torch.ones(2, 4))", [0, 1]),
    "bare model": (EVALUATE + "for _ in range(3 + rank): model.module(torch.ones(2, 4))", [0, 0]),
}


@pytest.mark.parametrize("name", quick_for(WAITS, "one rank calls", "bare model"))
def test_rank_waits_for_a_call_that_the_other_does_not_make(tmp_path, name):
    lines, expected = WAITS[name]
    codes, _, err = run_ranks(tmp_path, 2, lines + STAY)
    assert codes == expected, err
    assert says("rank stalled", err, 10000) == (1 in expected), err


def test_result_of_a_collective_is_in_the_contiguous_copy(tmp_path):
    """Of a transposed tensor, which nccl refuses."""
    lines = "join(); t = (torch.ones(2, 3) * (1 - rank)).t(); copy = t.contiguous()\n"
    lines += "dist.broadcast(copy, 0); print(t.sum().item(), copy.sum().item())"
    codes, out, err = run_ranks(tmp_path, 2, lines)
    assert codes == [0, 0] and sorted(out.split()) == ["0.0", "6.0", "6.0", "6.0"], (out, err)


@pytest.mark.slow
@pytest.mark.parametrize("messages", LAUNCHES, ids=lambda messages: messages[0])
def test_launch_says_its_messages(launch, tmp_path, messages):
    command, lines = LAUNCHES[messages]
    (tmp_path / "program.py").write_text(START + lines)
    run = launch([[*command, tmp_path / "program.py"]]).wait()
    assert any(run.codes) and all(says(message, run.err) for message in messages), run.story()
