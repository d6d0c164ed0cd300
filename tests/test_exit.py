"""A process leaves without a thread of gloo's, and so without the abort that they can cause."""

import os
import subprocess
import sys

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


@pytest.mark.parametrize("script", quick_for(DDP, "mnmc_ddp_env.py"))
def test_no_thread_of_gloo_is_left(launch, tmp_path, script):
    (tmp_path / "count.py").write_text(COUNT)
    commands = commands_for(script, 2, "--dataset", "synthetic", "-e", "1", "-b", "500")
    for command in commands:
        command[command.index(REPO / script)] = tmp_path / "count.py"
    settings = {"SCRIPT": script.removesuffix(".py"), "PYTHONPATH": str(REPO)}
    run = launch(commands, env=settings).succeeded()
    counts = [int(line.split()[0]) for line in run.out.splitlines() if line.endswith(" of gloo")]
    missing = "Does torchvision still import torch.distributed.nn? If not, the scripts must.\n"
    assert sorted(counts)[:2] == [0, 0] and min(sorted(counts)[2:]) > 0, missing + run.story()
    assert len(counts) == 4, run.story()


# The scripts import torchvision, which imports torch.distributed.nn on its way. This does not.
ALONE = (REPO / "docs" / "examples" / "clean_exit.py").read_text()
IMPORT = "import torch.distributed.nn  # before init_process_group\n"


@pytest.mark.parametrize("imported", (True, False))
def test_early_import_is_what_lets_the_threads_go(tmp_path, imported):
    """Without it the page's program still has threads after destroy_process_group."""
    assert ALONE.count(IMPORT) == 1
    (tmp_path / "alone.py").write_text(ALONE if imported else ALONE.replace(IMPORT, ""))
    command = [sys.executable, tmp_path / "alone.py"]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"} | address
    output = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120).stdout
    left = int(output.split()[-1])
    assert left == 0 if imported else left > 0, output


CYCLES = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel

def cycle():
    model = DistributedDataParallel(torch.nn.Linear(8, 8), gradient_as_bucket_view=True)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    dist.all_reduce(torch.ones(1))

rank = int(sys.argv[2])
for number in range(40):
    meet = f"file://{sys.argv[1]}/{number}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    cycle()
    dist.destroy_process_group()
print(f"rank {rank} is through", flush=True)
"""


@pytest.mark.slow
def test_cycles_of_init_ddp_and_destroy_end(launch, tmp_path):
    """Forty in one process, over two ranks: freeing the group never waits for itself."""
    (tmp_path / "cycles.py").write_text(CYCLES)
    command = ["python", tmp_path / "cycles.py", tmp_path]
    run = launch([[*command, 0], [*command, 1]]).succeeded()
    assert sorted(run.out.splitlines()) == ["rank 0 is through", "rank 1 is through"], run.story()
    assert run.own_err() == "", run.story()


@pytest.mark.stress
@pytest.mark.parametrize("number", range(13))
@pytest.mark.parametrize("script", DDP)
def test_launches_end_well(launch, script, number):
    """Exit 0 and nothing on stderr but what torchrun itself prints, 13 times 4 scripts."""
    run = launch(script, 2, "--dataset", "synthetic", "-e", "1", "-b", "500").succeeded()
    assert run.own_err() == "", run.story()
    assert run.epochs()[0]["count"] == 2000
