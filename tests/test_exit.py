"""A process leaves without a thread of gloo's, and so without the abort that they can cause."""

import re

import pytest
from launch import DDP, REPO, commands_for, free_port, quick_for, run_forked_ranks

# Runs a script's main() and counts, before it leaves and after, the threads that are not Python's
# own. OMP_NUM_THREADS is 1, so that they are gloo's.
COUNT = """
import os, sys, threading
sys.path.insert(0, {folder!r})
import {script} as script

def count():
    number = len(os.listdir("/proc/self/task")) - threading.active_count()
    print(number, "of gloo\\n", end="", flush=True)

before = script.dist.destroy_process_group
def destroy_and_count():
    count()
    before()
    count()
script.dist.destroy_process_group = destroy_and_count
if __name__ == "__main__":
    script.main()
"""
# The scripts import torchvision, which imports torch.distributed.nn on its way. This does not.
ALONE = """
import torch
import torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.ones(2, 4)).sum().backward()
    del model
    dist.destroy_process_group()
"""


def count_threads(out):
    """The numbers of threads that the ranks had after they left, and before."""
    counts = sorted(map(int, re.findall(r"^(\d+) of gloo", out, re.MULTILINE)))
    return counts[: len(counts) // 2], counts[len(counts) // 2 :]


# Two of the scripts: main() and train() are the same in all but mnmc_ddp_mp.py, whose processes
# are spawned.
@pytest.mark.parametrize("script", quick_for(DDP[1:3], "mnmc_ddp_env.py"))
def test_no_thread_of_gloo_is_left(launch, tmp_path, script):
    (tmp_path / "count.py").write_text(COUNT.format(folder=str(REPO), script=script[:-3]))
    options = ("--dataset", "synthetic", "-e", "1", "-b", "500")
    if script == "mnmc_ddp_env.py":
        path, folder = tmp_path / "count.py", tmp_path / "run"
        codes, out, err = run_forked_ranks(path, 2, free_port(), folder, arguments=options)
        assert codes == [0, 0], err
    else:
        (command,) = commands_for(script, 2, *options)
        command[command.index(REPO / script)] = tmp_path / "count.py"
        out = launch([command]).succeeded().out
    after, before = count_threads(out)
    missing = "Does torchvision still import torch.distributed.nn? If not, the scripts must."
    assert after == [0, 0] and len(before) == 2 and min(before) > 0, missing


@pytest.mark.slow
def test_without_the_early_import_threads_stay(launch, tmp_path):
    """As in a script without torchvision."""
    (tmp_path / "alone.py").write_text(ALONE)
    (tmp_path / "count.py").write_text(COUNT.format(folder=str(tmp_path), script="alone"))
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", 1]
    after, before = count_threads(launch([[*torchrun, tmp_path / "count.py"]]).succeeded().out)
    assert before[0] > 0 and after[0] > 0


@pytest.mark.stress
@pytest.mark.parametrize("number", range(13))
@pytest.mark.parametrize("script", DDP)
def test_launches_end_well(launch, script, number):
    """Exit 0 and nothing on stderr but what torchrun itself prints, 13 times 4 scripts."""
    run = launch(script, 2, "--dataset", "synthetic", "-e", "1", "-b", "500").succeeded()
    assert run.own_err() == "", run.story()
    assert run.epochs()[0]["count"] == 2000
