"""The one list of the scripts. Tests start what it lists, and check other lists against it.

A script that is not in this list fails tests/test_scripts_list.py. So does a list that lacks one:
README.md, docs/diffs.md, scripts/run_all.sh and scripts/cluster/two_hosts.sh.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Script:
    """A script of the collection, in the words of the README's table."""

    name: str
    started_with: str
    many_processes: bool  # A script with a single process joins no process group.
    new: str
    previous: str  # The diff to this script starts there.
    many_hosts: bool  # two_hosts.sh can start it.


ALL = (
    Script("snsc.py", "`python`", False, "the plain script", "", False),
    Script(
        "snmc_dp.py",
        "`python`",
        False,
        "`DataParallel`, and why it is not enough",
        "snsc.py",
        False,
    ),
    Script(
        "mnmc_ddp_tcp.py",
        "`python`, once per process",
        True,
        "DDP, and you give each process its number and the address where all processes meet",
        "snmc_dp.py",
        True,
    ),
    Script(
        "mnmc_ddp_env.py",
        "`torchrun`",
        True,
        "the launcher gives each process its number and the address",
        "mnmc_ddp_tcp.py",
        True,
    ),
    Script(
        "mnmc_ddp_mp.py",
        "`python`, once per node",
        True,
        "the script spawns its processes",
        "mnmc_ddp_env.py",
        True,
    ),
    Script(
        "mnmc_ddp_slurm.py",
        "`srun`",
        True,
        "Slurm gives each process its number, and the script finds the address",
        "mnmc_ddp_env.py",
        True,
    ),
)
PLAIN = tuple(script.name for script in ALL if not script.many_processes)
DDP = tuple(script.name for script in ALL if script.many_processes)
SCRIPTS = PLAIN + DDP
