"""On a real Slurm of two virtual nodes: srun, sbatch, scancel, requeue, time limit."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import update_pages
from launch import REPO, Launch, marked_pids, page_commands, quick_for, shape, without_gloo_lines

import mnmc_ddp_slurm

PAGE, SECTION = "docs/clusters.md", "Slurm on your laptop, then on the cluster"
BLOCKS = update_pages.read_blocks((REPO / PAGE).read_text())
OPTIONS = ("--dataset", "synthetic", "-e", "3", "-b", "125")
BATCH = "scripts/mnmc_ddp_slurm.sbatch"
MISSING = [name for name in ("slurmctld", "munged", "srun") if not shutil.which(name)]


class Cluster:
    """scripts/lab/local_slurm.sh in a folder of its own."""

    def __init__(self, **settings):
        if MISSING:
            pytest.skip(f"no {MISSING[0]}: apt-get install slurm-wlm munge")
        self.folder = Path(tempfile.mkdtemp(prefix="slurm")) / "cluster"  # short: it has a socket
        self.mark = f"DDP_TEST_CLUSTER={self.folder}"
        self.settings = os.environ | {"LOCAL_SLURM": str(self.folder)} | settings
        self.settings |= {"DDP_TEST_CLUSTER": str(self.folder)}
        self.env = {"SLURM_CONF": f"{self.folder}/slurm.conf", "MASTER_ADDR": "127.0.0.1"}
        says = f"export SLURM_CONF={self.folder}/slurm.conf MASTER_ADDR=127.0.0.1\n"
        assert self.run("start") == says

    def run(self, what):
        command = ["bash", REPO / "scripts" / "lab" / "local_slurm.sh", what]
        return subprocess.check_output(command, env=self.settings, text=True, timeout=90)

    def ask(self, *command):
        """The output of a Slurm command, without the line's end."""
        return subprocess.check_output(
            command, env=os.environ | self.env, text=True, timeout=60
        ).strip()

    def stop(self):
        self.run("stop")
        self.folder.parent.rmdir()  # fails when anything is left in it


@pytest.fixture(scope="module")
def cluster():
    one = Cluster(NODES="2", CPUS="4")
    yield one
    one.stop()


def stand_in(folder):
    """Makes a folder stand for the repository, so that what a job writes is not in that one."""
    (folder / "scripts" / "lab").mkdir(parents=True)
    for path in ("mnmc_ddp_slurm.py", "scripts/env.sh", "scripts/lab/local_slurm.sh", BATCH):
        (folder / path).symlink_to(REPO / path)
    return folder


class Job(Launch):
    """sbatch of scripts/mnmc_ddp_slurm.sbatch, from a folder that stands for the repository."""

    def __init__(self, cluster, folder, *options, before=(), change=lambda text: text):
        batch = stand_in(folder) / BATCH
        batch.unlink()
        batch.write_text(change((REPO / BATCH).read_text()))
        command = ["sbatch", "--wait", *before, BATCH, *options]
        super().__init__([command], folder / "output", env=cluster.env, cwd=folder)
        self.cluster, self.folder, self.number = cluster, folder, None
        submitted = re.compile(r"Submitted batch job (\d+)")
        try:
            self.wait_for(lambda: submitted.search(super(Job, self).out), 30, "sbatch to submit")
        except BaseException:
            self.__exit__()
            raise
        self.number = submitted.search(super().out)[1]

    @property
    def out(self):
        """What the job wrote into slurm-<job id>.out, both streams."""
        path = self.folder / f"slurm-{self.number}.out"
        return without_gloo_lines(path.read_text()) if path.exists() else ""

    def story(self):
        return f"{super().story()}\n--- slurm-{self.number}.out\n{self.out}"

    def state(self):
        return self.cluster.ask("squeue", "--noheader", "--format", "%T", "--job", self.number)

    def start_again(self):
        """Waits until the requeued job may start, and lets it: by itself it waits two minutes."""
        self.wait_for(lambda: self.state() == "PENDING", 60, "the job to be in the queue again")
        self.cluster.ask("scontrol", "update", f"JobId={self.number}", "StartTime=now")


@pytest.fixture(scope="module")
def finished(cluster, tmp_path_factory):
    """Two jobs of 2 x 2 tasks that ran to completion at the same time, on the same nodes."""
    with contextlib.ExitStack() as stack:
        folders = [tmp_path_factory.mktemp("job") for _ in range(2)]
        jobs = [stack.enter_context(Job(cluster, folder, *OPTIONS)) for folder in folders]
        jobs[0].wait_for(jobs[0].epochs, 120, "an epoch")
        assert [job.state() for job in jobs] == ["RUNNING"] * 2, jobs[0].story()
        return [job.succeeded() for job in jobs]


def check_alike(resumed, undisturbed):
    """All epochs once, and the same result; with four ranks not to the bit: within a per cent."""
    ours, theirs = resumed.epochs(), undisturbed.epochs()
    assert [line["epoch"] for line in ours] == [line["epoch"] for line in theirs], resumed.story()
    assert resumed.out.count("resumed ") == 1, resumed.story()
    for name in ("train", "test"):
        assert abs(ours[-1][name] - theirs[-1][name]) < 1, resumed.story()


@pytest.mark.slow
def test_sbatch_runs_to_completion_beside_another_job(finished):
    metrics = [job.metrics() for job in finished]
    assert metrics[0] == metrics[1]
    for job in finished:
        assert [row[:3] for row in job.inits()] == [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)]
        assert [line["epoch"] for line in job.epochs()] == [1, 2, 3]
        assert len(job.out.splitlines()) == 4 + 3, job.story()  # and no warning
        assert (job.folder / "checkpoints" / job.number / "last.pt").exists()


@pytest.mark.slow
def test_section_of_the_page_runs_as_it_stands(tmp_path):
    """Start, srun, sbatch, status and stop, one after the other."""
    if MISSING:
        pytest.skip(f"no {MISSING[0]}: apt-get install slurm-wlm munge")
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    lines = page_commands(PAGE, SECTION)
    words = [line.split()[0] for line in lines]
    assert words == ["eval", "srun", "sbatch", "cat", "bash", "eval"]
    command = ["bash", "-ec", "\n".join(lines)]
    env = {"LOCAL_SLURM": f"{folder}/cluster"}
    with Launch([command], tmp_path / "output", env=env, cwd=stand_in(tmp_path / "repo")) as run:
        run.succeeded()
        assert len(run.inits()) == 2 * 4 and len(run.epochs()) == 2, run.story()
        printed = [shape(line) for line in run.out.splitlines()]
        (shown,) = (b.code for b in BLOCKS if b.heading == SECTION and b.language == "text")
        assert {shape(line) for line in shown.splitlines()} <= set(printed), run.story()
        assert re.search(r"^n1 .* idle ", run.out, re.MULTILINE), run.story()
    folder.rmdir()  # fails when stop left something


@pytest.mark.slow
def test_command_line_overrides_the_batch_file(cluster, tmp_path):
    """One node with one torchrun, the form that the comment shows, on the second node."""

    def torchrun(text):
        start = text.index("srun --cpus-per-task")
        comment = text.index("# srun --ntasks")
        end = text.index('\n\nwait "$!"')
        form = re.sub("^# ", "", text[comment:end], flags=re.MULTILINE)
        return text[:start] + form + text[end:]

    before = ("--nodes", "1", "--nodelist", "n1", "--job-name", "other")
    options = ("--dataset", "synthetic", "-e", "1")
    with Job(cluster, tmp_path, *options, before=before, change=torchrun) as job:
        job.succeeded()
        assert [row[:3] for row in job.inits()] == [(0, 2, 0), (1, 2, 1)], job.story()
        assert job.epochs()[0]["count"] == 2000


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


SHOW = """
import os
import mnmc_ddp_slurm
mnmc_ddp_slurm.read_slurm()
env = os.environ
slurm = (env["SLURM_PROCID"], env["SLURM_LOCALID"], env["SLURM_NTASKS"], env["SLURM_JOB_ID"])
print(f"got {env['RANK']} {env['LOCAL_RANK']} {env['WORLD_SIZE']} {env['MASTER_ADDR']} "
      f"{env['MASTER_PORT']} of {' '.join(slurm)}\\n", end="", flush=True)
"""


def test_ranks_and_address_are_what_slurm_gave(cluster, tmp_path):
    """On the second node, so that the address is not that of the cluster's first node."""
    command = ["srun", "--nodelist", "n1", "--ntasks-per-node", 2, "python", "-c", SHOW]
    env = {"SLURM_CONF": cluster.env["SLURM_CONF"]}  # without MASTER_ADDR
    with Launch([command], tmp_path, env=env) as run:
        run.succeeded()
        rows = sorted(re.findall(r"^got (.*) of (\d+) (\d+) (\d+) (\d+)$", run.out, re.MULTILINE))
        assert len(rows) == 2, run.story()
        for got, rank, local_rank, world_size, job in rows:
            port = 10000 + int(job) % 20000
            assert got == f"{rank} {local_rank} {world_size} n1 {port}"


def test_controller_is_not_asked(tmp_path, monkeypatch):
    """A step's first node is found where no controller answers: 512 tasks ask nobody."""
    if MISSING:
        pytest.skip(f"no {MISSING[0]}: apt-get install slurm-wlm munge")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # what is set here is put back
        monkeypatch.delenv(name)
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=192.0.2.1\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    for name, value in (
        TASK | {"SLURM_STEP_NODELIST": "gpu[07-09],cpu1", "SLURM_LOCALID": "3"}
    ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    threads = torch.get_num_threads()
    mnmc_ddp_slurm.read_slurm()
    torch.set_num_threads(threads)
    assert os.environ["MASTER_ADDR"] == "gpu07"
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["7", "3", "8"]


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
    said = "cannot be read as a checkpoint"
    if fails == "download":
        (tmp_path / "file").write_text("not a folder")
        options, said = ["--data-root", tmp_path / "file"], "cannot load mnist"
    elif fails == "load":
        path.write_bytes(b"no checkpoint")
    else:
        (tmp_path / "last.pt.tmp").mkdir()
        said = "in save_checkpoint"
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
        assert said in run.err and run.epochs() == [], run.story()
        run.wait_for(lambda: not run.pids(), 10, "all tasks to be gone")


@pytest.mark.slow
def test_scancel_ends_every_task(cluster, tmp_path):
    with Job(cluster, tmp_path, *OPTIONS[:2], "-e", "1000") as job:
        job.wait_for(job.epochs, 90, "an epoch")
        assert len(job.pids()) >= 4
        cluster.ask("scancel", job.number)
        sbatch = job.processes[0].pid  # It asks for the state of the job every 32 seconds.
        job.wait_for(lambda: set(job.pids()) <= {sbatch}, 30, "all tasks to be gone")
        assert job.wait().codes != [0]


@pytest.mark.slow
def test_killed_task_ends_every_task(cluster, tmp_path):
    """Under plain srun, without --kill-on-bad-exit: the other ranks see it and end."""
    command = ["srun", "-n4", "-N2", "python", "mnmc_ddp_slurm.py", *OPTIONS[:2], "-e", "1000"]
    with Launch([command], tmp_path, env=cluster.env) as run:
        run.wait_for(run.epochs, 90, "an epoch")
        tasks = [pid for pid in run.pids() if b"srun" not in Path(f"/proc/{pid}/comm").read_bytes()]
        os.kill(max(tasks), signal.SIGKILL)
        run.wait_for(lambda: not run.pids(), 30, "all tasks to be gone")
        assert run.wait().codes != [0]


@pytest.mark.slow
def test_requeued_job_goes_on(cluster, finished, tmp_path):
    """scontrol requeue in mid-run: from the last epoch, to the metrics of an undisturbed run."""
    with Job(cluster, tmp_path, *OPTIONS) as job:
        job.wait_for(job.epochs, 90, "an epoch")
        cluster.ask("scontrol", "requeue", job.number)
        job.start_again()
        job.succeeded()
        check_alike(job, finished[0])
        assert len(job.inits()) == 8, job.story()  # four tasks, twice


@pytest.mark.slow
def test_job_at_its_time_limit_goes_on(cluster, launch, tmp_path):
    """USR1 comes ahead of the limit, and the batch file puts the job back into the queue."""
    options = ("--dataset", "synthetic", "-e", "8", "-b", "8")
    undisturbed = launch("mnmc_ddp_slurm.py", 4, *options).succeeded()
    with Job(cluster, tmp_path, *options, before=("--signal", "B:USR1@45")) as job:
        job.wait_for(job.epochs, 90, "an epoch")
        # The limit is lowered in mid-run, so that even a slow machine has an epoch to go on from.
        cluster.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=1")
        job.wait_for(lambda: job.state() == "PENDING", 60, "the job to be in the queue again")
        done = len(job.epochs())
        cluster.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
        job.start_again()
        job.succeeded()
        assert 1 <= done < 8
        check_alike(job, undisturbed)


def test_two_clusters_side_by_side(cluster):
    """The second starts, works and stops without a trace; the first goes on."""
    second = Cluster(NODES="3", CPUS="1")
    env = os.environ | second.env
    count = ["srun", "--nodes", "3", "bash", "-c", "echo $SLURMD_NODENAME $SLURM_JOB_ID"]
    try:
        words = subprocess.check_output(count, env=env, text=True, timeout=60).split()
        assert sorted(words[::2]) == ["n0", "n1", "n2"]
        # The port of a job comes from its number, which must be another one in each cluster.
        ours = cluster.ask("srun", "bash", "-c", "echo $SLURM_JOB_ID")
        assert words[1] != ours and min(int(words[1]), int(ours)) > 1000, (words, ours)
        assert "n2" in second.run("status")
        assert len(marked_pids(second.mark)) >= 5  # munged, slurmctld, three slurmd
    finally:
        second.stop()
    assert marked_pids(second.mark) == []
    assert cluster.ask("srun", "--nodes", "2", "--ntasks", "2", "echo", "up") == "up\nup"


def test_local_slurm_without_root():
    """As another user: start, srun, stop."""
    if MISSING:
        pytest.skip(f"no {MISSING[0]}: apt-get install slurm-wlm munge")
    if os.getuid() != 0:
        pytest.skip("this is not root already: the other tests show it")
    other = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    folder.chmod(0o755)
    shutil.copy(REPO / "scripts" / "lab" / "local_slurm.sh", folder)
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
    command = ["bash", "scripts/lab/local_slurm.sh", "stop"]
    run = launch([command], env={"LOCAL_SLURM": str(tmp_path / "precious")}).wait()
    assert run.codes == [1]
    assert run.err == f"no cluster in {tmp_path}/precious\n"
    assert (tmp_path / "precious").exists()


def test_local_slurm_says_which_packages_are_missing(launch, tmp_path):
    for tool in ("id", "realpath"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    command = [shutil.which("bash"), tmp_path / "local_slurm.sh", "start"]
    text = (REPO / "scripts" / "lab" / "local_slurm.sh").read_text()
    (tmp_path / "local_slurm.sh").write_text(text.replace('PATH="$PATH:/usr/sbin:/sbin"\n', ""))
    run = launch([["env", f"PATH={tmp_path}", *command]]).wait()
    assert run.codes == [1]
    said = "missing packages: slurm-wlm munge (as root: apt-get install slurm-wlm munge)\n"
    assert run.err == said, run.story()


# A task's variables, GPUs that it sees, the backend asked for, and the device that it takes.
TASK = {"SLURM_STEP_NODELIST": "n0", "SLURM_PROCID": "7", "SLURM_NTASKS": "8"}
TASK |= {"SLURM_JOB_ID": "1", "MASTER_ADDR": "n0"}
TORCHRUN = TASK | {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURM_LOCALID": "0"}
GPU_CHOICES = {
    "--gpus-per-node=4": (TASK | {"SLURM_LOCALID": "3"}, 4, None, "cuda:3"),
    "--gpus-per-task=1": (TASK | {"SLURM_LOCALID": "3"}, 1, None, "cuda:0"),
    "CUDA_VISIBLE_DEVICES=0,1": (TASK | {"SLURM_LOCALID": "1"}, 2, None, "cuda:1"),
    "no GPU": (TASK | {"SLURM_LOCALID": "3"}, 0, None, "cpu"),
    "gloo on shared GPUs": (TASK | {"SLURM_LOCALID": "2"}, 2, "gloo", "cuda:0"),
    "srun torchrun": (TORCHRUN, 4, None, "cuda:1"),
}


@pytest.mark.parametrize("choice", GPU_CHOICES)
def test_choice_of_gpu_and_backend(monkeypatch, choice):
    """nccl where there is a GPU, and only nccl is told which."""
    env, gpus, backend, expected = GPU_CHOICES[choice]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # what the script sets is put back
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    chosen, asked = [], {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(mnmc_ddp_slurm.dist, "init_process_group", lambda **kw: asked.update(kw))
    monkeypatch.setattr(mnmc_ddp_slurm.dist, "get_rank", lambda: 7)
    monkeypatch.setattr(mnmc_ddp_slurm.dist, "get_world_size", lambda: 8)
    args = SimpleNamespace(backend=backend, timeout=1)
    local_rank, device = mnmc_ddp_slurm.setup_distributed(args)
    assert str(device) == expected
    assert chosen == ([expected] if gpus else [])
    assert local_rank == int(env.get("LOCAL_RANK", env["SLURM_LOCALID"]))
    assert asked["backend"] == (backend or ("nccl" if gpus else "gloo"))
    assert asked["device_id"] == (device if asked["backend"] == "nccl" else None)
    assert "rank" not in asked and "world_size" not in asked  # they are in the environment
