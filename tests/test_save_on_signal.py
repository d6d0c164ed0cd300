"""docs/patches/save_on_signal.diff: saves in mid-epoch, and resumes as if nothing had happened."""

import os
import re
import shutil
import signal

import patches
import pytest
import torch
from launch import REPO, Launch, assert_same
from slurm import BatchJob

pytestmark = pytest.mark.slow
SAVED = re.compile(r"^saved (after epoch (\d)/2 and (\d+) images)$", re.MULTILINE)


def start(folder, checkpoint, processes=2, *options):
    """Trains by torchrun, with the synthetic images augmented as those of CIFAR-10 are."""
    script = patches.write_patched(["save_on_signal"], folder)
    text, condition = script.read_text(), 'if args.dataset == "cifar10":\n            images'
    assert condition in text
    script.write_text(text.replace(condition, condition.replace("cifar10", "synthetic")))
    argv = ["torchrun", "--standalone", "--nproc-per-node", processes, script, "-e", "2", *options]
    return Launch([[*argv, "--dataset", "synthetic", "--checkpoint", checkpoint]], folder / "out")


def test_signal_to_one_rank_stops_all_after_the_same_step(tmp_path):
    """A resumed run, with augmented images, ends as a whole run does, to the bit.

    Another number of processes goes on as well, with the images that are left.
    """
    whole, cut, alone = (tmp_path / name for name in ("whole.pt", "cut.pt", "alone.pt"))
    with start(tmp_path, whole) as run:
        expected = run.succeeded(250).epochs()
        assert len(expected) == 2, run.story()
    with start(tmp_path, cut) as run:
        run.wait_for(lambda: cut.exists(), 90, "the first epoch")
        os.kill(run.pid_of(1), signal.SIGUSR1)
        run.succeeded(250)
        after, *where = SAVED.search(run.out).groups()
        saved = torch.load(cut, weights_only=True)
        assert [saved["epoch"], saved["done"]] == [int(n) for n in where], run.story()
    shutil.copy(cut, alone)
    for path, processes in ((cut, 2), (alone, 1)):
        with start(tmp_path, path, processes, "-b", str(128 // processes)) as run:
            out = run.succeeded(250).out
            assert f"resumed {path} {after}\n" in out, run.story()
            last = run.epochs()[-1]
            assert abs(last["test"] - expected[-1]["test"]) < (0.01 if processes == 2 else 1)
    assert_same(cut, whole)


LOADS = """
import os, signal
from torch.utils.data import DataLoader
signals = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: signals.append(number))
# The worker's data are the process ids of itself.
class Pids(list):
    def __getitem__(self, index):
        return os.getpid()
loader = DataLoader(
    Pids(range(100)), num_workers=1, worker_init_fn=lambda _: INIT, persistent_workers=True,
    multiprocessing_context="fork",
)
for step, pid in enumerate(loader):
    if step == 0:
        os.kill(pid, signal.SIGUSR1)
        os.killpg(0, signal.SIGTERM)
print("saved", signals)
"""


def test_worker_survives_a_signal_to_its_rank_and_ends_with_it(launch, tmp_path):
    """With what the page calls in worker_init_fn. Without it the worker dies with the signal; one
    that ignores SIGTERM would keep its rank from ending.
    """
    page = (REPO / "docs" / "checkpoints.md").read_text()
    (call,) = re.findall(r"call `(.*)` in\s+`worker_init_fn`", page)
    (tmp_path / "loads.py").write_text(LOADS.replace("INIT", call))
    run = launch([["python", tmp_path / "loads.py"]]).succeeded(30)
    assert run.out == "saved [15]\n", run.story()


def write_requeue(folder):
    """Writes the function that the page gives for a SETUP file."""
    page = (REPO / "docs" / "slurm.md").read_text()
    setup = folder / "requeue.sh"
    setup.write_text(re.search(r">requeue.sh <<'END'\n(.*?)END\n", page, re.DOTALL)[1])
    return setup


def test_run_that_could_not_save_is_not_requeued(cluster, tmp_path):
    """Otherwise it would begin again for ever."""
    script = "import time\nprint('training', flush=True)\ntime.sleep(1000)"
    env = {"SETUP": str(write_requeue(tmp_path))}
    job = BatchJob(cluster, tmp_path / "repository", env=env, script=script)
    job.wait_for(lambda: "training" in job.out, 60, "the tasks")
    job.signal()
    assert job.end() == "FAILED", job.story()


def test_requeued_job_resumes_in_mid_epoch(cluster, tmp_path):
    """On a real Slurm, with the lines that the page gives for a SETUP file.

    After the batch file's signal, which is USR1, and after that of `scontrol requeue`, SIGTERM.
    That it then ends as an undisturbed run is shown above.
    """
    setup = write_requeue(tmp_path)
    script = patches.write_patched(["save_on_signal"], tmp_path)
    job_options = {"before": ("--nodes", "1"), "env": {"SETUP": str(setup), "SCRIPT": str(script)}}
    options = ("--dataset", "synthetic", "-e", "2", "-b", "16")
    for way in ("signal", "requeue"):
        with BatchJob(cluster, tmp_path / way, *options, **job_options) as job:
            job.wait_for(job.epochs, 120, "the first epoch")
            if way == "requeue":
                cluster.ask("scontrol", "requeue", job.number)
            else:
                job.signal()
            job.start_again()
            job.succeeded(240)
            assert f"{SAVED.search(job.out)[1]}\n" in job.out.partition("resumed ")[2], job.out
            assert [line["epoch"] for line in job.epochs()] == [1, 2], job.out
