"""scripts/mnmc_ddp_slurm.sbatch on a real Slurm: settings, containers, requeue, time limit."""

import re
import sys
from pathlib import Path

import pytest
from slurm import GPUS, PRINT_TASK, BatchJob, read_tasks

FOUR = [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)]


# Settings.


def test_settings_reach_srun_and_the_tasks(cluster, tmp_path):
    """SETUP is sourced as module and conda want it, and may set other settings and options."""
    (tmp_path / "modules.sh").write_text(
        'module() { if [ -n "$PS1" ]; then echo interactive; fi; false; }\n'
        'module load pytorch\nSRUN_OPTIONS="--label"\nset -- "$@" --data-root "$TMPDIR"\n'
    )
    env = {"SETUP": "../modules.sh", "HOST_SUFFIX": "i", "MASTER_ADDR": "", "OMP_NUM_THREADS": ""}
    env["TMPDIR"] = "/tmp"
    given = {"before": ("--cpus-per-task", "2", *GPUS), "env": env, "script": PRINT_TASK}
    job = BatchJob(cluster, tmp_path / "repository", "-e", "5", **given).succeeded()
    lines = job.out.splitlines()
    assert len(lines) == 4 and all(re.match(r"\d: task ", line) for line in lines), job.story()
    for rank, task in enumerate(read_tasks(job.out)):
        assert task["SLURM_PROCID"] == str(rank) and task["SLURM_STEP_NUM_TASKS"] == "4"
        assert task["MASTER_ADDR"] == "n0i"
        assert task["SLURM_CPUS_PER_TASK"] == task["OMP_NUM_THREADS"] == "2"
        assert task["CUDA_VISIBLE_DEVICES"] == "0,1"
        path = f"checkpoints/{job.number}/last.pt"
        assert task["options"] == f"--checkpoint,{path},-e,5,--data-root,/tmp"


def test_setup_file_that_is_missing_ends_the_job(cluster, tmp_path):
    """A job must not train without what the file sets up."""
    job = BatchJob(cluster, tmp_path, env={"SETUP": "mispelt.sh"}, script=PRINT_TASK)
    assert job.end() == "FAILED"
    assert job.out.splitlines()[-1] == "realpath: mispelt.sh: No such file or directory"


def test_submitted_from_another_folder(cluster, tmp_path):
    """It needs --chdir. Without it the job's file says so."""
    given = {"script": PRINT_TASK, "cwd": tmp_path}
    here, there = tmp_path / "here", tmp_path / "there"
    output = ("--output", here / "slurm-%j.out")
    job = BatchJob(cluster, here, before=(*output, *GPUS), **given)
    assert job.end() == "FAILED"
    line = "submit this from the repository's folder, or with sbatch --chdir FOLDER"
    assert job.out.startswith(line), job.story()
    job = BatchJob(cluster, there, before=("--chdir", there, *GPUS), **given).succeeded()
    assert len(read_tasks(job.out)) == 4, job.story()


def test_export_of_setup_alone_leaves_the_tasks_their_path(cluster, tmp_path):
    """srun passes on the environment of the batch file, with what SETUP has set there."""
    setup = tmp_path / "login.sh"
    copy = "srun --ntasks 2 --ntasks-per-node 1 bash -c 'echo copied'"
    setup.write_text(f"export PATH={Path(sys.executable).parent}:$PATH\n{copy}\n")
    before = ("--export", f"SETUP={setup}", *GPUS)
    job = BatchJob(cluster, tmp_path / "repository", before=before, script=PRINT_TASK).succeeded()
    assert len(read_tasks(job.out)) == 4 and job.out.count("copied\n") == 2, job.story()


def test_heterogeneous_job_is_one_step(cluster, tmp_path):
    """Two groups of nodes with other numbers of tasks, joined by an option of srun."""
    cpus = ("--cpus-per-task", "2")
    first = ("--nodes", "1", "--ntasks-per-node", "1", "--gpus-per-node", "1", *cpus)
    second = (":", "--nodes", "1", "--ntasks-per-node", "2", *cpus)
    env = {"SRUN_OPTIONS": "--het-group=0,1"}
    job = BatchJob(cluster, tmp_path, before=(*first, *second), env=env, script=PRINT_TASK)
    tasks = read_tasks(job.succeeded().out)
    assert [task["SLURM_PROCID"] for task in tasks] == ["0", "1", "2"], job.story()
    assert [task["SLURM_LOCALID"] for task in tasks] == ["0", "0", "1"]
    assert {task["SLURM_STEP_NUM_TASKS"] for task in tasks} == {"3"}
    assert {task["SLURM_CPUS_PER_TASK"] for task in tasks} == {"2"}
    assert [task["CUDA_VISIBLE_DEVICES"] for task in tasks] == ["0"] + ["not-set"] * 2


# Containers and torchrun.


def put_torchrun_in_place_of_srun(text):
    """The form that the batch file's comment shows."""
    start = text.index('srun "${options[@]}" "${python[@]}"')
    comment = text.index('# srun "${options[@]}"')
    end = text.index("\n\n# bash runs a trap")
    form = re.sub("^# ", "", text[comment:end], flags=re.MULTILINE)
    return text[:start] + form + text[end:]


# Stands for a container: what it runs sees no Slurm command, and a Python that the host lacks.
CONTAINER = """#!/bin/sh
# Used as: container exec image.sif python ARGUMENTS
shift 3
PATH=/nowhere exec {python} "$@"
"""


def test_container_without_slurm(cluster, tmp_path):
    """PYTHON starts it. The host's python has no torch, and env.sh does not look for it.

    The progress bar writes into the job's file once a minute, here too.
    """
    container, host = tmp_path / "container", tmp_path / "python"
    container.write_text(CONTAINER.format(python=sys.executable))
    host.write_text("#!/bin/sh\nexit 1\n")
    for path in (container, host):
        path.chmod(0o755)
    (tmp_path / "hosts.sh").write_text("MASTER_ADDR=127.0.0.1\n")  # n0 does not resolve
    env = {"PYTHON": f"{container} exec image.sif python", "SETUP": "../hosts.sh"}
    env |= {"PATH": f"{tmp_path}:/usr/bin:/bin:/usr/sbin:/sbin"}
    env |= {"MASTER_ADDR": "", "TQDM_MININTERVAL": ""}
    before = ("--nodes", "1", *GPUS)
    job = BatchJob(cluster, tmp_path / "repository", before=before, env=env, script=PRINT_TASK)
    tasks = read_tasks(job.succeeded().out)
    settings = [(task["MASTER_ADDR"], task["TQDM_MININTERVAL"]) for task in tasks]
    assert settings == [("127.0.0.1", "60")] * 2, job.story()


@pytest.mark.slow
def test_torchrun_trains_on_two_nodes_with_the_cores_of_its_processes(cluster, tmp_path):
    """In the form of the comment, in a container that prints what it was given, and starts it.

    The script takes torchrun's numbers of the processes, and not those of srun's tasks.
    """
    container = tmp_path / "container"
    start = 'sys.stdout.flush()\nos.execvp("python", sys.argv[3:])\n'
    container.write_text(f"#!{sys.executable}{PRINT_TASK}{start}")
    container.chmod(0o755)
    options, before = ("--dataset", "synthetic", "-e", "1"), ("--cpus-per-task", "2", *GPUS)
    given = {"env": {"PYTHON": f"{container} exec image.sif python"}, "before": before}
    given |= {"change": put_torchrun_in_place_of_srun}
    job = BatchJob(cluster, tmp_path / "repository", *options, **given).succeeded()
    tasks = read_tasks(job.out)
    assert [task["SLURM_CPUS_PER_TASK"] for task in tasks] == ["4", "4"], job.story()
    assert [row[:3] for row in job.inits()] == FOUR, job.story()
    assert job.epochs()[0]["count"] == 2000


# Signals, requeue and the end.

NOT_AGAIN = "not put back into the queue: this run has saved no epoch."
# In place of the script: rank 0 saves the checkpoint when a file named go is there, and fails when
# a file named end is. The others wait.
SAVE_LATE = """
import os, pathlib, sys, time
if os.environ["SLURM_PROCID"] != "0":
    time.sleep(1000)
print("training", flush=True)
checkpoint = pathlib.Path(sys.argv[2])
for name in ("go", "end"):
    while not pathlib.Path(name).exists():
        time.sleep(0.1)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.write_text(name)
    print("wrote", name, flush=True)
sys.exit(7)
"""


class JobThatSaves(BatchJob):
    """A job of SAVE_LATE, from its first line on."""

    def __init__(self, cluster, folder, *before):
        super().__init__(cluster, folder, before=before, script=SAVE_LATE)
        self.wait_for_line("training")

    def wait_for_line(self, line):
        self.wait_for(lambda: line in self.out, 60, line)

    def save(self):
        (self.folder / "go").touch()
        self.wait_for_line("wrote go")


def test_signal_before_training_does_not_end_the_job(cluster, tmp_path):
    """While modules are loaded: there is nothing to resume from, so the job goes on.

    It says that it has no GPU, although the cluster has some.
    """
    (tmp_path / "slow.sh").write_text("echo loading\nuntil [ -e ../go ]; do sleep 0.1; done\n")
    env = {"SETUP": "../slow.sh"}
    job = BatchJob(cluster, tmp_path / "repository", env=env, script=PRINT_TASK)
    job.wait_for(lambda: "loading" in job.out, 60, "the setup file")
    job.signal()
    job.wait_for(lambda: NOT_AGAIN in job.out, 60, "the batch file's line")
    (tmp_path / "go").touch()
    assert len(read_tasks(job.succeeded().out)) == 4, job.story()
    line = "this job asked for no GPU: if it trains on the CPU, add --gpus-per-node 2 to sbatch"
    assert line in job.out.splitlines(), job.story()


def test_only_the_task_of_an_array_that_is_signalled_is_requeued(cluster, tmp_path):
    """Its last task, whose number is that of the whole array."""
    job = JobThatSaves(cluster, tmp_path, "--array", "0-1")
    job.wait_for(lambda: job.out.count("training") == 2, 60, "both tasks")
    (tmp_path / "go").touch()
    job.wait_for(lambda: job.out.count("wrote go") == 2, 60, "both checkpoints")
    cluster.ask("scancel", "--batch", "--signal", "USR1", f"{job.number}_1")
    job.wait_for(lambda: "PENDING" in job.states(), 90, "a task to be in the queue again")
    assert job.states() == {"PENDING", "RUNNING"}, job.story()


def test_job_that_cannot_go_on_after_a_requeue_stays(cluster, tmp_path):
    """With nothing saved, an epoch longer than the limit would be started for ever. With a
    checkpoint, the cluster or the job may refuse.

    Then a task fails. It ends all, or the other ranks would sleep on, and the status is that of the
    job, although signals have ended its wait.
    """
    job = JobThatSaves(cluster, tmp_path, "--no-requeue")
    job.signal()
    job.wait_for_line(NOT_AGAIN)
    assert job.states() == {"RUNNING"}
    job.save()
    job.signal()
    job.wait_for_line(f"to resume: CHECKPOINT=checkpoints/{job.number}/last.pt sbatch")
    assert "presently disabled" in job.out and job.states() == {"RUNNING"}, job.story()
    (tmp_path / "end").touch()
    assert job.end() == "FAILED", job.story()
    assert "ExitCode=0:0" not in cluster.ask("scontrol", "show", "job", job.number)


@pytest.mark.slow
def test_job_at_its_time_limit_is_requeued(cluster, tmp_path):
    """Slurm itself sends the signal.

    The smallest limit is a minute, so the time of the end is set instead. Slurm looks at the times
    every half minute: at the first look it sends USR1, and at one of the next two it ends the job.
    """
    job = JobThatSaves(cluster, tmp_path)
    job.save()
    cluster.ask("scontrol", "update", f"JobId={job.number}", "EndTime=now+40")
    job.wait_for(lambda: job.states() == {"PENDING"}, 120, "the job to be in the queue again")


# Trainings.


@pytest.mark.slow
def test_two_jobs_at_once_of_which_one_is_requeued(cluster, tmp_path):
    """Four tasks each, on the same nodes. The requeued job goes on from its last epoch, to the
    result of the other one.
    """
    folders = [tmp_path / name for name in ("undisturbed", "requeued")]
    options = ("--dataset", "synthetic", "-e", "3", "-b", "125")
    jobs = [BatchJob(cluster, folder, *options, before=GPUS) for folder in folders]
    undisturbed, requeued = jobs
    requeued.wait_for(lambda: all(job.epochs() for job in jobs), 120, "an epoch of each")
    assert [job.states() for job in jobs] == [{"RUNNING"}] * 2, undisturbed.story()
    cluster.ask("scontrol", "requeue", requeued.number)
    requeued.start_again()
    for job in jobs:
        job.succeeded()
        assert [line["epoch"] for line in job.epochs()] == [1, 2, 3], job.story()
    assert [row[:3] for row in undisturbed.inits()] == FOUR
    assert len(undisturbed.out.splitlines()) == 4 + 3, undisturbed.story()  # and no warning
    assert (undisturbed.folder / "checkpoints" / undisturbed.number / "last.pt").exists()
    assert len(requeued.inits()) == 2 * 4 and requeued.out.count("resumed ") == 1, requeued.story()
    ours, theirs = (job.epochs()[-1] for job in jobs)
    for name in ("train", "test"):  # Four ranks add in another order: within a per cent.
        assert abs(ours[name] - theirs[name]) < 1, requeued.story()
