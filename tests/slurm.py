"""A real Slurm in a folder of its own, and jobs of the batch file on it."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from launch import REPO, Launch, marked_pids, without_gloo_lines

BATCH = "scripts/mnmc_ddp_slurm.sbatch"
GPUS = ("--gpus-per-node", "2")  # Without them the batch file says that there are none.


def skip_without_slurm():
    for program in ("slurmctld", "munged", "srun"):
        if not shutil.which(program):
            pytest.skip(f"no {program}: apt-get install slurm-wlm munge")


class Cluster:
    """scripts/cluster/local_slurm.sh in a folder of its own."""

    def __init__(self, **settings):
        skip_without_slurm()
        self.folder = Path(tempfile.mkdtemp(prefix="slurm")) / "cluster"  # short: it has a socket
        self.mark = f"DDP_TEST_CLUSTER={self.folder}"
        self.settings = os.environ | {"LOCAL_SLURM": str(self.folder)} | settings
        self.settings |= {"DDP_TEST_CLUSTER": str(self.folder)}
        self.env = {"SLURM_CONF": f"{self.folder}/slurm.conf", "MASTER_ADDR": "127.0.0.1"}
        expected = f"export SLURM_CONF={self.folder}/slurm.conf MASTER_ADDR=127.0.0.1\n"
        assert self.run("start") == self.run("settings") == expected

    def run(self, action):
        command = ["bash", REPO / "scripts" / "cluster" / "local_slurm.sh", action]
        return subprocess.check_output(command, env=self.settings, text=True, timeout=90)

    def ask(self, *command):
        """The output of a Slurm command, without the line's end."""
        return subprocess.check_output(
            command, env=os.environ | self.env, text=True, timeout=60
        ).strip()

    def stop(self):
        self.run("stop")
        self.folder.parent.rmdir()  # fails when anything is left in it
        assert marked_pids(self.mark) == []


@pytest.fixture(scope="module")
def running_cluster():
    """Two nodes with four cores and four fake GPUs each, for all tests of a file."""
    cluster = Cluster(NODES="2", CPUS="4", GPUS="4")
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(running_cluster, tmp_path):
    """The cluster of the file; at the end of each test its nodes are free again.

    Cancels the test's jobs, because a killed srun leaves its job running.
    """
    yield running_cluster
    running_cluster.ask("scancel", "--me")
    with Launch([], tmp_path / "free nodes") as wait:
        # squeue lists a job until its last task is gone.
        wait.wait_for(lambda: not running_cluster.ask("squeue", "--noheader"), 60, "free nodes")


class BatchJob(Launch):
    """The batch file, submitted from a folder that stands for the repository.

    What the job writes is read as the output of a launch. script takes the place of
    mnmc_ddp_slurm.py, and change(text) is the batch file that is submitted. Slurm is asked for the
    state of the job, because sbatch --wait notices the end of a job up to half a minute late.
    It is submitted from the folder, or from another one.
    """

    def __init__(
        self, cluster, folder, *options, before=(), env=None, script=None, change=str, cwd=None
    ):
        self.cluster, self.folder = cluster, folder
        (folder / "scripts").mkdir(parents=True)
        (folder / "scripts" / "env.sh").symlink_to(REPO / "scripts" / "env.sh")
        (folder / BATCH).write_text(change((REPO / BATCH).read_text()))
        script = script or (REPO / "mnmc_ddp_slurm.py").read_text()
        (folder / "mnmc_ddp_slurm.py").write_text(script)
        command = ["sbatch", "--parsable", *before, folder / BATCH, *options]
        env = cluster.env | (env or {})
        super().__init__([command], folder / "sbatch", env=env, cwd=cwd or folder)
        super().succeeded(60)
        self.number = self.out_of(0).strip()

    @property
    def out(self):
        """What the job wrote, both streams."""
        paths = sorted(self.folder.glob("slurm-*.out"))
        return without_gloo_lines("".join(path.read_text() for path in paths))

    def story(self):
        return f"{super().story()}\n--- {self.states()}\n{self.out}"

    def states(self):
        command = ("squeue", "--noheader", "--states", "all", "--format", "%T", "--job")
        return set(self.cluster.ask(*command, self.number).split())

    def signal(self):
        """Sends what Slurm sends a minute before the time limit."""
        self.cluster.ask("scancel", "--batch", "--signal", "USR1", self.number)

    def start_again(self):
        """Waits until the requeued job may start, and lets it: by itself it waits two minutes.

        Within the second of its end slurmd would refuse it ("Job credential revoked").
        """
        self.wait_for(lambda: self.states() == {"PENDING"}, 90, "the job to be in the queue again")
        self.cluster.ask("scontrol", "update", f"JobId={self.number}", "StartTime=now+2")

    def end(self, seconds=120):
        """Waits until no part of the job waits or runs; returns the state."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}
        self.wait_for(lambda: self.states() and self.states() <= ended, seconds, "the job's end")
        return "/".join(sorted(self.states()))

    def succeeded(self, seconds=120):
        state = self.end(seconds)
        assert state == "COMPLETED", self.story()
        return self


# In place of mnmc_ddp_slurm.py: what each task was given, one write for each line.
PRINT_TASK = """
import os, sys
names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID",
         "SLURM_STEP_NODELIST", "MASTER_ADDR", "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES",
         "OMP_NUM_THREADS", "TQDM_MININTERVAL")
pairs = [f"{name}={os.environ.get(name, 'not-set')}" for name in names]
sys.stdout.write(" ".join(["task", *pairs, "options=" + ",".join(sys.argv[1:])]) + "\\n")
"""


def read_tasks(output):
    """What PRINT_TASK printed: a dictionary for each task, by rank."""
    lines = [line.partition("task ")[2] for line in output.splitlines() if "task SLURM_" in line]
    tasks = [dict(word.split("=", 1) for word in line.split()) for line in lines]
    return sorted(tasks, key=lambda task: int(task["SLURM_PROCID"]))
