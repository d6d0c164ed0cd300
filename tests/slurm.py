"""A real Slurm in a folder of its own, and jobs of the batch file on it."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from launch import REPO, Launch, marked_pids, without_gloo_lines

BATCH = "scripts/mnmc_ddp_slurm.sbatch"
MISSING = [name for name in ("slurmctld", "munged", "srun") if not shutil.which(name)]
SYNTHETIC = ("--dataset", "synthetic", "-e", "3", "-b", "125")
# What srun tells a task, for tests that call a function of the script.
TASK = {"SLURM_STEP_NODELIST": "n0", "SLURM_PROCID": "7", "SLURM_STEP_NUM_TASKS": "8"}
TASK |= {"SLURM_JOB_ID": "1", "MASTER_ADDR": "n0"}


def skip_without_slurm():
    if MISSING:
        pytest.skip(f"no {MISSING[0]}: apt-get install slurm-wlm munge")


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
        assert self.run("start") == expected

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


def make_stand_in(folder, change=lambda text: text, script=None):
    """Makes a folder stand for the repository, so that what a job writes is not in that one."""
    (folder / "scripts" / "cluster").mkdir(parents=True)
    for path in ("mnmc_ddp_slurm.py", "scripts/env.sh", "scripts/cluster/local_slurm.sh"):
        (folder / path).symlink_to(REPO / path)
    (folder / BATCH).write_text(change((REPO / BATCH).read_text()))
    if script is not None:
        (folder / "mnmc_ddp_slurm.py").unlink()
        (folder / "mnmc_ddp_slurm.py").write_text(script)
    return folder


class BatchJob:
    """The batch file, submitted from a folder that stands for the repository.

    script takes the place of mnmc_ddp_slurm.py. Slurm is asked for the state of the job, because
    sbatch --wait notices the end of a job up to half a minute late.
    """

    def __init__(self, cluster, folder, *options, before=(), env=None, **stand_in):
        self.cluster, self.folder = cluster, make_stand_in(folder, **stand_in)
        settings = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ENV_SH_"))}
        settings |= cluster.env | {"OMP_NUM_THREADS": "1"} | (env or {})
        settings = {name: value for name, value in settings.items() if value is not None}
        command = ["sbatch", "--parsable", *before, BATCH, *options]
        output = subprocess.check_output(command, env=settings, cwd=folder, text=True, timeout=60)
        self.number = output.strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cluster.ask("scancel", "--quiet", self.number)
        self.wait_for(lambda: not self.states() & {"RUNNING", "COMPLETING"}, "the job to be gone")

    @property
    def out(self):
        """What the job and, in an array, its brothers wrote, both streams."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("slurm-*.out")))

    def states(self):
        command = ("squeue", "--noheader", "--states", "all", "--format", "%T", "--job")
        return set(self.cluster.ask(*command, self.number).split())

    def wait_for(self, condition, what, seconds=90):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"still waiting for {what}: {self.out}"
            time.sleep(0.1)  # between two looks

    def signal(self):
        """Sends what Slurm sends a minute before the time limit."""
        self.cluster.ask("scancel", "--batch", "--signal", "USR1", self.number)

    def start_again(self):
        """Waits until the requeued job may start, and lets it: by itself it waits two minutes.

        Within the second of its end slurmd would refuse it ("Job credential revoked").
        """
        self.wait_for(lambda: self.states() == {"PENDING"}, "the job to be in the queue again")
        self.cluster.ask("scontrol", "update", f"JobId={self.number}", "StartTime=now+2")

    def has_ended(self):
        """Whether squeue knows the job, and no part of it waits or runs."""
        states = self.states()
        return bool(states) and states <= {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}

    def end(self, seconds=90):
        """Waits for the end; returns the state."""
        self.wait_for(self.has_ended, "the end of the job", seconds)
        return "/".join(sorted(self.states()))

    def succeeded(self, seconds=90):
        state = self.end(seconds)
        assert state == "COMPLETED", f"{state}\n{self.out}"
        return self

    def tasks(self):
        """What PRINT_TASK printed: a dictionary for each task, by rank."""
        lines = [line for line in self.out.splitlines() if line.startswith("task ")]
        tasks = [dict(word.split("=", 1) for word in line.split()[1:]) for line in lines]
        return sorted(tasks, key=lambda task: int(task["SLURM_PROCID"]))


class Job(Launch):
    """sbatch --wait of the batch file with mnmc_ddp_slurm.py itself, its output read as a run's."""

    def __init__(self, cluster, folder, *options, before=(), change=lambda text: text):
        make_stand_in(folder, change)
        command = ["sbatch", "--wait", *before, BATCH, *options]
        super().__init__([command], folder / "output", env=cluster.env, cwd=folder)
        self.cluster, self.folder, self.number = cluster, folder, None
        self.requeued = False
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

    def state(self, *options):
        command = ("squeue", "--noheader", "--format", "%T", *options, "--job", self.number)
        return self.cluster.ask(*command).strip()

    def start_again(self):
        """Waits until the requeued job may start, and lets it: by itself it waits two minutes.

        Within the second of its end slurmd would refuse it ("Job credential revoked").
        """
        self.wait_for(lambda: self.state() == "PENDING", 60, "the job to be in the queue again")
        self.cluster.ask("scontrol", "update", f"JobId={self.number}", "StartTime=now+2")
        self.requeued = True

    def succeeded(self, seconds=120):
        """As of any launch. While a job that is requeued ends, Slurm calls it cancelled.

        sbatch --wait looks every 32 seconds and ends with 1 if it sees that, so it is not asked.
        """
        if not self.requeued:
            return super().succeeded(seconds)
        going_on = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        everything = ("--states", "all")
        self.wait_for(lambda: self.state(*everything) not in going_on, seconds, "the job's end")
        assert self.state(*everything) == "COMPLETED", self.story()
        return self


# In place of mnmc_ddp_slurm.py: what each task was given, one write for each line.
PRINT_TASK = """
import os, sys
names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "MASTER_ADDR",
         "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
pairs = [f"{name}={os.environ.get(name, '')}" for name in names]
sys.stdout.write(" ".join(["task", *pairs, "options=" + ",".join(sys.argv[1:])]) + "\\n")
"""
