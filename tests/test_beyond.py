"""ZeRO-1 and FSDP2 train as DDP does, with less memory, and share its checkpoints."""

import os
import re
import shutil
import signal

import pytest
import torch
import update_pages
from launch import REPO, page_commands
from test_by_hand import train
from tiny_data import accept_any_cifar10, write_cifar10

PAGE = (REPO / "docs" / "beyond_ddp.md").read_text()
PATCHES = [b for b in update_pages.read_blocks(PAGE) if b.mark.startswith("patch ")]
PATCHED = ["ZeRO-1", "FSDP2"]


def script_of(name, folder):
    """The script with a patch of the page, or the script of DDP to compare with.

    FSDP2 cannot have channels_last, which changes the rounding, so its DDP has none, either.
    """
    folder.mkdir(exist_ok=True)
    if name in PATCHED:
        (patch,) = (block for block in PATCHES if block.heading.startswith(name))
        return update_pages.patched(patch, folder)
    path, text = folder / "ddp.py", (REPO / "mnmc_ddp_env.py").read_text()
    assert text.count(", memory_format=torch.channels_last") == 1
    if name == "DDP for FSDP2":
        text = text.replace(", memory_format=torch.channels_last", "")
    path.write_text(text)
    return path


def assert_same(found, expected, **tolerance):
    """Compares two checkpoints in all that they hold; without a tolerance to the bit."""
    found, expected = (torch.load(path, weights_only=True) for path in (found, expected))
    assert found["epoch"] == expected["epoch"]
    groups = zip(
        found["optimizer"]["param_groups"], expected["optimizer"]["param_groups"], strict=True
    )
    assert all(one == other for one, other in groups)
    for part in (lambda c: c["model"], lambda c: c["optimizer"]["state"]):
        assert list(part(found)) == list(part(expected))
        torch.testing.assert_close(
            dict(part(found)), dict(part(expected)), **tolerance or {"rtol": 0, "atol": 0}
        )


@pytest.mark.parametrize("name", PATCHED)
def test_two_ranks_reach_the_checkpoint_of_ddp_to_the_bit(tmp_path, name):
    for version in (f"DDP for {name}", name):
        train(script_of(version, tmp_path / "scripts"), 2, tmp_path / version, "-b", "1000")
    assert_same(tmp_path / name / "last.pt", tmp_path / f"DDP for {name}" / "last.pt")


def test_page_counts_lines():
    rows = re.findall(r"^\| \[(\S+)\]\S+ \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == PATCHED
    for row, patch in zip(rows, PATCHES, strict=True):
        counts = [len(re.findall(mark, patch.code, re.M)) for mark in (r"^\+(?!\+\+)", r"^-(?!--)")]
        assert [int(number) for number in row[1:]] == counts


@pytest.fixture
def resnet(launch, tmp_path):
    """Starts a script on CIFAR-10 in small; two test images leave ranks 2 and 3 without one."""
    write_cifar10(tmp_path / "data", test=2)
    settings = accept_any_cifar10(tmp_path / "site")

    def start(script, processes, *options):
        words = ["--dataset", "cifar10", "--data-root", tmp_path / "data", "-b", "10", *options]
        torchrun = ["torchrun", "--standalone", "--nproc-per-node", processes]
        return launch([[*torchrun, script, *words]], env=settings)

    return start


@pytest.mark.slow
def test_four_ranks_train_resnet_18_as_ddp_does(resnet, tmp_path):
    """At a low rate, which keeps rounding errors small."""
    runs = []
    for name in ("DDP for FSDP2", "FSDP2"):
        options = ("--lr", "0.0001", "-e", "1", "--checkpoint", tmp_path / f"{name}.pt")
        runs.append(resnet(script_of(name, tmp_path / "scripts"), 4, *options).succeeded())
    assert "Warning" not in runs[1].err and runs[1].own_err() == "", runs[1].story()
    loss = [run.epochs()[0]["loss"] for run in runs]
    assert loss[0] == pytest.approx(loss[1], abs=1e-3)
    assert runs[1].epochs()[0]["count"] == 2
    assert_same(tmp_path / "FSDP2.pt", tmp_path / "DDP for FSDP2.pt", rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_mixed_precision_by_policy_needs_batchnorm_apart(resnet, tmp_path):
    """With the policy's group for BatchNorm, --amp trains; without it torch refuses."""
    script = script_of("FSDP2", tmp_path / "scripts")
    run = resnet(script, 2, "-e", "1", "--amp").succeeded()
    assert 1.5 < run.epochs()[0]["loss"] < 3, run.story()
    text = script.read_text()
    assert text.count("    fully_shard(norms, mesh=mesh)\n") == 1
    script.write_text(text.replace("    fully_shard(norms, mesh=mesh)\n", ""))
    run = resnet(script, 2, "-e", "1", "--amp").wait()
    assert run.codes != [0] and re.search("dtype|scalar type|BFloat16", run.err), run.story()


@pytest.mark.slow
@pytest.mark.parametrize("name", PATCHED)
def test_killed_and_resumed_from_a_checkpoint_of_snsc(launch, tmp_path, name):
    """snsc.py, then the patch, killed after an epoch and resumed, reach what DDP reaches."""
    start, options = tmp_path / "snsc.pt", ("--dataset", "synthetic", "-b", "500", "-e")
    launch("snsc.py", 1, *options, 1, "--checkpoint", start).succeeded()
    paths = {}
    for version in (f"DDP for {name}", name):
        paths[version] = shutil.copy(start, tmp_path / f"{version}.pt")
        words = ["torchrun", "--standalone", "--nproc-per-node", 2]
        words += [script_of(version, tmp_path / "scripts"), *options, 3]
        words += ["--checkpoint", paths[version]]
        run = launch([words])
        if version == name:
            run.wait_for(lambda run=run: "epoch 2/3" in run.out, 60, "the second epoch")
            os.kill(run.pid_of(1), signal.SIGKILL)
            assert run.wait().codes != [0], run.story()
            assert torch.load(paths[name], weights_only=True)["epoch"] == 2
            run = launch([words])
            run.wait()
            assert "resumed" in run.out and "epoch 3/3" in run.out, run.story()
        run.succeeded()
    assert_same(paths[name], paths[f"DDP for {name}"])
    back = launch("snsc.py", 1, *options, 4, "--checkpoint", paths[name]).succeeded()
    assert "after epoch 3/4" in back.out and len(back.epochs()) == 1, back.story()


@pytest.mark.slow
@pytest.mark.parametrize("number", (0, 1))
def test_memory_is_what_the_formula_says(launch, number):
    """The page's two commands in small: on one host, and across the slow cable."""
    command = page_commands("docs/beyond_ddp.md", "What it saves, and what it costs")[number]
    if "two_hosts.sh" in command and (os.getuid() != 0 or not shutil.which("tc")):
        pytest.skip("needs root and iproute2")
    small = f"{command} --steps 1 --repeats 1 --batch-size 2"
    run = launch([["bash", "-c", small]]).succeeded(240)
    numbers = r"([\d.]+)[ |]+"
    rows = re.findall(rf"^ *{numbers * 9}(\S+)", run.out, re.MULTILINE)
    assert [row[9].rstrip(":") for row in rows] == [*PATCHED, "DDP"], run.story()
    for row in rows:
        weights, gradients, state, total, formula, *_, sent = map(float, row[:9])
        assert total == pytest.approx(weights + gradients + state, abs=0.2)
        assert total == pytest.approx(formula, rel=0.05), run.story()
        assert sent > 40, run.story()  # 45 MB of weights, at least once
