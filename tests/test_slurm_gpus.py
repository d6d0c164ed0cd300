"""Which GPUs Slurm gives to a task, and which of them the script takes."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launch import REPO
from slurm import PRINT_TASK, read_tasks

import mnmc_ddp_slurm

# The table of the page: options of srun, what each local rank sees, and the GPU that it takes.
ROWS = re.findall(
    r"^\| `(--.+?)` \| ((?:`[\d,]+`|not set).*?) \| ([\d, ]+) \|",
    (REPO / "docs" / "slurm.md").read_text(),
    re.MULTILINE,
)
assert ROWS, "docs/slurm.md has no table of GPUs any more"


def choose_gpu(monkeypatch, local_rank, gpus):
    """Calls setup_distributed as a task that sees so many GPUs; returns its number."""
    # As under srun torchrun, so that it need not read Slurm's variables.
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(dist, "init_process_group", lambda **options: None)
    for name in ("get_rank", "get_world_size"):
        monkeypatch.setattr(dist, name, lambda: 0)
    args = SimpleNamespace(backend=None, timeout=1)
    return mnmc_ddp_slurm.setup_distributed(args)[1].index


def read_cells(text):
    """The cells of a table for local ranks 0 to 3; a single cell holds for all of them."""
    cells = [cell.strip("` ") for cell in re.split(r"(?<=`), |(?<=\d), (?=\d)", text)]
    return cells if len(cells) == 4 else cells * 4


@pytest.mark.parametrize(("options", "seen", "taken"), ROWS, ids=[row[0] for row in ROWS])
def test_gpus_of_each_task_are_those_of_the_page(cluster, monkeypatch, options, seen, taken):
    """Slurm hands out four fake GPUs of each node; the script's own function chooses."""
    command = ["srun", "--nodes", "2", "--ntasks-per-node", "4", *options.split()]
    tasks = read_tasks(cluster.ask(*command, "python3", "-c", PRINT_TASK))
    shown = [task["CUDA_VISIBLE_DEVICES"].replace("not-set", "not set") for task in tasks]
    assert shown[:4] == read_cells(seen)  # the tasks of the first node
    if options == "--gpus 4":  # For the whole job: the page says how the nodes divide them.
        assert shown[4:] == ["0"] * 4
    gpus = []
    for local_rank, visible in enumerate(shown[:4]):
        # Where the variable is not set, a process sees all GPUs of the job on its node.
        numbers = ("0,1,2,3" if visible == "not set" else visible).split(",")
        gpus.append(numbers[choose_gpu(monkeypatch, str(local_rank), len(numbers))])
    assert gpus == taken.split(", ")


def test_cpus_per_gpu_and_cpus_per_task_exclude_each_other(cluster):
    options = "--gpus-per-node 4 --cpus-per-gpu 1 --cpus-per-task 1"
    output = cluster.ask("bash", "-c", f"srun {options} echo started 2>&1 || true")
    assert "mutually exclusive" in output and "started" not in output
