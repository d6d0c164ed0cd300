"""scripts/mnmc_ddp_slurm.sbatch on a real Slurm: settings, containers, requeue, time limit."""

import contextlib
import re
import sys
from pathlib import Path

import pytest
from launch import INIT
from slurm import PRINT_TASK, SYNTHETIC, BatchJob, Cluster, Job


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(NODES="2", CPUS="4", GPUS="4")
    yield cluster
    cluster.stop()


def test_settings_reach_srun_and_the_tasks(cluster, tmp_path):
    """SETUP is sourced as module and conda want it, and may set the other settings."""
    (tmp_path / "modules.sh").write_text(
        'module() { if [ -n "$PS1" ]; then echo interactive; fi; false; }\n'
        'module load pytorch\nSRUN_OPTIONS="--label"\n'
    )
    env = {"SETUP": "../modules.sh", "HOST_SUFFIX": "i", "MASTER_ADDR": None}
    env["OMP_NUM_THREADS"] = None
    before = ("--cpus-per-task", "2", "--gpus-per-node", "2")
    folder = tmp_path / "repository"
    with BatchJob(cluster, folder, "-e", "5", before=before, env=env, script=PRINT_TASK) as job:
        job.succeeded()
        lines = re.findall(r"^\d: task .*", job.out, re.MULTILINE)  # --label
        assert len(lines) == len(job.out.splitlines()) == 4, job.out
        tasks = [dict(word.split("=", 1) for word in line.split()[2:]) for line in sorted(lines)]
        for rank, task in enumerate(tasks):
            assert task["SLURM_PROCID"] == str(rank) and task["SLURM_STEP_NUM_TASKS"] == "4"
            assert task["MASTER_ADDR"] == "n0i"
            assert task["SLURM_CPUS_PER_TASK"] == task["OMP_NUM_THREADS"] == "2"
            assert task["CUDA_VISIBLE_DEVICES"] == "0,1"
            assert task["options"] == f"--checkpoint,checkpoints/{job.number}/last.pt,-e,5"


def test_setup_file_that_is_missing_ends_the_job(cluster, tmp_path):
    """A job must not train without what the file sets up."""
    env = {"SETUP": "mispelt.sh"}
    with BatchJob(cluster, tmp_path, env=env, script=PRINT_TASK) as job:
        assert job.end() == "FAILED"
        assert job.out.splitlines()[-1] == "realpath: mispelt.sh: No such file or directory"


def test_no_gpu_on_a_cluster_with_gpus_is_said(cluster, tmp_path):
    """One line, and no line where the job has GPUs: the test above."""
    with BatchJob(cluster, tmp_path, script=PRINT_TASK) as job:
        job.succeeded()
        line = "this job asked for no GPU: if it trains on the CPU, add --gpus-per-node 2 to sbatch"
        assert [row for row in job.out.splitlines() if not row.startswith("task ")] == [line]


@pytest.mark.parametrize("export", ["NONE", "SETUP"])
def test_little_exported_leaves_the_tasks_their_path(cluster, tmp_path, export):
    """srun passes on the environment of the batch file, with what SETUP has set there."""
    setup = tmp_path / "login.sh"
    setup.write_text(f"export PATH={Path(sys.executable).parent}:$PATH\n")
    value, change = f"SETUP={setup}", str
    if export == "NONE":  # Then the line stands in the file.
        value, start = "NONE", "set -euo pipefail\n"

        def change(text):
            return text.replace(start, f"{start}SETUP={setup}\n")

    before = ("--export", value, "--gpus-per-node", "2")
    folder = tmp_path / "repository"
    with BatchJob(cluster, folder, before=before, script=PRINT_TASK, change=change) as job:
        assert len(job.succeeded().tasks()) == 4, job.out


# Stands for a container: what it runs sees no Slurm command, and a Python that the host lacks.
CONTAINER = """#!/bin/sh
# Used as: container exec image.sif python ARGUMENTS
shift 3
PATH={empty} exec {python} "$@"
"""


def put_torchrun_in_place_of_srun(text):
    """The form that the batch file's comment shows."""
    start = text.index('srun "${options[@]}" "${python[@]}"')
    comment = text.index('# srun "${options[@]}"')
    end = text.index("\n\n# bash runs a trap")
    form = re.sub("^# ", "", text[comment:end], flags=re.MULTILINE)
    return text[:start] + form + text[end:]


@pytest.mark.parametrize(
    ("script", "change"),
    [
        (PRINT_TASK, str),
        pytest.param(None, str, marks=pytest.mark.slow),
        pytest.param(None, put_torchrun_in_place_of_srun, marks=pytest.mark.slow),
    ],
    ids=["tasks", "trains", "torchrun trains"],
)
def test_container_without_slurm(cluster, tmp_path, script, change):
    """PYTHON starts it. The host's python has no torch, and env.sh does not look for it."""
    empty, container, host = (tmp_path / name for name in ("empty", "container", "host"))
    empty.mkdir()
    host.mkdir()
    container.write_text(CONTAINER.format(empty=empty, python=sys.executable))
    (host / "python").write_text("#!/bin/sh\nexit 1\n")
    for path in (container, host / "python"):
        path.chmod(0o755)
    (tmp_path / "hosts.sh").write_text("MASTER_ADDR=127.0.0.1\n")  # n0 does not resolve
    env = {"PYTHON": f"{container} exec image.sif python", "MASTER_ADDR": None}
    env |= {"PATH": f"{host}:/usr/bin:/bin:/usr/sbin:/sbin", "SETUP": str(tmp_path / "hosts.sh")}
    folder, options = tmp_path / "repository", ("--dataset", "synthetic", "--epochs", "0")
    before, given = ("--nodes", "1", "--gpus-per-node", "2"), {"script": script, "change": change}
    with BatchJob(cluster, folder, *options, before=before, env=env, **given) as job:
        job.succeeded(200)
        if script is None:
            inits = [match["rank"] + "/" + match["world"] for match in INIT.finditer(job.out)]
            assert sorted(inits) == ["0/2", "1/2"], job.out
        else:
            assert [task["MASTER_ADDR"] for task in job.tasks()] == ["127.0.0.1"] * 2, job.out
        assert not (folder / ".venv").exists()


def test_signal_before_training_does_not_end_the_job(cluster, tmp_path):
    """While modules are loaded: there is nothing to resume from, so the job goes on."""
    setup, go = tmp_path / "slow.sh", tmp_path / "go"
    setup.write_text(f"echo loading\nuntil [ -e {go} ]; do sleep 0.1; done\n")
    folder = tmp_path / "repository"
    env = {"SETUP": str(setup)}
    with BatchJob(cluster, folder, env=env, script=PRINT_TASK) as job:
        job.wait_for(lambda: "loading" in job.out, "the setup file")
        job.signal()
        job.wait_for(lambda: NOT_AGAIN in job.out, "the batch file's line")
        go.touch()
        assert len(job.succeeded().tasks()) == 4, job.out


NOT_AGAIN = "not put back into the queue: this run has saved no epoch."
# In place of the script: rank 0 saves the checkpoint when a file named go is there.
SAVE_LATE = """
import os, pathlib, sys, time
if os.environ["SLURM_PROCID"] != "0":
    sys.exit()
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


def test_run_that_saves_nothing_is_not_requeued(cluster, tmp_path):
    """An epoch longer than the limit would be started for ever. One that is saved is resumed."""
    with BatchJob(cluster, tmp_path, script=SAVE_LATE) as job:
        job.wait_for(lambda: "training" in job.out, "the script")
        job.signal()
        job.wait_for(lambda: NOT_AGAIN in job.out, "the batch file's line")
        assert job.states() == {"RUNNING"}
        (tmp_path / "go").touch()
        job.wait_for(lambda: "wrote go" in job.out, "the checkpoint")
        job.signal()
        job.wait_for(lambda: job.states() == {"PENDING"}, "the job to be in the queue again")


def test_refused_requeue_says_how_to_resume(cluster, tmp_path):
    """On a cluster, or for a job, that must not be requeued; the job goes on to its limit."""
    with BatchJob(cluster, tmp_path, before=("--no-requeue",), script=SAVE_LATE) as job:
        job.wait_for(lambda: "training" in job.out, "the script")
        (tmp_path / "go").touch()
        job.wait_for(lambda: "wrote go" in job.out, "the checkpoint")
        job.signal()
        line = f"to resume: CHECKPOINT=checkpoints/{job.number}/last.pt sbatch"
        job.wait_for(lambda: line in job.out, "the batch file's line")
        assert "presently disabled" in job.out and job.states() == {"RUNNING"}, job.out


def test_status_of_srun_is_that_of_the_job(cluster, tmp_path):
    """Also after a signal that has ended wait."""
    with BatchJob(cluster, tmp_path, script=SAVE_LATE) as job:
        job.wait_for(lambda: "training" in job.out, "the script")
        job.signal()
        job.wait_for(lambda: NOT_AGAIN in job.out, "the batch file's line")
        (tmp_path / "go").touch()
        (tmp_path / "end").touch()
        assert job.end() == "FAILED", job.out
        assert "ExitCode=7:0" in cluster.ask("scontrol", "show", "job", job.number)


def test_jobs_of_an_array_have_seeds_files_and_ports_of_their_own(cluster, tmp_path):
    """The page's line in a SETUP file adds the option."""
    (tmp_path / "seeds.sh").write_text('set -- "$@" --seed "$SLURM_ARRAY_TASK_ID"\n')
    before, env = ("--array", "0-1", "--gpus-per-node", "2"), {"SETUP": "../seeds.sh"}
    folder = tmp_path / "repository"
    with BatchJob(cluster, folder, before=before, env=env, script=PRINT_TASK) as job:
        tasks = job.succeeded().tasks()
        assert len(tasks) == 8, job.out
        ports = {int(task["SLURM_JOB_ID"]) % 20000 for task in tasks}
        assert len(ports) == len({task["options"] for task in tasks}) == 2, job.out
        assert {task["options"].split(",")[-2] for task in tasks} == {"--seed"}
        assert {task["options"].split(",")[-1] for task in tasks} == {"0", "1"}


def test_data_are_copied_to_each_node_and_output_is_split(cluster, tmp_path):
    """The page's lines for node-local scratch, and a file for each task."""
    (tmp_path / "data").mkdir()
    (tmp_path / "scratch").mkdir()
    setup = tmp_path / "scratch.sh"
    setup.write_text(
        f"export TMPDIR={tmp_path}/scratch\n"
        'srun --ntasks "$SLURM_NNODES" --ntasks-per-node 1 '
        f"bash -c 'cp -r {tmp_path}/data \"$TMPDIR/$SLURMD_NODENAME\"'\n"
        'set -- "$@" --data-root "$TMPDIR"\n'
        'SRUN_OPTIONS="--output=task-%t.txt"\n'
    )
    folder = tmp_path / "repository"
    before = ("--gpus-per-node", "2")
    with BatchJob(
        cluster, folder, before=before, env={"SETUP": str(setup)}, script=PRINT_TASK
    ) as job:
        job.succeeded()
        assert sorted(path.name for path in (tmp_path / "scratch").iterdir()) == ["n0", "n1"]
        texts = [(folder / f"task-{rank}.txt").read_text() for rank in range(4)]
        for rank, text in enumerate(texts):
            assert text.startswith(f"task SLURM_PROCID={rank} ") and text.count("\n") == 1
            assert text.endswith(f",--data-root,{tmp_path}/scratch\n")


def test_heterogeneous_job_is_one_step(cluster, tmp_path):
    """Two groups of nodes with other numbers of tasks, joined by an option of srun."""
    first = ("--nodes", "1", "--ntasks-per-node", "1", "--gpus-per-node", "1")
    second = (":", "--nodes", "1", "--ntasks-per-node", "3")
    env = {"SRUN_OPTIONS": "--het-group=0,1"}
    with BatchJob(cluster, tmp_path, before=(*first, *second), env=env, script=PRINT_TASK) as job:
        tasks = job.succeeded().tasks()
        assert [task["SLURM_PROCID"] for task in tasks] == ["0", "1", "2", "3"], job.out
        assert [task["SLURM_LOCALID"] for task in tasks] == ["0", "0", "1", "2"]
        assert {task["SLURM_STEP_NUM_TASKS"] for task in tasks} == {"4"}
        assert [task["CUDA_VISIBLE_DEVICES"] for task in tasks] == ["0", "", "", ""]


def test_torchrun_gets_the_cores_of_its_processes(cluster, tmp_path):
    """In the form of the comment, in a container that prints what it was given."""
    container = tmp_path / "container"
    container.write_text(f"#!{sys.executable}{PRINT_TASK}")
    container.chmod(0o755)
    env = {"PYTHON": f"{container} exec image.sif python"}
    before = ("--cpus-per-task", "2", "--gpus-per-node", "2")
    change = {"change": put_torchrun_in_place_of_srun}
    folder = tmp_path / "repository"
    with BatchJob(cluster, folder, before=before, env=env, **change) as job:
        tasks = job.succeeded().tasks()
        assert [task["SLURM_CPUS_PER_TASK"] for task in tasks] == ["4", "4"], job.out
        for number, task in enumerate(tasks):
            options = task["options"].split(",")
            assert options[:3] == ["exec", "image.sif", "python"], job.out
            assert options[3:7] == ["-m", "torch.distributed.run", "--node-rank", str(number)]
            assert options[-1].endswith("last.pt"), job.out


@pytest.fixture(scope="module")
def finished(cluster, tmp_path_factory):
    """Two jobs of 2 x 2 tasks that ran to completion at the same time, on the same nodes."""
    with contextlib.ExitStack() as stack:
        folders = [tmp_path_factory.mktemp("job") for _ in range(2)]
        gpus = ("--gpus-per-node", "2")  # Without them the batch file says that there are none.
        jobs = [
            stack.enter_context(Job(cluster, folder, *SYNTHETIC, before=gpus)) for folder in folders
        ]
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
def test_command_line_overrides_the_batch_file(cluster, tmp_path):
    """One node with one torchrun, the form that the comment shows, on the second node."""

    before = ("--nodes", "1", "--nodelist", "n1", "--job-name", "other")
    options = ("--dataset", "synthetic", "-e", "1")
    with Job(
        cluster, tmp_path, *options, before=before, change=put_torchrun_in_place_of_srun
    ) as job:
        job.succeeded()
        assert [row[:3] for row in job.inits()] == [(0, 2, 0), (1, 2, 1)], job.story()
        assert job.epochs()[0]["count"] == 2000


@pytest.mark.slow
def test_scancel_ends_every_task(cluster, tmp_path):
    with Job(cluster, tmp_path, *SYNTHETIC[:2], "-e", "1000") as job:
        job.wait_for(job.epochs, 90, "an epoch")
        assert len(job.pids()) >= 4
        cluster.ask("scancel", job.number)
        sbatch = job.processes[0].pid  # It asks for the state of the job every 32 seconds.
        job.wait_for(lambda: set(job.pids()) <= {sbatch}, 30, "all tasks to be gone")
        assert job.wait().codes != [0]


@pytest.mark.slow
def test_requeued_job_goes_on(cluster, finished, tmp_path):
    """scontrol requeue in mid-run: from the last epoch, to the metrics of an undisturbed run."""
    with Job(cluster, tmp_path, *SYNTHETIC) as job:
        job.wait_for(job.epochs, 90, "an epoch")
        cluster.ask("scontrol", "requeue", job.number)
        job.start_again()
        job.succeeded()
        check_alike(job, finished[0])
        assert len(job.inits()) == 8, job.story()  # four tasks, twice


@pytest.fixture
def urgent(cluster):
    """A partition whose jobs send those of the other back into the queue."""
    path = cluster.folder / "slurm.conf"
    text = path.read_text()
    lines = (
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "PartitionName=urgent Nodes=ALL PriorityTier=2",
    )
    try:
        path.write_text(text + "".join(f"{line}\n" for line in lines))
        cluster.ask("scontrol", "reconfigure")
        yield "urgent"
    finally:
        path.write_text(text)
        cluster.ask("scontrol", "reconfigure")


@pytest.mark.slow
def test_preempted_job_goes_on(cluster, finished, urgent, tmp_path):
    """Slurm itself puts it back into the queue, for a job that needs all nodes."""
    with Job(cluster, tmp_path, *SYNTHETIC) as job:
        job.wait_for(job.epochs, 90, "an epoch")
        everything = ("--partition", urgent, "--nodes", "2", "--exclusive")
        assert cluster.ask("srun", *everything, "echo", "urgent") == "urgent\nurgent"
        job.start_again()
        job.succeeded()
        assert "DUE TO PREEMPTION" in job.out, job.story()
        check_alike(job, finished[0])
        assert len(job.inits()) == 8, job.story()  # four tasks, twice


@pytest.mark.slow
def test_job_whose_epoch_is_longer_than_its_limit_ends_there(cluster, tmp_path):
    """It is started once. The smallest limit is a minute, so the time of the end is set instead.
    Slurm looks at the times every half minute: at the first look it sends USR1, and at one of the
    next two it ends the job.
    """
    with BatchJob(cluster, tmp_path, script=SAVE_LATE) as job:
        job.wait_for(lambda: "training" in job.out, "the script")
        cluster.ask("scontrol", "update", f"JobId={job.number}", "EndTime=now+40")
        assert job.end(120) == "TIMEOUT", job.out
        assert job.out.count(NOT_AGAIN) == job.out.count("training") == 1, job.out
        assert "DUE TO TIME LIMIT" in job.out
        assert " Restarts=0 " in cluster.ask("scontrol", "show", "job", job.number)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_job_at_its_time_limit_goes_on(cluster, tmp_path):
    """USR1 comes ahead of the limit, and the batch file puts the job back into the queue."""
    options = ("--dataset", "synthetic", "-e", "8", "-b", "8")
    with Job(cluster, tmp_path, *options, before=("--signal", "B:USR1@45")) as job:
        job.wait_for(job.epochs, 150, "an epoch")
        # The limit is lowered in mid-run, so that even a slow machine has an epoch to go on from.
        cluster.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=1")
        job.wait_for(lambda: job.state() == "PENDING", 60, "the job to be in the queue again")
        done = len(job.epochs())
        cluster.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
        job.start_again()
        job.succeeded(300)
        assert 1 <= done < 8
        assert [line["epoch"] for line in job.epochs()] == list(range(1, 9)), job.story()
        assert job.out.count("resumed ") == 1, job.story()
