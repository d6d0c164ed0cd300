"""DDP written by hand trains to the weights of DDP."""

import os
import re
import shutil

import pytest
import torch
import update_pages
from forked import end, start
from launch import REPO, free_port, page_commands
from tiny_data import accept_any_cifar10, write_cifar10

PAGE = (REPO / "docs" / "by_hand.md").read_text()
PATCHES = [b for b in update_pages.read_blocks(PAGE) if b.mark.startswith("patch ")]
VERSIONS = ["version 1", "version 2", "version 3"]
SHORT = ("--batch-size", "250")  # twenty steps in two processes


def script_of(version, folder, limit=None):
    """The script with a version's patch, and with other initial weights on rank 1 than on rank 0.

    A bucket limit in bytes makes several buckets.
    """
    if version == "DDP":
        return REPO / "mnmc_ddp_env.py"
    (patch,) = (block for block in PATCHES if block.heading.lower().startswith(version))
    folder.mkdir()
    script = update_pages.patched(patch, folder)
    text = script.read_text()
    assert "torch.manual_seed(args.seed)" in text and text.count("2**20") in (0, 2)
    text = text.replace("torch.manual_seed(args.seed)", "torch.manual_seed(args.seed + rank)")
    script.write_text(text.replace("2**20", str(limit or 2**20)))
    return script


def train(script, processes, folder, *options):
    """Trains for an epoch in forked processes; returns the checkpoint's tensors by name."""
    words = ["--dataset", "synthetic", "--epochs", "1", *options]
    words += ["--checkpoint", folder / "last.pt"]
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port())}
    started = []
    for rank in range(processes):
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(start(script, words, folder / str(rank), environment))
    codes = end(started, 200)
    said = [(folder / str(rank) / "err").read_text() for rank in range(processes)]
    assert codes == [0] * processes, said
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
    script = script_of(version, tmp_path / "script", limit=1000 if version == "version 3" else None)
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
    for version in ("DDP", "version 3"):
        script, path = script_of(version, tmp_path / version), tmp_path / f"{version}.pt"
        words = ["torchrun", "--standalone", "--nproc-per-node", 2, script, *options]
        launch([[*words, "--checkpoint", path]], env=settings).succeeded()
        found.append(tensors(path))
    for name, tensor in found[0].items():
        assert torch.equal(found[1][name], tensor), name


def test_page_counts_added_lines():
    rows = dict(re.findall(r"^\| \[(\d)\]\S+ \| (\d+) \|", PAGE, re.MULTILINE))
    added = [len(re.findall(r"^\+(?!\+\+)", patch.code, re.MULTILINE)) for patch in PATCHES]
    assert [int(rows[str(number)]) for number in (1, 2, 3)] == added


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
    assert [row[3] for row in rows] == [patch.heading for patch in PATCHES] + ["DDP"], run.story()
    if number == 1:  # 45 MB of gradients in each direction take 3.6 s on 100 Mb/s.
        assert all(float(row[1]) > 3000 for row in rows), run.story()
