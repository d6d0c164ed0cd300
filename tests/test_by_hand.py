"""DDP written by hand trains to the weights of DDP."""

import os
import queue
import re
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import patches
import pytest
import test_labs
import torch
from forked import end, run_forked_ranks, start
from launch import REPO, Launch, free_port, page_commands
from tiny_data import accept_any_cifar10, write_cifar10

PAGE = (REPO / "docs" / "by_hand.md").read_text()
sys.path.insert(0, str(REPO / "docs" / "examples"))
import ring_all_reduce  # noqa: E402

VERSIONS = ["by_hand_1_after_backward", "by_hand_2_during_backward", "by_hand_3_buckets"]
SHORT = ("--batch-size", "250")  # twenty steps in two processes


def script_of(version, folder, limit=None):
    """The script with a version's patch, and with other initial weights on rank 1 than on rank 0.

    A bucket limit in bytes makes several buckets.
    """
    if version == "DDP":
        return REPO / "mnmc_ddp_env.py"
    folder.mkdir()
    script = patches.write_patched([version], folder)
    text = script.read_text()
    assert "torch.manual_seed(args.seed)" in text and text.count("2**20") in (0, 2)
    text = text.replace("torch.manual_seed(args.seed)", "torch.manual_seed(args.seed + rank)")
    script.write_text(text.replace("2**20", str(limit or 2**20)))
    return script


def train(script, processes, folder, *options):
    """Trains for an epoch in forked processes; returns the checkpoint's tensors by name."""
    arguments = ["--dataset", "synthetic", "--epochs", "1", *options]
    arguments += ["--checkpoint", folder / "last.pt"]
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port())}
    started = []
    for rank in range(processes):
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(start(script, arguments, folder / str(rank), environment))
    codes = end(started, 200)
    stderr = [(folder / str(rank) / "err").read_text() for rank in range(processes)]
    assert codes == [0] * processes, stderr
    return tensors(folder / "last.pt")


def tensors(path):
    """Weights, buffers and momentum of a checkpoint, by name."""
    state = torch.load(path, weights_only=True)
    momentum = state["optimizer"]["state"]
    return state["model"] | {str(n): row["momentum_buffer"] for n, row in momentum.items()}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """What DDP has trained with two processes."""
    return train(script_of("DDP", None), 2, tmp_path_factory.mktemp("ddp"), *SHORT)


@pytest.mark.parametrize("version", VERSIONS)
def test_two_ranks_reach_the_weights_of_ddp_to_the_bit(tmp_path, ddp, version):
    """The limit gives version 3 a bucket of its own for each large parameter of the ConvNet."""
    script = script_of(version, tmp_path / "script", limit=1000 if "buckets" in version else None)
    found = train(script, 2, tmp_path / "run", *SHORT)
    assert found.keys() == ddp.keys()
    for name, tensor in ddp.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
def test_three_ranks_reach_the_weights_of_ddp_to_rounding(tmp_path):
    """After four steps at a low rate. Without averaging the weights are 0.01 apart."""
    few_steps = ("--batch-size", "1000", "--lr", "0.001")
    expected = train(script_of("DDP", None), 3, tmp_path / "ddp", *few_steps)
    for version in VERSIONS:
        script = script_of(version, tmp_path / version)
        found = train(script, 3, tmp_path / f"{version} run", *few_steps)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_resnet_18_with_the_buckets_of_the_page(launch, tmp_path):
    """To the bit, too: CIFAR-10 in small, 40 images for each of two ranks."""
    write_cifar10(tmp_path / "data")
    options = ("--dataset", "cifar10", "--data-root", tmp_path / "data", "-e", "2", "-b", "10")
    settings = accept_any_cifar10(tmp_path / "site")
    found = []
    for version in ("DDP", "by_hand_3_buckets"):
        script, path = script_of(version, tmp_path / version), tmp_path / f"{version}.pt"
        command = ["torchrun", "--standalone", "--nproc-per-node", 2, script, *options]
        launch([[*command, "--checkpoint", path]], env=settings).succeeded()
        found.append(tensors(path))
    for name, tensor in found[0].items():
        assert torch.equal(found[1][name], tensor), name


def count_added(name):
    """How many lines a patch adds."""
    return len(re.findall(r"^\+(?!\+\+)", patches.read_patch(name).diff, re.MULTILINE))


def test_page_counts_added_lines():
    rows = dict(re.findall(r"^\| \[(\d)\]\S+ \| (\d+) \|", PAGE, re.MULTILINE))
    assert [int(rows[number]) for number in "123"] == [count_added(name) for name in VERSIONS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "heading",
    (
        "Version 1: all_reduce after backward",
        "Version 2: all_reduce during backward",
        "Version 3: buckets",
    ),
)
def test_commands_of_the_page(tmp_path, heading):
    commands = test_labs.start(tmp_path, heading, "docs/by_hand.md")
    with Launch(commands, tmp_path / "output", cwd=tmp_path) as run:
        assert [line["count"] for line in run.succeeded().epochs()] == [2000], run.story()


# Each rank fills its buffer with its number, and looks at it after a forward.
FORWARDS = """
import contextlib
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel

def train(rank):
    model = torch.nn.Linear(2, 1)
    model.register_buffer("number", torch.zeros(1))
    ddp_model = DistributedDataParallel(model)
    modes = ["grad", "grad", "no_grad", "grad", "grad", "no_sync", "grad", "grad"]
    contexts = {"no_grad": torch.no_grad, "no_sync": ddp_model.no_sync}
    for mode in modes:
        model.number.fill_(rank)
        with contexts.get(mode, contextlib.nullcontext)():
            loss = ddp_model(torch.ones(1, 2)).sum()
            if mode != "no_grad":
                loss.backward()
        if rank == 1:
            print("not copied" if model.number.item() else "copied")

dist.init_process_group("gloo")
train(dist.get_rank())
dist.destroy_process_group()
"""


def test_forward_copies_buffers_unless_the_one_before_was_under_no_grad_or_no_sync(tmp_path):
    """As docs/concepts.md says. The modes are grad grad no_grad grad grad no_sync grad grad."""
    (tmp_path / "forwards.py").write_text(FORWARDS)
    codes, out, err = run_forked_ranks(tmp_path / "forwards.py", 2, free_port(), tmp_path / "run")
    assert codes == [0, 0], err
    copied = [True, True, True, False, True, True, False, True]
    assert out.splitlines() == ["copied" if yes else "not copied" for yes in copied]


class SerialNetwork:
    """Some calls of torch.distributed, between threads in place of ranks.

    As with nccl, a call outside of a batch ends before the rank's next call begins. A send ends
    when it has been received.
    """

    def __init__(self, world_size):
        self.world_size, self.thread = world_size, threading.local()
        ranks = range(world_size)
        self.wires = {(a, b): (queue.Queue(), queue.Queue()) for a in ranks for b in ranks}

    def get_rank(self):
        return self.thread.rank

    def get_world_size(self):
        return self.world_size

    def put(self, tensor, peer):
        self.wires[self.get_rank(), peer][0].put(tensor.clone())

    def wait_until_received(self, peer):
        self.wires[self.get_rank(), peer][1].get(timeout=2)

    def isend(self, tensor, dst):
        self.put(tensor, dst)
        self.wait_until_received(dst)
        return mock.Mock()

    def irecv(self, tensor, src):
        data, received = self.wires[src, self.get_rank()]
        tensor.copy_(data.get(timeout=2))
        received.put(None)
        return mock.Mock()

    def P2POp(self, call, tensor, peer):
        return call, tensor, peer

    def batch_isend_irecv(self, calls):
        sends = [row for row in calls if row[0] == self.isend]
        for _, tensor, peer in sends:
            self.put(tensor, peer)
        requests = [call(tensor, peer) for call, tensor, peer in calls if call == self.irecv]
        for _, _, peer in sends:
            self.wait_until_received(peer)
        return requests

    def run(self, function, tensors):
        """Calls function on each rank with its tensor."""

        def run_rank(rank):
            self.thread.rank = rank
            function(tensors[rank])

        with ThreadPoolExecutor(self.world_size) as pool:
            list(pool.map(run_rank, range(self.world_size)))


def test_ring_needs_no_call_to_begin_before_another_has_ended(monkeypatch):
    """The waiting of a send for its receiver would be a hang with nccl."""
    network = SerialNetwork(3)
    monkeypatch.setattr(ring_all_reduce, "dist", network)
    tensors = [torch.arange(7.0) * 10**rank for rank in range(3)]
    expected = sum(tensors)
    network.run(ring_all_reduce.ring_all_reduce, tensors)
    assert all(torch.equal(tensor, expected) for tensor in tensors)


def test_unbatched_calls_would_hang_there():
    """Each rank sends first, and none comes to receive."""
    network = SerialNetwork(3)

    def send_then_receive(tensor):
        network.isend(tensor, (network.get_rank() + 1) % 3)
        network.irecv(tensor, (network.get_rank() - 1) % 3)

    with pytest.raises(queue.Empty):
        network.run(send_then_receive, [torch.ones(1)] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("number", (0, 1))
def test_steps_are_timed(launch, name, number):
    """The page's two commands in small: on one host, and across the slow cable."""
    command = page_commands("docs/by_hand.md", "How fast is it?")[number]
    if "two_hosts.sh" in command and (os.getuid() != 0 or not shutil.which("tc")):
        pytest.skip("needs root and iproute2")
    small = f"{command} --steps 2 --repeats 1 --batch-size 2"
    run = launch([["bash", "-c", small]], env={"HOSTS": name}).succeeded(240)
    rows = re.findall(r"^ +([\d.]+) +([\d.]+) +([\d.]+) (.+)$", run.out, re.MULTILINE)
    names = [f"version {number}" for number in (1, 2, 3)] + ["DDP"]
    assert [row[3] for row in rows] == names, run.story()
    if number == 1:  # 45 MB of gradients in each direction take 3.6 s on 100 Mb/s.
        assert all(float(row[1]) > 3000 for row in rows), run.story()
