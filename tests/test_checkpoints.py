"""A checkpoint is whole or absent, resumes in any script, and runs nobody's code."""

import os
import pickle
import random
import re
import signal
import time

import pytest
import reference
import torch
from launch import REPO, end_forked, read_epochs, run_forked_ranks, start_forked
from messages import pattern
from tiny_data import write_mnist
from torchvision.datasets import MNIST

import snsc

TRAIN, BATCH = 101, 8


def parts():
    """A model, and an optimizer with momentum to save."""
    model = snsc.ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(2, 1, 28, 28)).sum().backward()
    optimizer.step()
    return model, optimizer


# Script and processes, 0 for a plain python. All DDP scripts save and load by the same functions.
CHAIN = (("mnmc_ddp_env.py", 2), ("snmc_dp.py", 0), ("snsc.py", 0), ("mnmc_ddp_env.py", 3))


def test_any_script_resumes_what_any_other_saved(tmp_path):
    """Each trains one epoch more, to the weights that one process with averaged gradients finds."""
    write_mnist(tmp_path, train=TRAIN)
    split, path = MNIST(tmp_path, train=True), tmp_path / "last.pt"
    torch.manual_seed(0)
    start = {"epoch": 0, "module": snsc.ConvNet(), "optimizer": None}
    for epochs, (script, processes) in enumerate(CHAIN, 1):
        options = ("--data-root", tmp_path, "-b", BATCH, "-e", epochs, "--checkpoint", path)
        folder = tmp_path / f"run {epochs}"
        codes, out, err = run_forked_ranks(REPO / script, processes, folder, options)
        assert not any(codes) and [line["epoch"] for line in read_epochs(out)] == [epochs], err
        saved = torch.load(path, weights_only=True)
        assert saved["epoch"] == epochs
        if processes:  # the plain scripts draw their order in another way
            images, labels = split.data.unsqueeze(1), split.targets
            expected, _, _ = reference.train(start, images, labels, processes, epochs, BATCH)
            torch.testing.assert_close(saved["model"], expected, rtol=1e-4, atol=1e-5)
        start = saved | {"module": snsc.ConvNet()}
        start["module"].load_state_dict(saved["model"])


def test_rank_0_decides_whether_all_resume(tmp_path):
    """Where rank 1 sees a checkpoint and rank 0 does not, as on nodes without a shared folder."""
    model, optimizer = parts()
    snsc.save_checkpoint(tmp_path / "1.pt", model, optimizer, 1)
    options = ["--init-method", f"file://{tmp_path}/meet", "--world-size", 2]
    options += ["--dataset", "synthetic", "-e", 1, "-b", 500]
    ranks = []
    for rank in range(2):
        own = ["--rank", rank, "--checkpoint", tmp_path / f"{rank}.pt"]
        path = REPO / "mnmc_ddp_tcp.py"
        ranks.append(start_forked(path, [*options, *own], tmp_path / f"run {rank}", {}))
    assert end_forked(ranks, 60) == [0, 0], (tmp_path / "run 1" / "err").read_text()
    assert "epoch 1/1" in (tmp_path / "run 0" / "out").read_text()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_killed_while_saving_leaves_a_whole_checkpoint(tmp_path):
    """SIGKILL at 20 random moments after its first save, of a process that does nothing else."""
    path = tmp_path / "last.pt"
    model, optimizer = parts()
    snsc.save_checkpoint(path, model, optimizer, 0)
    moments, epochs = random.Random(0), [0]
    started = time.monotonic()
    for _ in range(20):
        before = path.stat().st_mtime_ns
        child = os.fork()
        if child == 0:
            try:
                for epoch in range(epochs[-1] + 1, 10**9):
                    snsc.save_checkpoint(path, model, optimizer, epoch)
            finally:
                os._exit(1)  # An error must not go on as a second pytest.
        while path.stat().st_mtime_ns == before and time.monotonic() < started + 200:
            time.sleep(0.001)  # until it has saved for the first time
        time.sleep(moments.uniform(0, 0.04))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        epochs.append(snsc.load_checkpoint(path, model, optimizer))
    assert epochs == sorted(set(epochs))  # each child did save
    assert {file.name for file in tmp_path.iterdir()} <= {"last.pt", "last.pt.tmp"}


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ("a half", "code in torch's format", "code in pickle's format"))
def test_file_that_is_no_checkpoint_is_refused_by_its_name(tmp_path, kind):
    """No code in it runs, and the last line does not repeat torch's advice to allow that."""
    path, (model, optimizer) = tmp_path / "last.pt", parts()
    snsc.save_checkpoint(path, model, optimizer, 1)
    if kind == "a half":
        os.truncate(path, path.stat().st_size // 2)
    elif kind == "code in torch's format":
        torch.save(torch.load(path) | {"epoch": Payload(tmp_path / "ran")}, path)
    else:
        path.write_bytes(pickle.dumps(Payload(tmp_path / "ran"), protocol=2))
    with pytest.raises(RuntimeError, match=rf"last.pt {pattern('no checkpoint')}$"):
        snsc.load_checkpoint(path, model, optimizer)
    assert not (tmp_path / "ran").exists()


def test_checkpoint_of_a_gpu_is_read_without_one(tmp_path, monkeypatch):
    """Its tensors are marked as those of GPU 0."""
    path, (model, optimizer) = tmp_path / "last.pt", parts()
    with monkeypatch.context() as patch:
        patch.setattr("torch.serialization.location_tag", lambda _: "cuda:0")
        snsc.save_checkpoint(path, model, optimizer, 1)
    assert snsc.load_checkpoint(path, model, optimizer) == 1


def test_checkpoint_of_another_model_is_refused_and_kept(tmp_path):
    """By torch's own message, whose last line names what does not fit."""
    path, (model, optimizer) = tmp_path / "last.pt", parts()
    snsc.save_checkpoint(path, torch.nn.Linear(2, 2), optimizer, 1)
    foreign = path.read_bytes()
    with pytest.raises(RuntimeError) as error:
        snsc.load_checkpoint(path, model, optimizer)
    last_line = str(error.value).splitlines()[-1]
    assert re.search(f'{pattern("other model")}: "weight", "bias"', last_line)
    assert path.read_bytes() == foreign
