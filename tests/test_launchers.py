"""The shell launchers in scripts/."""

import os
import re
import signal

import pytest
import update_pages
from launch import REPO, free_port, shape

ONE_EPOCH = ["--dataset", "synthetic", "--epochs", "1"]


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
    command = ["bash", REPO / "scripts" / "mnmc_ddp_tcp.sh", "--dataset", "synthetic", "-e", "1000"]
    run = launch([command], env={"NPROC": "3"})
    run.wait_for(run.epochs, 120, "the first epoch")
    os.kill(run.pid_of(1), 9)
    run.wait(30)
    assert run.codes != [0]
    run.wait_for(lambda: not run.pids(), 10, "all ranks to be gone")


@pytest.mark.slow
def test_tcp_sh_passes_sigterm_on(launch):
    """Also to a rank that is stopped."""
    command = ["bash", REPO / "scripts" / "mnmc_ddp_tcp.sh", "--dataset", "synthetic", "-e", "1000"]
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
    run = launch([["bash", REPO / "scripts/run_all.sh"]], env={"SLURM_CONF": "/dev/null"})
    run.succeeded(240)
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
        ("mnmc_ddp_slurm.py", "torchrun (no Slurm here)", "2"),
    ]
    assert all(float(r[3]) > 95 and int(r[4]) > 0 and float(r[5]) > 0 for r in table)


def test_run_all_fails_with_the_output_of_what_failed(launch):
    run = launch([["bash", REPO / "scripts/run_all.sh", "--lr", "fast"]]).wait()
    assert run.codes == [1]
    assert "invalid float value: 'fast'" in run.out
    assert "snsc.py failed" in run.err


def test_env_sh_makes_a_venv_where_packages_lack(launch, tmp_path):
    """Without torch in the active environment: .venv from requirements.txt, here an empty one."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/env.sh").write_text((REPO / "scripts/env.sh").read_text())
    (tmp_path / "requirements.txt").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/python").chmod(0o755)
    show = f"PATH={tmp_path}/bin:$PATH; source {tmp_path}/scripts/env.sh; which python"
    run = launch([["bash", "-euc", show]]).succeeded()
    assert run.out.strip() == str(tmp_path / ".venv/bin/python")
    assert "installing torch" in run.err


def test_env_sh_keeps_what_is_set(launch):
    show = "source scripts/env.sh; echo $NPROC $OMP_NUM_THREADS $MALLOC_TRIM_THRESHOLD_"
    env = {"NPROC": "5", "OMP_NUM_THREADS": "7", "MALLOC_TRIM_THRESHOLD_": "9"}
    assert launch([["bash", "-euc", show]], env=env).succeeded().out == "5 7 9\n"


def test_env_sh_counts_its_own_threads_anew(launch):
    """Sourced for two processes, then for one: all cores, as if it had not been sourced before."""
    show = "NPROC=1; source scripts/env.sh; echo $OMP_NUM_THREADS"
    twice = f"NPROC=1000; source scripts/env.sh; echo $OMP_NUM_THREADS; {show}"
    env = {"OMP_NUM_THREADS": ""}
    one, again = (launch([["bash", "-euc", words]], env=env).succeeded() for words in (show, twice))
    assert again.out == f"1\n{one.out}"


def test_diff_sh(launch):
    command = ["bash", "scripts/diff.sh", "snsc.py", "snmc_dp.py"]
    run = launch([command], env={"WIDTH": "210"}).succeeded()
    marked = [line for line in run.out.splitlines() if line[104:105] in "<|>" and line[104:105]]
    assert any("parallel_model = nn.DataParallel(model)" in line for line in marked)
    assert "\033" not in run.out  # no terminal, no colour
