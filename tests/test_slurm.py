"""srun on a real Slurm of two virtual nodes, and the program that starts this Slurm."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
import update_pages
from launch import REPO, Launch, marked_pids, page_commands, quick_for, shape
from slurm import SYNTHETIC, TASK, Cluster, make_stand_in, skip_without_slurm

import mnmc_ddp_slurm

PAGE, SECTION = "docs/slurm.md", "Slurm on your laptop"
BLOCKS = update_pages.read_blocks((REPO / PAGE).read_text())


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(NODES="2", CPUS="4")
    yield cluster
    cluster.stop()


@pytest.mark.slow
def test_section_of_the_page_runs_as_it_stands(tmp_path):
    """Start, srun, sbatch, status and stop, one after the other."""
    skip_without_slurm()
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    lines = page_commands(PAGE, SECTION)
    programs = [line.split()[0] for line in lines]
    assert programs == ["eval", "srun", "sbatch", "cat", "bash", "eval"]
    command = ["bash", "-ec", "\n".join(lines)]
    env = {"LOCAL_SLURM": f"{folder}/cluster"}
    with Launch(
        [command], tmp_path / "output", env=env, cwd=make_stand_in(tmp_path / "repo")
    ) as run:
        run.succeeded(240)
        assert len(run.inits()) == 2 * 4 and len(run.epochs()) == 2, run.story()
        printed = [shape(line) for line in run.out.splitlines()]
        (shown,) = (b.code for b in BLOCKS if b.heading == SECTION and b.language == "text")
        assert {shape(line) for line in shown.splitlines()} <= set(printed), run.story()
        assert re.search(r"^n1 .* idle ", run.out, re.MULTILINE), run.story()
    folder.rmdir()  # fails when stop left something


@pytest.mark.slow
def test_srun_torchrun_on_two_nodes(cluster, tmp_path):
    """One torchrun per node, two processes each."""
    inner = (
        'exec torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node 2 '
        '--master-addr 127.0.0.1 --master-port "$((10000 + SLURM_JOB_ID % 20000))" '
        'mnmc_ddp_slurm.py "$@"'
    )
    command = ["srun", "--nodes", 2, "--ntasks", 2, "--ntasks-per-node", 1, "bash", "-c", inner]
    options = ["torchrun", "--dataset", "synthetic", "-e", "1"]
    with Launch([[*command, *options]], tmp_path, env=cluster.env) as run:
        run.succeeded()
        assert [row[:3] for row in run.inits()] == [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)]
        assert run.epochs()[0]["count"] == 2000


@pytest.mark.slow
def test_every_kind_of_mpi_starts_the_same_ranks(cluster, tmp_path):
    """The scripts do not use MPI. Debian's Slurm lists pmix, too, but lacks its library."""
    listed = cluster.ask("srun", "--mpi=list").split()
    assert "none" in listed
    for kind in [kind for kind in ("none", "pmi2") if kind in listed]:
        command = ["srun", f"--mpi={kind}", "-n2", "-N2", "python", "mnmc_ddp_slurm.py"]
        options = ["--dataset", "synthetic", "-e", "1"]
        with Launch([[*command, *options]], tmp_path / kind, env=cluster.env) as run:
            run.succeeded()
            assert [row[:3] for row in run.inits()] == [(0, 2, 0), (1, 2, 0)], run.story()
            assert run.epochs()[0]["count"] == 2000


# What a task runs for read_tasks; one write, so that lines of several tasks do not mix.
SHOW = "for name in PROCID LOCALID STEP_NUM_TASKS NTASKS JOB_ID STEP_NODELIST; do\n"
SHOW += 'line="$line SLURM_$name=$(printenv SLURM_$name)"\ndone\necho "task$line"\n'


def read_tasks(text):
    """Slurm's variables of each task that ran SHOW, as dictionaries."""
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith("task ")]
    return [dict(field.split("=", 1) for field in fields) for fields in lines]


def read_slurm(monkeypatch, task):
    """Calls the script's function in the environment of a task; returns what it has set."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "")  # what is set here is put back
        monkeypatch.delenv(name)
    for name, value in ({"OMP_NUM_THREADS": "1"} | task).items():
        monkeypatch.setenv(name, value)
    mnmc_ddp_slurm.read_slurm()
    return [os.environ[name] for name in names]


def test_ranks_and_address_are_what_slurm_gave(cluster, monkeypatch):
    """On the second node, so that the address is not that of the cluster's first node."""
    output = cluster.ask("srun", "--nodelist", "n1", "--ntasks-per-node", "2", "sh", "-c", SHOW)
    tasks = read_tasks(output)
    assert sorted(task["SLURM_PROCID"] for task in tasks) == ["0", "1"], output
    for task in tasks:
        port = str(10000 + int(task["SLURM_JOB_ID"]) % 20000)
        settings = read_slurm(monkeypatch, task | {"SLURM_CONF": cluster.env["SLURM_CONF"]})
        assert settings == [task["SLURM_PROCID"], task["SLURM_LOCALID"], "2", "n1", port]


def test_controller_is_not_asked(tmp_path, monkeypatch):
    """A step's first node is found where no controller answers: 512 tasks ask nobody."""
    skip_without_slurm()
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=192.0.2.1\n")
    task = TASK | {"SLURM_STEP_NODELIST": "gpu[07-09],cpu1", "SLURM_LOCALID": "3"}
    task["SLURM_CONF"] = str(tmp_path / "slurm.conf")
    del task["MASTER_ADDR"]
    assert read_slurm(monkeypatch, task)[:4] == ["7", "3", "8", "gpu07"]


def test_container_without_scontrol_says_what_to_set(tmp_path, monkeypatch):
    """Where the variable is missing; with it scontrol is not needed."""
    task = TASK | {"SLURM_LOCALID": "3", "PATH": str(tmp_path)}
    assert read_slurm(monkeypatch, task)[3] == "n0"
    del task["MASTER_ADDR"]
    with pytest.raises(SystemExit, match="set MASTER_ADDR to the first node's name"):
        read_slurm(monkeypatch, task)


def test_shell_of_salloc_is_a_step_of_one_task(cluster, tmp_path, monkeypatch):
    """There SLURM_NTASKS is that of the allocation: a script that waits for so many waits long."""
    shell = tmp_path / "shell"
    shell.write_text(f"#!/bin/sh\n{SHOW}")
    shell.chmod(0o755)
    # Where clusters have use_interactive_step, salloc starts $SHELL as a step on the first node.
    env = cluster.env | {"SHELL": str(shell)}
    with Launch([["salloc", "--nodes", 2, "--ntasks", 4]], tmp_path / "output", env=env) as run:
        (task,) = read_tasks(run.succeeded().out)
        assert task["SLURM_NTASKS"] == "4", run.story()
        task["SLURM_CONF"] = cluster.env["SLURM_CONF"]
        assert read_slurm(monkeypatch, task)[:4] == ["0", "0", "1", "n0"]


@pytest.mark.slow
def test_heterogeneous_job_trains_as_one(cluster, tmp_path):
    """One task on a node, and two on the other: ranks are counted over both parts."""
    command = ["srun", "--ntasks", 1, "--nodelist", "n0", ":", "--ntasks", 2, "--nodelist", "n1"]
    options = ["python", "mnmc_ddp_slurm.py", "--dataset", "synthetic", "-e", "1"]
    with Launch([[*command, *options]], tmp_path, env=cluster.env) as run:
        run.succeeded()
        assert [row[:3] for row in run.inits()] == [(0, 3, 0), (1, 3, 0), (2, 3, 1)], run.story()


@pytest.mark.slow
def test_wrong_option_ends_every_task(cluster, tmp_path):
    """All four tasks read it, and each says so."""
    command = ["srun", "-n4", "-N2", "python", "mnmc_ddp_slurm.py", "--batch-size", "many"]
    with Launch([command], tmp_path, env=cluster.env) as run:
        assert run.wait().codes == [2]
        assert run.last_line().endswith("invalid int value: 'many'"), run.story()


@pytest.mark.parametrize("fails", quick_for(("download", "load", "save"), "load"))
def test_task_that_fails_alone_ends_every_task(cluster, tmp_path, fails):
    """Under srun --kill-on-bad-exit, as in the batch file; in seconds."""
    path = tmp_path / "last.pt"
    options = ["--dataset", "synthetic", "-e", "100", "-b", "500", "--checkpoint", path]
    message = "cannot be read as a checkpoint"
    if fails == "download":
        (tmp_path / "file").write_text("not a folder")
        options, message = ["--data-root", tmp_path / "file"], "cannot load mnist"
    elif fails == "load":
        path.write_bytes(b"no checkpoint")
    else:
        (tmp_path / "last.pt.tmp").mkdir()
        message = "in save_checkpoint"
    command = [
        "srun",
        "-n2",
        "-N2",
        "--kill-on-bad-exit=1",
        "python",
        "mnmc_ddp_slurm.py",
        *options,
    ]
    with Launch([command], tmp_path / "output", env=cluster.env) as run:
        assert 0 not in run.wait(90).codes, run.story()
        assert message in run.err and run.epochs() == [], run.story()
        run.wait_for(lambda: not run.pids(), 10, "all tasks to be gone")


@pytest.mark.slow
def test_killed_task_ends_every_task(cluster, tmp_path):
    """Under plain srun, without --kill-on-bad-exit: the other ranks see it and end."""
    command = ["srun", "-n4", "-N2", "python", "mnmc_ddp_slurm.py", *SYNTHETIC[:2], "-e", "1000"]
    with Launch([command], tmp_path, env=cluster.env) as run:
        run.wait_for(run.epochs, 90, "an epoch")
        tasks = [pid for pid in run.pids() if b"srun" not in Path(f"/proc/{pid}/comm").read_bytes()]
        os.kill(max(tasks), signal.SIGKILL)
        run.wait_for(lambda: not run.pids(), 30, "all tasks to be gone")
        assert run.wait().codes != [0]


def test_settings_are_those_of_the_first_terminal(cluster):
    """For a second terminal, where Slurm's commands find no cluster."""
    env = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"}
    line = f"bash {REPO}/scripts/cluster/local_slurm.sh settings"
    command = f'eval "$({line})"; sinfo --noheader --format %D'
    env |= {"LOCAL_SLURM": str(cluster.folder)}
    output = subprocess.check_output(["bash", "-c", command], env=env, text=True, timeout=60)
    assert output == "2\n"
    lost = subprocess.run(["sinfo"], env=env, capture_output=True, text=True, timeout=60)
    assert "DNS SRV lookup failed" in lost.stderr


def test_two_clusters_side_by_side(cluster):
    """The second starts, works and stops without a trace; the first goes on."""
    second = Cluster(NODES="3", CPUS="1")
    env = os.environ | second.env
    count = ["srun", "--nodes", "3", "bash", "-c", "echo $SLURMD_NODENAME $SLURM_JOB_ID"]
    try:
        fields = subprocess.check_output(count, env=env, text=True, timeout=60).split()
        assert sorted(fields[::2]) == ["n0", "n1", "n2"]
        # The port of a job comes from its number, which must be another one in each cluster.
        output = cluster.ask("srun", "bash", "-c", "echo $SLURM_JOB_ID")
        job, other_job = int(fields[1]), int(output)
        assert job != other_job and min(job, other_job) > 1000, (job, other_job)
        assert "n2" in second.run("status")
        assert len(marked_pids(second.mark)) >= 5  # munged, slurmctld, three slurmd
    finally:
        second.stop()
    assert marked_pids(second.mark) == []
    assert cluster.ask("srun", "--nodes", "2", "--ntasks", "2", "echo", "up") == "up\nup"


def test_local_slurm_without_root():
    """As another user: start, srun, stop."""
    skip_without_slurm()
    if os.getuid() != 0:
        pytest.skip("this is not root already: the other tests show it")
    other = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    folder.chmod(0o755)
    shutil.copy(REPO / "scripts" / "cluster" / "local_slurm.sh", folder)
    shutil.chown(folder, 65534, 65534)
    env = os.environ | {"LOCAL_SLURM": f"{folder}/cluster", "NODES": "1", "HOME": str(folder)}
    line = (
        'set -e; eval "$(bash local_slurm.sh start)"; trap "bash local_slurm.sh stop" EXIT; '
        "srun id -un; bash local_slurm.sh stop; trap - EXIT; test ! -e cluster"
    )
    out = subprocess.check_output(
        [*other, "bash", "-c", line], env=env, cwd=folder, text=True, timeout=90
    )
    assert out == "nobody\nunset SLURM_CONF MASTER_ADDR\n"
    shutil.rmtree(folder)


def test_local_slurm_stop_deletes_no_other_folder(launch, tmp_path):
    (tmp_path / "precious").mkdir()
    command = ["bash", "scripts/cluster/local_slurm.sh", "stop"]
    run = launch([command], env={"LOCAL_SLURM": str(tmp_path / "precious")}).wait()
    assert run.codes == [1]
    assert run.err == f"no cluster in {tmp_path}/precious\n"
    assert (tmp_path / "precious").exists()


def test_local_slurm_says_which_packages_are_missing(launch, tmp_path):
    for tool in ("id", "realpath"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    command = [shutil.which("bash"), tmp_path / "local_slurm.sh", "start"]
    text = (REPO / "scripts" / "cluster" / "local_slurm.sh").read_text()
    (tmp_path / "local_slurm.sh").write_text(text.replace('PATH="$PATH:/usr/sbin:/sbin"\n', ""))
    run = launch([["env", f"PATH={tmp_path}", *command]]).wait()
    assert run.codes == [1]
    message = "missing packages: slurm-wlm munge (as root: apt-get install slurm-wlm munge)\n"
    assert run.err == message, run.story()
