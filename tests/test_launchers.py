"""The shell launchers in scripts/."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import update_pages
from conftest import wants_gpus
from launch import REPO, free_port, quick_for, shape

ONE_EPOCH = ["--dataset", "synthetic", "--epochs", "1"]
LONG = ["--dataset", "synthetic", "--epochs", "1000", "--batch-size", "250"]


@pytest.mark.slow
def test_env_sh_on_two_nodes(launch):
    """Two torchruns on one machine, told apart by NODE_RANK."""
    command = ["bash", REPO / "scripts" / "mnmc_ddp_env.sh", *ONE_EPOCH]
    shared = {"NNODES": "2", "NPROC": "1", "MASTER_PORT": str(free_port())}
    # One thread: the nodes share the cores, and two that wait for each other in turns take forever.
    shared |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    runs = [launch([command], env=shared | {"NODE_RANK": str(rank)}) for rank in range(2)]
    for rank, run in enumerate(runs):
        assert run.succeeded().inits()[0][:3] == (rank, 2, 0)
    assert [len(run.epochs()) for run in runs] == [1, 0]


def test_tcp_sh_ends_all_ranks_when_one_fails(launch):
    """Rank 1 of 3 is killed; the launcher fails and leaves nothing behind."""
    command = ["bash", REPO / "scripts" / "mnmc_ddp_tcp.sh", *LONG]
    run = launch([command], env={"NPROC": "3"})
    run.wait_for(run.epochs, 120, "the first epoch")
    os.kill(run.pid_of(1), 9)
    run.wait(30)
    assert run.codes == [128 + 9]
    run.wait_for(lambda: not run.pids(), 10, "all ranks to be gone")


@pytest.mark.slow
def test_tcp_sh_passes_sigterm_on(launch):
    """Also to a rank that is stopped."""
    command = ["bash", REPO / "scripts" / "mnmc_ddp_tcp.sh", *LONG]
    run = launch([command], env={"NPROC": "2"})
    run.wait_for(run.epochs, 120, "the first epoch")
    os.kill(run.pid_of(1), signal.SIGSTOP)
    run.processes[0].terminate()
    run.wait(30)
    assert run.codes == [143]
    run.wait_for(lambda: not run.pids(), 10, "all ranks to be gone")


@pytest.mark.slow
def test_run_all_ends_with_six_rows(launch):
    """The main job, which runs five of the launchers; without Slurm the last row says so."""
    run = launch([["bash", REPO / "scripts/run_all.sh"]], env={"SRUN": ""})
    run.succeeded(280)
    assert [row[:2] for row in run.inits()] == [(0, 2)] * 4 + [(1, 2)] * 4
    assert len(re.findall(r"^\[init\] (cpu|cuda:0)$", run.out, re.MULTILINE)) == 2
    assert [line["count"] for line in run.epochs()] == [2000] * 6
    assert run.own_err() == "", run.story()
    (shown,) = (
        block.code.splitlines()
        for block in update_pages.read_blocks(update_pages.README.read_text())
        if block.mark == "printed by tests/test_launchers.py"
    )
    header, *rows = run.out.splitlines()[-7:]
    assert [shape(line) for line in shown] == [shape(line) for line in (header, *rows)]
    assert " ".join(header.split()) == "script launched by processes test accuracy images/s seconds"
    row = re.compile(r"^(\w+\.py) +(\S.*?) +(\d+) +([\d.]+)% +(\d+) +([\d.]+)$")
    table = [row.match(line).groups() for line in rows]
    assert [r[:3] for r in table] == [
        ("snsc.py", "python", "1"),
        ("snmc_dp.py", "python", "1"),
        ("mnmc_ddp_tcp.py", "python, once per rank", "2"),
        ("mnmc_ddp_env.py", "torchrun", "2"),
        ("mnmc_ddp_mp.py", "python, spawns workers", "2"),
        ("mnmc_ddp_slurm.py", "torchrun (SRUN=1: srun)", "2"),
    ]
    assert all(float(r[3]) > 95 and int(r[4]) > 0 and float(r[5]) > 0 for r in table)


def test_run_all_fails_with_the_output_of_what_failed(launch):
    run = launch([["bash", REPO / "scripts/run_all.sh", "--lr", "fast"]]).wait()
    assert run.codes == [1]
    assert "invalid float value: 'fast'" in run.out
    assert "snsc.py failed" in run.err


class StandIn:
    """A folder with scripts/ that stands for the repository, and programs that stand for others."""

    # A python that runs `-c`, and says of a script what a training says.
    TRAINS = f"""case "$1" in -c) exec {shlex.quote(sys.executable)} "$@" ;; esac
echo "threads $OMP_NUM_THREADS argv $*"
echo "epoch 1/1 | train loss 0.1 acc 90.00% | test acc 90.00% (9/10) | 10 img/s | 1.0 s"
"""

    def __init__(self, launch, folder):
        self.launch, self.folder = launch, folder
        shutil.copytree(REPO / "scripts", folder / "scripts")
        (folder / "requirements.txt").write_text("")
        (folder / "bin").mkdir()
        self.path = f"{folder}/bin:{os.environ['PATH']}"

    def add(self, program, text):
        (self.folder / "bin" / program).write_text(f"#!/bin/sh\n{text}")
        (self.folder / "bin" / program).chmod(0o755)

    def add_torch(self, gpus):
        """Returns settings with which Python imports a torch that sees so many GPUs."""
        (self.folder / "site").mkdir()
        (self.folder / "site" / "torch.py").write_text(
            f"class cuda:\n    device_count = staticmethod(lambda: {gpus})\n"
        )
        return {"PYTHONPATH": str(self.folder / "site")}

    def run(self, line, **env):
        """Runs a line of bash in the folder; returns the launch when it has ended."""
        # Launch puts the Python of the tests in front of a PATH in env.
        line = f"PATH={self.path}; cd {self.folder}; {line}"
        env = {"ROCM_PATH": str(self.folder / "rocm")} | env  # This machine may have AMD's GPUs.
        return self.launch([["bash", "-euc", line]], env=env).wait()


@pytest.fixture
def stand_in(launch, tmp_path):
    return StandIn(launch, tmp_path)


WITHOUT_PACKAGES = f'exec {shlex.quote(sys.executable)} -S "$@"\n'


def python_of_version(numbers):
    """A program that is Python as it would be in another version."""
    pretend = f"import sys; sys.version_info = {numbers}; exec(sys.argv.pop(1))"
    return f'shift; exec {shlex.quote(sys.executable)} -c {shlex.quote(pretend)} "$@"\n'


@pytest.mark.parametrize("half_made", quick_for((True, False), True))
def test_env_sh_makes_a_venv_where_packages_lack(stand_in, half_made):
    """From requirements.txt, here an empty one. A half-made .venv has no pip: so python3 -m venv
    leaves it where Debian's package python3-venv is missing.
    """
    stand_in.add("python", WITHOUT_PACKAGES)
    if half_made:
        command = [sys.executable, "-m", "venv", "--without-pip", stand_in.folder / ".venv"]
        subprocess.check_call(command)
    run = stand_in.run("source scripts/env.sh; which python pip", NPROC="2").succeeded()
    folder = stand_in.folder / ".venv" / "bin"
    assert run.out.split() == [str(folder / "python"), str(folder / "pip")]
    assert run.err.startswith("torch is missing: installing torch"), run.story()


def write_metadata(folder, name, version):
    """Makes Python find this version of a package, for a folder on its path."""
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.write_text(f"Name: {name}\nVersion: {version}\n")


OLD_PYTHON = "Python 3.9 is older than 3.10"


@pytest.mark.parametrize(
    "reason", ["torch is missing", "torch 2.1.2 is older than 2.8", OLD_PYTHON]
)
def test_env_sh_installs_nothing_inside_a_slurm_job(stand_in, reason):
    """One line says what is missing and where to find it; .venv is not made."""
    if reason == OLD_PYTHON:
        for program in ("python", "python3"):
            stand_in.add(program, python_of_version((3, 9, 2)))
    elif "older" in reason:
        write_metadata(stand_in.folder / "site", "torch", "2.1.2")
    else:
        stand_in.add("python", WITHOUT_PACKAGES)
    settings = {"SLURM_JOB_ID": "1", "PYTHONPATH": str(stand_in.folder / "site"), "NPROC": "2"}
    run = stand_in.run("source scripts/env.sh", **settings)
    assert run.codes == [1] and run.err.count("\n") == 1, run.story()
    assert run.err.startswith(f"{reason}, and inside a Slurm job nothing is installed")
    cures = ("module load", "PYTHON", "conda", ".venv")
    assert all(cure in run.err for cure in cures), run.story()
    assert not (stand_in.folder / ".venv").exists()


@pytest.mark.parametrize("job", ["", "1"])
@pytest.mark.parametrize("sign", ["rocm-smi", "ROCM_PATH"])
def test_env_sh_installs_nothing_beside_amd_gpus(stand_in, sign, job):
    """The torch that pip finds by itself would train on the CPU. Also in a job, where the other
    line would send users to the login node, to install just that.
    """
    stand_in.add("python", WITHOUT_PACKAGES)
    settings = {"SLURM_JOB_ID": job, "NPROC": "2"}
    if sign == "rocm-smi":
        stand_in.add("rocm-smi", "exit 0\n")
    else:
        (stand_in.folder / "rocm").mkdir()
    run = stand_in.run("source scripts/env.sh", **settings)
    assert run.codes == [1] and run.err.count("\n") == 1, run.story()
    assert run.err.startswith("torch is missing, and for AMD's GPUs nothing is installed")
    cures = ("module load", "PYTHON", "https://pytorch.org/get-started/locally/")
    assert all(cure in run.err for cure in cures), run.story()
    assert not (stand_in.folder / ".venv").exists()


def test_env_sh_takes_the_torch_that_is_active_beside_amd_gpus(stand_in):
    """A build for ROCm is found as any other."""
    stand_in.add("rocm-smi", "exit 0\n")
    write_metadata(stand_in.folder / "site", "torch", "2.10.0+rocm7.0")
    settings = {"PYTHONPATH": str(stand_in.folder / "site"), "NPROC": "2"}
    assert stand_in.run("source scripts/env.sh", **settings).succeeded().err == ""


def test_env_sh_takes_a_newer_torch(stand_in):
    """2.10 is newer than 2.8, and an addition such as +cu132 is no number."""
    write_metadata(stand_in.folder / "site", "torch", "2.10.0a0+cu132")
    settings = {"PYTHONPATH": str(stand_in.folder / "site"), "NPROC": "2"}
    assert stand_in.run("source scripts/env.sh", **settings).succeeded().err == ""


def test_env_sh_says_that_python_is_too_old(stand_in):
    """Where the active Python is, and the one that would make .venv."""
    for program in ("python", "python3"):
        stand_in.add(program, python_of_version((3, 9, 2)))
    run = stand_in.run("source scripts/env.sh", NPROC="2")
    assert run.codes == [1]
    assert run.err == f"{OLD_PYTHON}: the scripts need Python 3.10 or newer\n"
    assert not (stand_in.folder / ".venv").exists()


def test_env_sh_refuses_other_shells(stand_in):
    """zsh has no BASH_SOURCE, and .venv would come into the folder above the repository."""
    run = stand_in.run("unset BASH_VERSION; source scripts/env.sh")
    assert run.codes == [1] and run.err.startswith("scripts/env.sh works in bash alone")


def test_env_sh_counts_the_gpus_that_torch_sees(stand_in):
    """Without nvidia-smi too, as on a machine with AMD's GPUs."""
    settings = stand_in.add_torch(8) | {"NPROC": ""}
    run = stand_in.run("source scripts/env.sh; echo $NPROC", **settings).succeeded()
    assert run.out == "8\n"


def test_env_sh_counts_cores_without_nproc(stand_in):
    """As on macOS."""
    for program in ("env", "getconf"):
        (stand_in.folder / "bin" / program).symlink_to(shutil.which(program))
    run = stand_in.run("source scripts/env.sh; PATH=$PWD/bin; core_count", NPROC="2").succeeded()
    assert int(run.out) == os.cpu_count()


def test_set_threads_shares_the_cores_again_unless_they_were_asked_for(stand_in):
    show = "source scripts/env.sh; set_threads 2 8; set_threads 16 8; set_threads 3 8"
    show += "; echo $OMP_NUM_THREADS"
    assert stand_in.run(show, NPROC="1", OMP_NUM_THREADS="").succeeded().out == "2\n"
    assert stand_in.run(show, NPROC="1", OMP_NUM_THREADS="5").succeeded().out == "5\n"


def test_tcp_sh_does_not_rely_on_wait_n(stand_in):
    """bash can forget a rank that ends at the same moment as another: wait -n then says 127."""
    stand_in.add("python", StandIn.TRAINS)
    forget = 'wait() { [ "${1:-}" != -n ] || { builtin wait -n; return 127; }; builtin wait "$@"; }'
    (stand_in.folder / "forget").write_text(forget)
    run = stand_in.run(
        "bash scripts/mnmc_ddp_tcp.sh", NPROC="3", BASH_ENV=f"{stand_in.folder}/forget"
    )
    assert run.succeeded().out.count("epoch 1/1") == 3


@pytest.mark.parametrize("launcher", ["mnmc_ddp_tcp.sh", "mnmc_ddp_mp.sh"])
def test_ranks_of_one_machine_meet_in_a_new_file(stand_in, launcher):
    """No port, which somebody else could take first; tcp.sh deletes the file."""
    stand_in.add("python", StandIn.TRAINS)
    line = f"bash scripts/{launcher}"
    run = stand_in.run(f"{line}; {line}", NPROC="2", TMPDIR=str(stand_in.folder)).succeeded()
    files = re.findall(r"--init-method file://(\S+)", run.out)
    assert len(set(files)) == 2 and all(f.startswith(f"{stand_in.folder}/") for f in files)
    if launcher == "mnmc_ddp_tcp.sh":
        assert len(files) == 4 and not any(os.path.exists(file) for file in files)


@pytest.mark.parametrize("setting", quick_for(["", "1"], ""))
def test_run_all_starts_a_job_only_when_asked(stand_in, setting):
    """Also on a login node, where a controller answers; a single process has all cores."""
    for program in ("python", "torchrun"):
        stand_in.add(program, StandIn.TRAINS)
    stand_in.add("scontrol", "exit 0\n")
    stand_in.add("srun", f"echo a job of Slurm\n{StandIn.TRAINS}")
    settings = stand_in.add_torch(0) | {"SRUN": setting, "OMP_NUM_THREADS": ""}
    run = stand_in.run("bash scripts/run_all.sh", **settings).succeeded()
    assert ("a job of Slurm" in run.out) == (setting == "1"), run.story()
    last = "srun " if setting else "torchrun (SRUN=1: srun) "
    assert run.out.splitlines()[-1].startswith(f"mnmc_ddp_slurm.py  {last}")
    threads = [int(number) for number in re.findall(r"threads (\d+) argv", run.out)]
    cores = len(os.sched_getaffinity(0))
    assert threads[:2] == [cores] * 2 and set(threads[2:]) == {max(1, cores // 2)}


@pytest.mark.parametrize("option", ["--checkpoint last.pt", "--check=last.pt"])
def test_run_all_refuses_one_checkpoint_for_six_scripts(stand_in, option):
    run = stand_in.run(f"bash scripts/run_all.sh --amp {option}")
    assert run.codes == [2] and run.err.startswith("--checkpoint names one file"), run.story()


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("gpu", True),
        ("gpu and not slow", True),
        ("not gpu", False),
        ("not slow and not stress", False),
        ("gpu or slow", False),
        ("", False),
    ],
)
def test_gpus_are_visible_to_tests_of_gpus_alone(expression, wanted):
    assert wants_gpus(expression) == wanted


def test_env_sh_keeps_what_is_set(launch):
    show = "source scripts/env.sh; echo $NPROC $OMP_NUM_THREADS $MALLOC_TRIM_THRESHOLD_"
    env = {"NPROC": "5", "OMP_NUM_THREADS": "7", "MALLOC_TRIM_THRESHOLD_": "9"}
    assert launch([["bash", "-euc", show]], env=env).succeeded().out == "5 7 9\n"


def test_env_sh_counts_its_own_threads_anew(launch):
    """Sourced for two processes, then for one: all cores, as if it had not been sourced before."""
    show = "NPROC=1; source scripts/env.sh; echo $OMP_NUM_THREADS"
    twice = f"NPROC=1000; source scripts/env.sh; echo $OMP_NUM_THREADS; {show}"
    env = {"OMP_NUM_THREADS": ""}
    first, again = (
        launch([["bash", "-euc", script]], env=env).succeeded() for script in (show, twice)
    )
    assert again.out == f"1\n{first.out}"
