"""srun on a real Slurm of two virtual nodes, and the program that starts this Slurm."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from launch import REPO, Launch, page_commands
from slurm import PRINT_TASK, read_tasks, skip_without_slurm

import mnmc_ddp_slurm

LOCAL_SLURM = REPO / "scripts" / "cluster" / "local_slurm.sh"
NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")


@pytest.mark.slow
def test_section_of_the_page_runs_as_it_stands(tmp_path):
    """Start, srun, sbatch, status and stop, one after the other."""
    skip_without_slurm()
    page, section = "docs/slurm.md", "Slurm on your laptop"
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    repository = tmp_path / "repository"  # so that what the job writes is not in this one
    repository.mkdir()
    for name in ("mnmc_ddp_slurm.py", "scripts"):
        (repository / name).symlink_to(REPO / name)
    command = ["bash", "-ec", "\n".join(page_commands(page, section))]
    env = {"LOCAL_SLURM": f"{folder}/cluster"}
    with Launch([command], tmp_path / "output", env=env, cwd=repository) as run:
        run.succeeded(240)
        assert len(run.inits()) == 2 * 4 and len(run.epochs()) == 2, run.story()
        assert re.search(r"^n1 .* idle ", run.out, re.MULTILINE), run.story()
    folder.rmdir()  # fails when stop left something


# What a step tells its tasks.


def read_slurm(monkeypatch, task, **settings):
    """Calls the script's function in the environment of a task; returns what it has set."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "")  # what is set here is put back
        monkeypatch.delenv(name)
    given = {name: value for name, value in task.items() if name.startswith("SLURM_")}
    for name, value in (given | settings).items():
        monkeypatch.setenv(name, str(value))
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    mnmc_ddp_slurm.read_slurm()
    assert threads == [1]
    return [os.environ[name] for name in names]


def test_ranks_address_and_port_are_what_slurm_gave(cluster, monkeypatch):
    """On the second node, so that the address is not that of the cluster's first node."""
    command = ("srun", "--nodelist", "n1", "--ntasks-per-node", "2", "python3", "-c", PRINT_TASK)
    for rank, task in enumerate(read_tasks(cluster.ask(*command))):
        port = str(10000 + (101 * int(task["SLURM_JOB_ID"]) + int(task["SLURM_STEP_ID"])) % 20000)
        # Ranks that a batch file has made from its own SLURM_PROCID, or an image from nothing.
        for old in ({}, {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}, {"LOCAL_RANK": 0}):
            settings = read_slurm(monkeypatch, task, **old)
            assert settings == [str(rank), str(rank), "2", "n1", port]


def test_first_node_is_that_of_scontrol(cluster, monkeypatch):
    """Which the script does not call: a container lacks it, and 512 tasks would ask at once."""
    task = {"SLURM_PROCID": "7", "SLURM_LOCALID": "3", "SLURM_STEP_NUM_TASKS": "8"}
    task |= {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
    names = ("n0", "n[0-1]", "gpu[07-09,12],cpu1", "cpu1,gpu[07-09]", "r[10-11]n[3,5]")
    for name in names:
        first = cluster.ask("scontrol", "show", "hostnames", name).split()[0]
        settings = read_slurm(monkeypatch, task | {"SLURM_STEP_NODELIST": name})
        assert settings[:4] == ["7", "3", "8", first], name


@pytest.mark.parametrize("step", ({}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}))
def test_ranks_of_your_own_hold_where_slurm_starts_one_process(monkeypatch, step):
    """By hand on each node, or with one srun for each rank."""
    ranks = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n0"}
    ranks |= {"MASTER_PORT": "29500"}
    assert read_slurm(monkeypatch, step, **ranks) == list(ranks.values())


def test_two_steps_at_once_are_two_trainings(cluster, launch):
    """In one job, on one node. The ranks that the job's shell has exported are not theirs."""
    step = "srun --exact --ntasks 2 python mnmc_ddp_slurm.py --dataset synthetic --epochs 0 &"
    ranks = "export RANK=$SLURM_PROCID LOCAL_RANK=0 WORLD_SIZE=$SLURM_NTASKS"
    job = ["salloc", "--quiet", "--nodes", "1", "--ntasks", "4", "bash", "-c"]
    run = launch([[*job, f"SLURM_PROCID=0; {ranks}; {step} {step} wait"]], env=cluster.env)
    run.succeeded(90)
    assert [row[:3] for row in run.inits()] == [(0, 2, 0)] * 2 + [(1, 2, 1)] * 2, run.story()


# local_slurm.sh.


def test_local_slurm_without_root(cluster):
    """As another user, beside the other cluster: start, srun, stop.

    Jobs have other numbers, because a job's port comes from its number.
    """
    if os.getuid() != 0:
        pytest.skip("this is not root already: the other tests show it")
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    folder.chmod(0o755)
    shutil.copy(LOCAL_SLURM, folder)
    shutil.chown(folder, 65534, 65534)
    env = os.environ | {"LOCAL_SLURM": f"{folder}/cluster", "NODES": "1", "HOME": str(folder)}
    line = (
        'set -e; eval "$(bash local_slurm.sh start)"; trap "bash local_slurm.sh stop" EXIT; '
        "srun sh -c 'id -un; echo $SLURM_JOB_ID'; bash local_slurm.sh stop; trap - EXIT; "
        "test ! -e cluster"
    )
    command = [*NOBODY, "bash", "-c", line]
    output = subprocess.check_output(command, env=env, cwd=folder, text=True, timeout=90)
    user, job, *last = output.splitlines()
    assert user == "nobody" and last == ["unset SLURM_CONF MASTER_ADDR"]
    assert job != cluster.ask("srun", "sh", "-c", "echo $SLURM_JOB_ID")
    shutil.rmtree(folder)


def test_local_slurm_is_for_its_user_alone(cluster):
    """Its ports are open, but a request needs what munge makes with the key."""
    modes = {name: (cluster.folder / name).stat().st_mode & 0o777 for name in (".", "munge.key")}
    assert modes == {".": 0o700, "munge.key": 0o400}
    if os.getuid() == 0:
        ask = ["munge", "--no-input", "--socket", cluster.folder / "munge.socket"]
        assert subprocess.run(ask, capture_output=True).returncode == 0
        refused = subprocess.run([*NOBODY, *ask], capture_output=True, text=True)
        assert "Permission denied" in refused.stderr, refused


def test_local_slurm_takes_no_folder_of_another_user(launch, tmp_path):
    """Who could have written a slurm.conf that loads a program; a link is as bad as a folder."""
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "cluster_of_local_slurm").touch()
    place = tmp_path / "link"
    place.symlink_to(tmp_path / "theirs")
    os.chown(place, 65534, 65534, follow_symlinks=False)
    for action in ("start", "settings", "status", "stop"):
        run = launch([["bash", LOCAL_SLURM, action]], env={"LOCAL_SLURM": str(place)}).wait()
        assert run.codes == [1] and run.out == "", run.story()
        assert run.err == f"{place} belongs to another user: choose another LOCAL_SLURM\n"


def test_local_slurm_stop_deletes_no_other_folder(launch, tmp_path):
    (tmp_path / "precious").mkdir()
    env = {"LOCAL_SLURM": str(tmp_path / "precious")}
    run = launch([["bash", LOCAL_SLURM, "stop"]], env=env).wait()
    assert run.codes == [1] and run.err == f"no cluster in {tmp_path}/precious\n"
    assert (tmp_path / "precious").exists()
