"""Symptoms that the scripts themselves never show, each made here."""

import shutil
import subprocess
import sys

import messages
import pytest
import torch
from forked import run_forked_ranks
from launch import REPO, free_port
from messages import MESSAGES, says
from torch.utils.data import DistributedSampler

PROGRAM = """
import contextlib
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.BatchNorm1d(4))
    model(torch.ones(2, 4)).sum().backward()
    model.eval()
    {part}
    print(f"rank {{rank}} is through", flush=True)
    # Stays while the other waits, or that one would see a closed connection.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"through {{rank}}", "")
    with contextlib.suppress(RuntimeError):
        store.wait([f"through {{1 - rank}}"], timedelta(seconds=20))
        # Rank 0 has the store, so it leaves last.
        if rank == 1:
            store.set("rank 1 leaves", "")
        else:
            store.wait(["rank 1 leaves"], timedelta(seconds=20))

main()
"""
UNEQUAL_EVALUATION = "for _ in range(3 + rank): {model}(torch.ones(2, 4))"


def run_two(tmp_path, part):
    """Two ranks of PROGRAM; returns their statuses, what they print and what they complain of."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(part=part))
    return run_forked_ranks(path, 2, free_port(), tmp_path / "run")


@pytest.mark.parametrize("model", ("model", "model.module"))
def test_hang_in_evaluation(tmp_path, model):
    """Through DDP rank 1 waits for a batch that rank 0 does not have; through model.module not."""
    codes, out, err = run_two(tmp_path, UNEQUAL_EVALUATION.format(model=model))
    if model == "model.module":
        assert codes == [0, 0] and err == ""
    else:
        assert codes[1] == 1 and "rank 1 is through" not in out
        assert "in forward" in err
        assert says("rank stalled", err, 10000)


def test_hang_at_the_end(tmp_path):
    """Rank 0 alone calls a collective."""
    codes, out, err = run_two(tmp_path, "if rank == 0: dist.all_reduce(torch.ones(1))")
    assert codes == [1, 0] and out == "rank 1 is through\n"
    assert says("rank stalled", err, 10000) and "in all_reduce" in err


# Mistakes in a few lines: how many ranks make them, with 0 a plain python, and the lines. The
# model has two layers, of which the first alone is used where a step says so.
START = """
import argparse
import os
import signal
import socket
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, both=True):
        return self.second(self.first(x)) if both else self.first(x)

def step(model, **options):
    model(torch.ones(2, 4), **options).sum().backward()

"""
JOIN = "dist.init_process_group('gloo')\n"
WRAP = JOIN + "model = DistributedDataParallel(Layers(), {})\n"
RANK = JOIN + "rank = dist.get_rank()\n"
MISTAKES = {
    "RANK is not set": (0, JOIN),
    "no process group": (0, "DistributedSampler(range(4))"),
    "two process groups": (1, JOIN + JOIN),
    "two servers": (0, "servers = [socket.create_server(('', 18889)) for _ in range(2)]"),
    "unused parameter": (1, WRAP.format("") + "for _ in range(2): step(model, both=False)"),
    "no unused parameter": (1, WRAP.format("find_unused_parameters=True") + "step(model)"),
    "another graph": (
        1,
        WRAP.format("static_graph=True") + "step(model, both=False); step(model); step(model)",
    ),
    "models differ": (
        2,
        RANK + "DistributedDataParallel(Layers() if rank else nn.Linear(4, 4))",
    ),
    "shapes differ": (2, RANK + "DistributedDataParallel(nn.Linear(4, 5 if rank else 4))"),
    "attribute of the model": (1, WRAP.format("") + "model.first"),
    "device_ids on a CPU": (1, WRAP.format("device_ids=[0]")),
    "more than tensors": (
        0,
        "torch.save({'args': argparse.Namespace()}, 'last.pt')\n"
        "torch.load('last.pt', weights_only=True)",
    ),
    "worker died": (
        0,
        """
class Dies(list):
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)

list(DataLoader(Dies([1, 2]), num_workers=1))
""",
    ),
    "a single image": (0, "nn.BatchNorm1d(4)(torch.ones(1, 4))"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_says_its_message(tmp_path, name):
    processes, lines = MISTAKES[name]
    (tmp_path / "program.py").write_text(START + lines)
    codes, _, err = run_forked_ranks(
        tmp_path / "program.py", processes, free_port(), tmp_path / "run"
    )
    assert says(name, err), err
    assert (0 in codes) == (name == "no unused parameter"), (codes, err)  # that one is a warning


KILLED = (
    "no traceback",
    "process was killed",
    "exit code of a killed process",
    "process is ended",
)


def test_torchrun_says_who_was_killed_and_whom_it_ended(launch, tmp_path):
    """Rank 1 is killed, and rank 0 waits for ever."""
    (tmp_path / "program.py").write_text(
        "import os, signal\n"
        "os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else signal.pause()\n"
    )
    run = launch([["torchrun", "--nproc-per-node", 2, tmp_path / "program.py"]]).wait()
    assert run.codes == [1]
    for name in KILLED:
        assert says(name, run.err), run.story()


@pytest.mark.slow
def test_torchrun_says_that_a_node_is_missing(launch):
    """In the words of the rendezvous that was asked for."""
    torchrun, port = ["torchrun", "--nnodes", 2, "--rdzv-id", "x"], free_port()
    static = ["--rdzv-conf", "timeout=3", "--master-addr", "127.0.0.1", "--master-port", port]
    c10d = ["--rdzv-conf", "join_timeout=3", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    for name, options in (
        ("node is missing", static),
        ("node is missing with c10d", [*c10d, f"127.0.0.1:{free_port()}"]),
    ):
        run = launch([[*torchrun, *options, "mnmc_ddp_env.py"]]).wait()
        assert run.codes == [1] and says(name, run.err), run.story()


@pytest.mark.slow
def test_spawn_without_main(launch, tmp_path):
    (tmp_path / "program.py").write_text(
        "import torch.multiprocessing as mp\n\ndef worker(rank):\n    pass\n\nmp.spawn(worker)\n"
    )
    run = launch([["python", tmp_path / "program.py"]]).wait()
    assert run.codes == [1] and says("spawn without main", run.err), run.story()


def test_torchrun_says_how_to_get_the_traceback(launch, tmp_path):
    (tmp_path / "program.py").write_text("raise ValueError\n")
    run = launch([["torchrun", "--nproc-per-node", 1, tmp_path / "program.py"]]).wait()
    assert run.codes == [1] and says("how to get the traceback", run.err), run.story()


def test_every_epoch_has_the_same_order_without_set_epoch():
    sampler = DistributedSampler(range(100), 2, 0)
    assert list(sampler) == list(sampler)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_torchrun_is_not_found_but_its_module_is(tmp_path):
    command = [shutil.which("bash"), "-c", "torchrun --help"]
    run = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert says("torchrun is not found", run.stderr)
    command = [sys.executable, "-m", "torch.distributed.run", "--help"]
    assert "--nproc-per-node" in subprocess.check_output(command, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to find")
def test_torchrun_for_gpus_without_one(launch):
    run = launch([["torchrun", "--nproc-per-node", "gpu", "mnmc_ddp_env.py"]]).wait()
    assert run.codes == [1] and says("torchrun finds no GPU", run.err)


@pytest.mark.parametrize(
    ("current", "text"), [((2, 14), "an accelerator"), ((2, 15), "a device with a valid")]
)
def test_messages_are_those_of_the_version(monkeypatch, current, text):
    """2.14 still says what 2.8 said, although 14 is more than 8 and less than 15."""
    monkeypatch.setattr(messages, "CURRENT", current)
    assert text in messages.pattern("nccl without a GPU").replace("\\", "")


@pytest.mark.parametrize("nccl", ("legacy", "nccl2"))
def test_messages_are_those_of_the_nccl_that_is_named(monkeypatch, nccl):
    message = messages.Message((), by_version={"legacy": ("old words",), "nccl2": ("new words",)})
    monkeypatch.setitem(MESSAGES, "either", message)
    assert says("either", "new words", nccl=nccl) == (nccl == "nccl2")
    with pytest.raises(AssertionError):
        says("either", "new words")


@pytest.mark.parametrize("name", MESSAGES)
def test_tests_look_for_the_message_that_they_are_said_to_show(name):
    """By its name in messages.py, in what a process has printed."""
    for file in MESSAGES[name].shown_by:
        text = (REPO / "tests" / file).read_text()
        assert f'"{name}"' in text or f"'{name}'" in text, (name, file)
