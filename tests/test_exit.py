"""A process leaves without a thread of gloo's, and so without the abort that they can cause."""

import pytest
from launch import DDP, REPO, commands_for, free_port, quick_for

# Runs a script's main() and counts, before it leaves and after, the threads that are not Python's
# own. OMP_NUM_THREADS is 1, so that they are gloo's.
COUNT = """
import importlib, os, threading
script = importlib.import_module(os.environ["SCRIPT"])

def count():
    number = len(os.listdir("/proc/self/task")) - threading.active_count()
    print(f"{number} of gloo\\n", end="", flush=True)

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


def count_threads(run):
    """The numbers of threads that the ranks had after they left, and before."""
    lines = run.succeeded().out.splitlines()
    counts = sorted(int(line.split()[0]) for line in lines if line.endswith(" of gloo"))
    return counts[: len(counts) // 2], counts[len(counts) // 2 :]


# Two of the scripts: main() and train() are the same in all but mnmc_ddp_mp.py.
@pytest.mark.parametrize("script", quick_for(DDP[1:3], "mnmc_ddp_env.py"))
def test_no_thread_of_gloo_is_left(launch, tmp_path, script):
    (tmp_path / "count.py").write_text(COUNT)
    commands = commands_for(script, 2, "--dataset", "synthetic", "-e", "1", "-b", "500")
    for command in commands:
        command[command.index(REPO / script)] = tmp_path / "count.py"
    settings = {"SCRIPT": script.removesuffix(".py"), "PYTHONPATH": str(REPO)}
    run = launch(commands, env=settings)
    after, before = count_threads(run)
    missing = "Does torchvision still import torch.distributed.nn? If not, the scripts must.\n"
    assert after == [0, 0] and len(before) == 2 and min(before) > 0, missing + run.story()


@pytest.mark.slow
def test_without_the_early_import_threads_stay(launch, tmp_path):
    """As in a script without torchvision."""
    (tmp_path / "alone.py").write_text(ALONE)
    (tmp_path / "count.py").write_text(COUNT)
    env = {"SCRIPT": "alone", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(free_port())
    (after, before) = count_threads(launch([["python", tmp_path / "count.py"]], env=env))
    assert before[0] > 0 and after[0] > 0


@pytest.mark.stress
@pytest.mark.parametrize("number", range(13))
@pytest.mark.parametrize("script", DDP)
def test_launches_end_well(launch, script, number):
    """Exit 0 and nothing on stderr but what torchrun itself prints, 13 times 4 scripts."""
    run = launch(script, 2, "--dataset", "synthetic", "-e", "1", "-b", "500").succeeded()
    assert run.own_err() == "", run.story()
    assert run.epochs()[0]["count"] == 2000
