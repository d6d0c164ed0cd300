"""The shell launchers in scripts/, and what they source and call."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import psutil
import pytest
from launch import REPO, SCRIPTS, page_output, shape

ONE_EPOCH = ["--dataset", "synthetic", "--epochs", "1"]


@pytest.mark.slow
def test_progress_is_written_into_a_log_file(launch):
    """By rank 0. The intervals that the user has set are kept; those of env.sh are a minute."""
    settings = {"TQDM_DELAY": "0", "TQDM_MININTERVAL": "0.2", "NPROC": "2"}
    run = launch([["bash", REPO / "scripts/mnmc_ddp_env.sh", *ONE_EPOCH]], env=settings)
    assert len(re.findall(r"\d+%\|.*it/s", run.succeeded().err)) >= 2, run.story()
    assert len(re.findall(r" 0%\|", run.err)) == 1, run.story()


@pytest.mark.slow
def test_run_all_ends_with_a_row_for_each_script(launch):
    """The main job; before the six rows stands one process with one core."""
    run = launch([["bash", REPO / "scripts/run_all.sh"]], env={"SRUN": ""}).succeeded(560)
    assert [row[:2] for row in run.inits()] == [(0, 2)] * 4 + [(1, 2)] * 4
    assert [line["count"] for line in run.epochs()] == [2000] * 7
    assert run.own_err() == "", run.story()
    (shown,) = page_output("README.md", "One command")
    table = run.out[run.out.rindex("\nscript ") + 1 :].splitlines()[:8]
    assert [shape(line) for line in shown.splitlines()] == [shape(line) for line in table]
    assert all(float(accuracy) > 95 for accuracy in re.findall(r" ([\d.]+)% ", "".join(table)))


class StandIn:
    """A folder with scripts/ that stands for the repository, and programs that stand for others."""

    # A python that runs `-c`, and says of a script what a training says.
    TRAINS = f"""case "$1" in -c) exec {shlex.quote(sys.executable)} "$@" ;; esac
echo "threads $OMP_NUM_THREADS on $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME argv $*"
echo "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
echo "epoch 1/1 | train loss 0.1 acc 90.00% | test acc 90.00% (9/10) | 10 img/s | 1.0 s"
"""
    WITHOUT_PACKAGES = f'exec {shlex.quote(sys.executable)} -S "$@"\n'

    def __init__(self, launch, folder):
        self.launch, self.folder = launch, folder
        shutil.copytree(REPO / "scripts", folder / "scripts")
        (folder / "requirements.txt").write_text("")
        (folder / "bin").mkdir()

    def add(self, program, text):
        (self.folder / "bin" / program).write_text(f"#!/bin/sh\n{text}")
        (self.folder / "bin" / program).chmod(0o755)

    def add_module(self, name, text=""):
        """Stands for an installed package, which no test here can install."""
        (self.folder / "site").mkdir(exist_ok=True)
        (self.folder / "site" / f"{name}.py").write_text(text)

    def run(self, line, **env):
        """Runs a line of bash in the folder; returns the launch when it has ended."""
        line = f"PATH={self.folder}/bin:$PATH; cd {self.folder}; {line}"
        # This machine may have AMD's GPUs, and the tests may run in an environment.
        env = {"ROCM_PATH": str(self.folder / "rocm"), "VIRTUAL_ENV": "", "NPROC": "2"} | env
        env |= {"PYTHONPATH": str(self.folder / "site")}
        return self.launch([["bash", "-euc", line]], env=env).wait()


@pytest.fixture
def stand_in(launch, tmp_path):
    return StandIn(launch, tmp_path)


@pytest.mark.parametrize(
    ("job", "cure"), [("", "bash scripts/setup.sh"), ("1", "on the login node")]
)
def test_launcher_in_a_bare_clone_says_what_to_type(stand_in, job, cure):
    """In one line, and it installs nothing."""
    stand_in.add("python", stand_in.WITHOUT_PACKAGES)
    run = stand_in.run("bash scripts/snsc.sh", SLURM_JOB_ID=job)
    assert run.codes == [1] and run.err.count("\n") == 1, run.story()
    assert run.err.startswith("torch is missing: type ") and cure in run.err
    assert not (stand_in.folder / ".venv").exists()


@pytest.mark.parametrize(
    ("version", "says"),
    [("2.1.2", "torch 2.1.2 is older than 2.8: type "), ("2.10.0a0+cu132", "")],
)
def test_env_sh_compares_versions_of_torch(stand_in, version, says):
    metadata = stand_in.folder / "site" / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Name: torch\nVersion: {version}\n")
    run = stand_in.run("source scripts/env.sh")
    assert run.codes == [bool(says)] and run.err[: len(says) or None] == says, run.story()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("source scripts/env.sh", "Python 3.9 is older than 3.10: type "),
        ("bash scripts/setup.sh", "the scripts need Python 3.10 or newer"),
    ],
)
def test_old_python_is_refused(stand_in, line, says):
    change = "import sys; sys.version_info = (3, 9, 2); exec(sys.argv.pop(1))"
    for program in ("python", "python3"):  # called with -c and a program
        text = f'shift; exec {shlex.quote(sys.executable)} -c {shlex.quote(change)} "$@"\n'
        stand_in.add(program, text)
    run = stand_in.run(line)
    assert run.codes == [1] and run.err.startswith(says), run.story()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("local_slurm.sh start", "this needs slurm-wlm and munge (as root: apt-get install"),
        ("two_hosts.sh mnmc_ddp_tcp.py", "two_hosts.sh needs root and the package iproute2"),
    ],
)
def test_what_needs_packages_names_them(launch, tmp_path, command, message):
    """The words of two_hosts.sh are the same without root."""
    for program in ("bash", "id", "realpath"):
        (tmp_path / program).symlink_to(shutil.which(program))
    script, argument = command.split()
    text = (REPO / "scripts" / "cluster" / script).read_text()
    (tmp_path / script).write_text(text.replace('PATH="$PATH:/usr/sbin:/sbin"\n', ""))
    run = launch([["env", f"PATH={tmp_path}", "bash", tmp_path / script, argument]]).wait()
    assert run.codes == [1] and run.err.count("\n") == 1, run.story()
    assert run.err.startswith(message), run.story()


@pytest.mark.slow
def test_setup_sh_completes_a_venv(stand_in):
    """With what requirements.txt lists, here nothing. This .venv has no pip: so python3 -m venv
    leaves it where Debian's package python3-venv is missing.
    """
    stand_in.add("python", stand_in.WITHOUT_PACKAGES)
    command = [sys.executable, "-m", "venv", "--without-pip", stand_in.folder / ".venv"]
    subprocess.check_call(command)
    for name in ("torch", "torchvision"):
        stand_in.add_module(name)
    run = stand_in.run("bash scripts/setup.sh").succeeded()
    assert run.err.startswith("torch is missing: installing torch"), run.story()
    assert (stand_in.folder / ".venv/bin/pip").exists()


def test_setup_sh_installs_into_the_active_environment(stand_in):
    stand_in.add(
        "python", f'case "$*" in *pip*) echo "$*" ;; *) {stand_in.WITHOUT_PACKAGES} ;; esac'
    )
    for name in ("torch", "torchvision"):
        stand_in.add_module(name)
    run = stand_in.run("bash scripts/setup.sh", VIRTUAL_ENV="/some/where").succeeded()
    assert run.out == "-m pip install --quiet -r requirements.txt\n"
    assert not (stand_in.folder / ".venv").exists()


def test_setup_sh_says_what_to_do_about_a_pair_that_cannot_be_imported(stand_in):
    """As of torch for CPUs and a torchvision for CUDA: in one line below its first."""
    stand_in.add("python", f'case "$*" in *pip*) ;; *) {stand_in.WITHOUT_PACKAGES} ;; esac')
    stand_in.add_module("torch")
    message = "operator torchvision::nms does not exist"
    stand_in.add_module("torchvision", f'raise RuntimeError("{message}")\n')
    run = stand_in.run("bash scripts/setup.sh", VIRTUAL_ENV="/some/where")
    assert run.codes == [1] and run.err.count("\n") == 2, run.story()
    cure = "python -m pip uninstall --yes torch torchvision && bash scripts/setup.sh\n"
    assert f"(RuntimeError: {message}): type  {cure}" in run.err


def test_setup_sh_installs_nothing_beside_amd_gpus(stand_in):
    """The torch that pip finds by itself would train on the CPU. A torch that is there is taken."""
    (stand_in.folder / "rocm").mkdir()
    assert stand_in.run("bash scripts/setup.sh").succeeded().err == ""
    stand_in.add("python", stand_in.WITHOUT_PACKAGES)
    run = stand_in.run("bash scripts/setup.sh")
    assert run.codes == [1] and run.err.count("\n") == 1, run.story()
    assert run.err.startswith("torch is missing, and for AMD's GPUs nothing is installed")


def test_env_sh_refuses_other_shells(stand_in):
    """zsh has no BASH_SOURCE, and REPO would be the folder above the repository."""
    run = stand_in.run("unset BASH_VERSION; source scripts/env.sh")
    assert run.codes == [1] and run.err.startswith("scripts/env.sh works in bash alone")


def test_env_sh_counts_the_gpus_that_torch_sees(stand_in):
    """Where there is a driver: importing torch takes seconds."""
    stand_in.add("nvidia-smi", "exit 0\n")
    stand_in.add_module("torch", "class cuda:\n    device_count = staticmethod(lambda: 8)\n")
    run = stand_in.run("source scripts/env.sh; echo $NPROC", NPROC="").succeeded()
    assert run.out == "8\n"


def test_env_sh_sets_what_is_not_set(stand_in):
    names = "NPROC OMP_NUM_THREADS MALLOC_TRIM_THRESHOLD_ MALLOC_MMAP_THRESHOLD_ TQDM_DELAY"
    names = f"{names} TQDM_MININTERVAL TQDM_MAXINTERVAL".split()
    show = f"source scripts/env.sh; echo {' '.join(f'${name}' for name in names)}"
    mine = {name: str(number) for number, name in enumerate(names, 3)}
    assert stand_in.run(show, **mine).succeeded().out == "3 4 5 6 7 8 9\n"
    run = stand_in.run(show, **dict.fromkeys(names, ""), CUDA_VISIBLE_DEVICES="").succeeded()
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert run.out == f"2 {threads} 1000000000 1000000000 60 60 60\n"


def test_env_sh_shares_the_cores_again_unless_threads_were_asked_for(stand_in):
    """Sourced for many processes, then for one: as if it had not been sourced before."""
    show = "NPROC=1000; source scripts/env.sh; NPROC=1; source scripts/env.sh"
    show += "; echo $OMP_NUM_THREADS; set_threads 2 8; set_threads 3 8; echo $OMP_NUM_THREADS"
    cores = len(os.sched_getaffinity(0))
    assert stand_in.run(show, OMP_NUM_THREADS="").succeeded().out == f"{cores}\n2\n"
    assert stand_in.run(show, OMP_NUM_THREADS="5").succeeded().out == "5\n5\n"


def test_env_sh_starts_fewer_threads_on_a_busy_machine(stand_in, launch):
    """None of them spins. It says so, keeps what you have set, and decides again when asked."""
    show = "echo $OMP_NUM_THREADS ${OMP_WAIT_POLICY:-idle}"
    line = f"source scripts/env.sh; {show}; is_busy() {{ false; }}; adapt_to_load; {show}"
    cores = len(os.sched_getaffinity(0))
    env = {"NPROC": "1", "OMP_NUM_THREADS": "", "GOMP_SPINCOUNT": ""}
    with launch([[sys.executable, "-c", "while True: pass"]] * cores):
        run = stand_in.run(line, OMP_WAIT_POLICY="", **env).succeeded()
        mine = stand_in.run(line, OMP_WAIT_POLICY="active", **env).succeeded()
    (threads, policy), later = (shown.split() for shown in run.out.splitlines())
    assert policy == "passive" and int(threads) <= max(1, cores // 2), run.story()
    assert later == [str(cores), "idle"] and run.err.startswith("this machine is busy")
    assert mine.out == f"{cores} active\n" * 2 and mine.err == ""


ENDINGS = [("one rank is killed", 137), ("SIGTERM", 143), ("SIGKILL", -9)]


@pytest.mark.parametrize(("ending", "status"), ENDINGS)
def test_tcp_sh_ends_all_ranks(stand_in, ending, status):
    """With the status of the rank that failed. SIGTERM also reaches a rank that is stopped.

    They meet in a new file, which is deleted: no port, which somebody else could take first.
    """
    pause = f'exec {shlex.quote(sys.executable)} -c "import signal; signal.pause()" "$@"'
    stand_in.add("python", f"{stand_in.TRAINS}{pause}")
    line = f"cd {stand_in.folder}; PATH=$PWD/bin:$PATH; exec bash scripts/mnmc_ddp_tcp.sh"
    temporary = stand_in.folder / "temporary"
    temporary.mkdir()
    env = {"NPROC": "3", "TMPDIR": str(temporary)}
    run = stand_in.launch([["bash", "-c", line]], env=env)
    run.wait_for(lambda: len(run.epochs()) == 3, 60, "three ranks")
    (meeting_point,) = temporary.iterdir()
    assert run.out.count(f"--init-method file://{meeting_point} ") == 3, run.story()
    rank = psutil.Process(run.pid_of(1))
    if ending == "SIGTERM":
        rank.suspend()
        run.wait_for(lambda: rank.status() == psutil.STATUS_STOPPED, 10, "rank 1 to stop")
        run.processes[0].terminate()
    elif ending == "SIGKILL":
        if not shutil.which("setpriv"):
            pytest.skip("no setpriv: apt-get install util-linux")
        run.processes[0].kill()
    else:
        rank.kill()
    assert run.wait(30).codes == [status]
    run.wait_for(lambda: not run.pids(), 10, "all ranks to be gone")
    assert ending == "SIGKILL" or not meeting_point.exists()


@pytest.mark.parametrize("setting", ["", "1"])
def test_run_all_starts_a_job_only_when_asked(stand_in, setting):
    """Also on a login node, where a controller answers; a single process has all cores."""
    for program in ("python", "torchrun"):
        stand_in.add(program, stand_in.TRAINS)
    stand_in.add("scontrol", "exit 0\n")
    stand_in.add("srun", f"echo a job of Slurm\n{stand_in.TRAINS}")
    settings = {"SRUN": setting, "OMP_NUM_THREADS": "", "CUDA_VISIBLE_DEVICES": ""}
    settings |= {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}
    run = stand_in.run("bash scripts/run_all.sh", **settings).succeeded()
    assert ("a job of Slurm" in run.out) == (setting == "1"), run.story()
    table = run.out[run.out.rindex("\nscript ") + 1 :].splitlines()[1:8]
    assert [row.split()[0] for row in table] == ["snsc.py", *SCRIPTS]
    last = "srun " if setting else "torchrun (SRUN=1: srun) "
    assert table[-1].startswith(f"mnmc_ddp_slurm.py  {last}")
    threads = [int(number) for number in re.findall(r"threads (\d+) on", run.out)]
    cores = len(os.sched_getaffinity(0))
    assert threads[:3] == [1, cores, cores] and set(threads[3:]) == {max(1, cores // 2)}
    # Of the ranks by hand, and of those that are spawned, no other machine reaches a port.
    assert re.findall(r"on lo lo argv \S+/(\w+).py", run.out) == 2 * ["mnmc_ddp_tcp"] + [
        "mnmc_ddp_mp"
    ]


def test_mnmc_ddp_env_sh_lets_torchrun_start_ranks_again(stand_in):
    """With the variable without which they would find the addresses of the dead."""
    stand_in.add("torchrun", stand_in.TRAINS)
    run = stand_in.run("bash scripts/mnmc_ddp_env.sh", MAX_RESTARTS="1").succeeded()
    assert " argv --standalone --local-addr 127.0.0.1 --max-restarts 1 " in run.out
    assert "\n1\n" in run.out, run.story()


@pytest.mark.slow
def test_machine_that_does_not_know_its_own_name_trains(launch):
    """By the README's bare torchrun after env.sh, and by the launcher."""
    if os.getuid() != 0:
        pytest.skip("needs root, to give a name that nobody knows to a namespace of its own")
    options = "--dataset synthetic --epochs 0 --timeout 30"
    lines = "hostname a-name-that-nobody-knows; source scripts/env.sh; "
    lines += f"torchrun --standalone --nproc-per-node 2 mnmc_ddp_env.py {options}; "
    lines += f"env -u PET_LOCAL_ADDR bash scripts/mnmc_ddp_env.sh {options}"
    run = launch([["unshare", "--uts", "bash", "-ec", lines]], env={"NPROC": "2"}).succeeded(60)
    assert [row[:2] for row in run.inits()] == [(0, 2)] * 2 + [(1, 2)] * 2, run.story()


def test_mnmc_ddp_env_sh_passes_on_the_numbers_of_several_nodes(stand_in):
    stand_in.add("torchrun", stand_in.TRAINS)
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29501"}
    out = stand_in.run("bash scripts/mnmc_ddp_env.sh --seed 3", **nodes).succeeded().out
    options = "--nnodes 2 --node-rank 1 --master-addr 192.0.2.1 --master-port 29501"
    script = stand_in.folder / "mnmc_ddp_env.py"
    assert f" argv {options} --nproc-per-node 2 {script} --seed 3\n" in out


def test_run_all_ends_at_the_first_script_that_fails(stand_in):
    stand_in.add("python", f'{stand_in.TRAINS}case "$1" in *snmc_dp.py) exit 3 ;; esac\n')
    run = stand_in.run("bash scripts/run_all.sh", CUDA_VISIBLE_DEVICES="")
    assert run.codes == [1] and run.err == "snmc_dp.py failed: its output is above\n"
    assert "mnmc_ddp_tcp.py" not in run.out and "launched by  " not in run.out


@pytest.mark.parametrize("option", ["--checkpoint last.pt", "--check=last.pt"])
def test_run_all_refuses_one_checkpoint_for_six_scripts(stand_in, option):
    run = stand_in.run(f"bash scripts/run_all.sh --amp {option}")
    assert run.codes == [2] and run.err.startswith("--checkpoint names one file"), run.story()
