"""Which GPUs Slurm gives to a task, and which of them the script takes."""

import re

import pytest
from launch import REPO
from slurm import PRINT_TASK, read_tasks

# The table of the page: options of srun, what each local rank sees, and the GPU that it takes.
ROWS = re.findall(
    r"^\| `(--.+?)` \| ((?:`[\d,]+`|not set).*?) \| ([\d, ]+) \|",
    (REPO / "docs" / "slurm.md").read_text(),
    re.MULTILINE,
)
assert ROWS, "docs/slurm.md has no table of GPUs any more"


@pytest.mark.parametrize(("options", "seen", "taken"), ROWS, ids=[row[0] for row in ROWS])
def test_gpus_of_each_task_are_those_of_the_page(cluster, options, seen, taken):
    """Slurm hands out four fake GPUs of each node; the tasks are those of the first."""
    command = ["srun", "--nodes", "2", "--ntasks-per-node", "4", *options.split()]
    tasks = read_tasks(cluster.ask(*command, "python3", "-c", PRINT_TASK))
    shown = [task["CUDA_VISIBLE_DEVICES"].replace("not-set", "not set") for task in tasks[:4]]
    cells = seen.replace("`", "").split(", ")  # a single cell holds for all local ranks
    assert shown == (cells if len(cells) == 4 else 4 * cells)
    gpus = []
    for local_rank, visible in enumerate(shown):
        # Where the variable is not set, a process sees all GPUs of the job on its node.
        numbers = ("0,1,2,3" if visible == "not set" else visible).split(",")
        gpus.append(numbers[local_rank % len(numbers)])  # as the script does: test_devices.py
    assert gpus == taken.split(", ")
