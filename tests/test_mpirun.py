"""mpirun starts mnmc_ddp_env.py by the shell line of the page, and tells each rank its number."""

import shutil

import pytest
import update_pages
from launch import REPO, Launch, free_port, page_commands, shape

PAGE, SECTION = "docs/clusters.md", "mpirun: PBS, LSF and other clusters without srun"
# Open MPI asks root twice, and counts processes against the machine's cores.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ENV = AS_ROOT | {"OMPI_MCA_rmaps_base_oversubscribe": "1"}


def read_lines():
    """The page's commands, with a port that is free here."""
    lines = page_commands(PAGE, SECTION)
    assert lines[0].startswith("export MASTER_ADDR=127.0.0.1 MASTER_PORT=29512 ")
    return [lines[0].replace("29512", str(free_port())), *lines[1:]]


@pytest.fixture
def start(tmp_path):
    """Starts lines of the shell with Open MPI's settings."""
    if not shutil.which("mpirun"):
        pytest.skip("no mpirun: apt-get install openmpi-bin")
    launches = []

    def start_lines(lines):
        launches.append(Launch([["bash", "-ec", "\n".join(lines)]], tmp_path, env=ENV))
        return launches[-1]

    yield start_lines
    for launch in launches:
        launch.__exit__()


@pytest.mark.slow
def test_section_of_the_page_trains(start):
    run = start(read_lines()).succeeded()
    assert [row[:3] for row in run.inits()] == [(0, 2, 0), (1, 2, 1)], run.story()
    blocks = update_pages.read_blocks((REPO / PAGE).read_text())
    (shown,) = (b.code for b in blocks if b.heading == SECTION and b.language == "text")
    printed = {shape(line) for line in run.out.splitlines()}
    assert {shape(line) for line in shown.splitlines()} <= printed, run.story()


def test_each_rank_is_told_its_numbers(start):
    """The same shell line with four ranks and another program."""
    lines = read_lines()
    program = "python mnmc_ddp_env.py --dataset synthetic --epochs 1"
    assert lines[1].endswith(program)
    show = "bash -c 'echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR'"
    lines[1] = lines[1].replace(program, show).replace("-n 2", "-n 4")
    run = start(lines).succeeded()
    expected = [f"{rank} {rank} 4 127.0.0.1" for rank in range(4)]
    assert sorted(run.out.splitlines()) == expected, run.story()
