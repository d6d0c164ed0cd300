"""mpirun starts mnmc_ddp_env.py by the shell line of the page, and tells each rank its number."""

import shutil

import pytest
from launch import free_port, page_commands, page_output, shape

PAGE, SECTION = "docs/clusters.md", "mpirun: PBS, LSF and other clusters without srun"
# Open MPI asks root twice, and counts processes against the machine's cores.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ENV = AS_ROOT | {"OMPI_MCA_rmaps_base_oversubscribe": "1"}


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun: apt-get install openmpi-bin")
def test_section_of_the_page_trains(launch):
    lines = "\n".join(page_commands(PAGE, SECTION))
    lines = lines.replace("MASTER_PORT=29512", f"MASTER_PORT={free_port()}")
    run = launch([["bash", "-ec", lines]], env=ENV).succeeded()
    assert [row[:3] for row in run.inits()] == [(0, 2, 0), (1, 2, 1)], run.story()
    (shown,) = page_output(PAGE, SECTION)
    printed = {shape(line) for line in run.out.splitlines()}
    assert {shape(line) for line in shown.splitlines()} <= printed, run.story()
