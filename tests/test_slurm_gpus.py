"""Which GPUs Slurm gives to a task, and which of them the script takes."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launch import REPO
from slurm import TASK, Cluster

import mnmc_ddp_slurm

PAGE = REPO / "docs" / "slurm.md"
# The table of the page: options of srun, what each local rank sees, and the GPU that it takes.
ROWS = re.findall(
    r"^\| `(--.+?)` \| ((?:`[\d,]+`|not set).*?) \| ([\d, ]+) \|", PAGE.read_text(), re.MULTILINE
)


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(NODES="2", CPUS="4", GPUS="4")
    yield cluster
    cluster.stop()


def choose_gpu(monkeypatch, local_rank, gpus):
    """Calls setup_distributed as a task that sees so many GPUs; returns its number."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # what the script sets is put back
        monkeypatch.delenv(name)
    for name, value in (TASK | {"SLURM_LOCALID": str(local_rank)}).items():
        monkeypatch.setenv(name, value)
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    for name, answer in (("init_process_group", None), ("get_rank", 7), ("get_world_size", 8)):
        monkeypatch.setattr(dist, name, lambda answer=answer, **options: answer)
    device = mnmc_ddp_slurm.setup_distributed(SimpleNamespace(backend=None, timeout=1))[1]
    return device.index


def read_cells(text, count):
    """The cells of a table for local ranks 0, 1, …; a single cell holds for all of them."""
    cells = [cell.strip("` ") for cell in re.split(r"(?<=`), |(?<=\d), (?=\d)", text)]
    return cells if len(cells) == count else cells * count


def show_gpus(cluster, options, node):
    """What the four tasks of a node see, by local rank."""
    line = 'echo "$SLURM_NODEID $SLURM_LOCALID ${CUDA_VISIBLE_DEVICES-not set}"'
    argv = ["srun", "--nodes", "2", "--ntasks-per-node", "4", *options.split(), "bash", "-c", line]
    rows = sorted(row.split(" ", 2) for row in cluster.ask(*argv).splitlines())
    assert len(rows) == 8, rows
    return [seen for number, _, seen in rows if number == str(node)]


@pytest.mark.parametrize(("options", "seen", "taken"), ROWS, ids=[row[0] for row in ROWS])
def test_gpus_of_each_task_are_those_of_the_page(cluster, monkeypatch, options, seen, taken):
    """Slurm hands out four fake GPUs of each node; the script's own function chooses."""
    shown = show_gpus(cluster, options, node=0)
    assert shown == read_cells(seen, 4)
    if options == "--gpus 4":  # For the whole job: the page says how the nodes divide them.
        assert show_gpus(cluster, options, node=1) == ["0"] * 4
    gpus = []
    for local_rank, visible in enumerate(shown):
        # Where the variable is not set, a process sees all GPUs of the job on its node.
        numbers = "0,1,2,3" if visible == "not set" else visible
        numbers = numbers.split(",")
        gpus.append(numbers[choose_gpu(monkeypatch, local_rank, len(numbers))])
    assert gpus == taken.split(", ")


def test_the_table_has_its_rows():
    assert len(ROWS) == 10


def test_processes_of_fake_gpus_train_on_the_cpu(cluster):
    argv = ["srun", "--gpus-per-node", "4", "python", "-c"]
    line = "import torch; print(torch.cuda.device_count())"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | cluster.env | {"PATH": path}
    assert subprocess.check_output([*argv, line], env=env, text=True, timeout=60) == "0\n"


def test_cpus_per_gpu_and_cpus_per_task_exclude_each_other(cluster):
    argv = ["srun", "--gpus-per-node", "4", "--cpus-per-gpu", "1", "--cpus-per-task", "1", "true"]
    run = subprocess.run(argv, env=os.environ | cluster.env, text=True, capture_output=True)
    assert run.returncode != 0 and "mutually exclusive" in run.stderr
