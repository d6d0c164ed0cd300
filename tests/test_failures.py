"""A rank that dies, stalls or never comes ends the others; the same command then resumes."""

import os
import re
import signal
import socket

import pytest
import torch
from launch import DDP, PLAIN, REPO, free_port, page_commands, quick_for
from messages import says

import snsc

EPOCHS = 3
OPTIONS = ("--dataset", "synthetic", "-e", EPOCHS, "-b", "250")
LONG = ("--dataset", "synthetic", "-e", "1000", "-b", "250")
UNDISTURBED = {}  # by number of processes: printed metrics and final weights


def undisturbed(launch, tmp_path, processes):
    """The metrics and the checkpoint of a run that nothing happened to."""
    if processes not in UNDISTURBED:
        script = "snsc.py" if processes == 1 else "mnmc_ddp_env.py"
        path = tmp_path / "whole.pt"
        run = launch(script, processes, *OPTIONS, "--checkpoint", path).succeeded()
        UNDISTURBED[processes] = run.metrics(), torch.load(path, weights_only=True)
    return UNDISTURBED[processes]


def tensors(state):
    """The tensors of a model's or an optimizer's state dict, by name or by number."""
    return state.get("state", state)


def gone(run, seconds):
    """Waits until nothing of the launch is left, and checks that no command succeeded."""
    run.wait_for(lambda: not run.pids(), seconds, "all processes to be gone")
    run.wait(seconds)
    assert 0 not in run.codes, run.story()


@pytest.mark.slow
@pytest.mark.parametrize("script", ("snsc.py", *DDP[:3]))
def test_killed_run_resumes_and_ends_as_an_undisturbed_one(launch, tmp_path, script):
    """SIGKILL in the second epoch, then in the third, of the last rank and of rank 0.

    Nothing is left running, and the same command resumes after the last whole epoch, and says so.
    Metrics and weights are those of an undisturbed run: to the bit with one or two ranks, to
    rounding, which grows, with three: DDP regroups its buckets after a process's first backward.
    """
    # Three ranks once: a sum of two has one order, a sum of three has several.
    processes = 1 if script in PLAIN else 3 if script == "mnmc_ddp_mp.py" else 2
    metrics, weights = undisturbed(launch, tmp_path, processes)
    path = tmp_path / "folder" / "last.pt"
    seen = []
    for victim in (processes - 1, 0):
        run = launch(script, processes, *OPTIONS, "--checkpoint", path)
        run.wait_for(run.epochs, 120, "an epoch")
        os.kill(run.pid_of(victim), signal.SIGKILL)
        gone(run, 30)
        if script == "mnmc_ddp_tcp.py":  # no launcher that would end the other
            assert says("rank died", run.err), run.err
        seen += run.metrics()
    run = launch(script, processes, *OPTIONS, "--checkpoint", path).succeeded()
    assert [len(seen), len(run.metrics())] == [2, 1], run.story()
    assert run.out.count(f"resumed {path} after epoch 2/{EPOCHS}\n") == 1, run.story()
    assert run.own_err() == "", run.story()
    resumed = torch.load(path, weights_only=True)
    if processes > 2:
        for ours, theirs in zip(seen + run.metrics(), metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=0.02)
        return
    assert seen + run.metrics() == metrics
    for part in ("model", "optimizer"):
        torch.testing.assert_close(tensors(resumed[part]), tensors(weights[part]), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("by", ("the page", "env.sh"))
def test_torchrun_restarts_killed_ranks_by_itself(launch, tmp_path, by):
    """The restarted ranks resume and end with the metrics of an undisturbed run."""
    metrics, _ = undisturbed(launch, tmp_path, 2)
    if by == "the page":
        command, *_ = page_commands("docs/clusters.md", "Fault tolerance and elastic training")
        command = command.replace("gpu", "2").replace("checkpoints/last.pt", f"{tmp_path}/last.pt")
    else:
        command = "NPROC=2 MAX_RESTARTS=1 bash scripts/mnmc_ddp_env.sh --checkpoint "
        command += f"{tmp_path}/last.pt"
    run = launch([["bash", "-c", f"{command} {' '.join(map(str, OPTIONS))}"]])
    run.wait_for(run.epochs, 120, "an epoch")
    os.kill(run.pid_of(1), signal.SIGKILL)
    run.succeeded()
    assert len(run.inits()) == 4, run.story()  # both ranks started twice
    assert run.metrics() == metrics


LAUNCHERS = {
    "tcp.sh": ["bash", REPO / "scripts" / "mnmc_ddp_tcp.sh", *LONG],
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", 2, "mnmc_ddp_env.py", *LONG],
    "mp": ["python", "mnmc_ddp_mp.py", "--nproc-per-node", 2, *LONG],
}


@pytest.mark.slow
@pytest.mark.parametrize("sent", (signal.SIGINT, signal.SIGTERM))
def test_signal_to_the_launcher_ends_all_ranks(launch, sent):
    """Ctrl-C goes to all processes of a terminal's foreground, SIGTERM to the launcher alone."""
    runs = {}
    for name, command in LAUNCHERS.items():
        address = ["--init-method", f"tcp://127.0.0.1:{free_port()}"] if name == "mp" else []
        runs[name] = launch([[*command, *address]], env={"NPROC": "2"})
    for name, run in runs.items():
        run.wait_for(lambda run=run: len(run.inits()) == 2, 60, "both ranks")
        (launcher,) = run.processes
        if sent == signal.SIGINT:
            os.killpg(launcher.pid, sent)
        else:
            launcher.send_signal(sent)
        gone(run, 30)
        assert "epoch 1000/1000" not in run.out, (name, run.story())


@pytest.mark.slow
def test_stalled_rank_ends_the_others(launch):
    """SIGSTOP rank 1: rank 0 gives up after --timeout, and says in which collective it waited."""
    runs = {script: launch(script, 2, *LONG, "--timeout", 10) for script in DDP}
    for run in runs.values():
        run.wait_for(run.epochs, 90, "an epoch")
        os.kill(run.pid_of(1), signal.SIGSTOP)
    for script, run in runs.items():
        # mp.spawn shows what rank 0 said when all have ended: half a minute after a SIGTERM, which
        # a stopped process cannot take, it sends SIGKILL. So does torchrun.
        run.wait_for(lambda run=run: says("rank stalled", run.err, 10000), 120, "rank 0 to give up")
        assert re.search(r"File .*mnmc_ddp_", run.err), run.story()
        assert says("rank stalled in training", run.err), run.story()
        if script == "mnmc_ddp_tcp.py":  # no launcher that would end the stopped rank
            os.kill(run.pid_of(1), signal.SIGKILL)
        gone(run, 60)


@pytest.mark.slow
def test_rank_that_never_comes_is_told_by_the_last_line(launch):
    """So are an address that is taken and one that nobody listens on, soon after --timeout."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        tcp = ["python", "mnmc_ddp_tcp.py", "--world-size", 2, "--init-method"]
        mp = ["python", "mnmc_ddp_mp.py", "--nodes", 2, "--nproc-per-node", 1, "--init-method"]
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        late, refused = "ranks are missing", "nobody listens"
        commands = [
            ([*tcp, f"tcp://127.0.0.1:{free_port()}"], "1/2 clients joined"),  # docs/course.md
            ([*tcp, f"tcp://127.0.0.1:{free_port()}", "--rank", 1], refused),
            ([*tcp, f"tcp://127.0.0.1:{taken}"], "port is taken"),
            ([*tcp, "tcp://no.such.host.invalid:1", "--rank", 1], "name is unknown"),
            ([*mp, f"tcp://127.0.0.1:{free_port()}"], late),
            (["python", "mnmc_ddp_env.py"], late),
            (["python", "mnmc_ddp_slurm.py"], late),
        ]
        common = ["--dataset", "synthetic", "--timeout", 3]
        runs = [
            launch([[*command, *common]], env=alone | {"MASTER_PORT": str(free_port())})
            for command, _ in commands
        ]
        for run, (_, message) in zip(runs, commands, strict=True):
            gone(run, 90)
            assert run.out == "", run.story()  # no [init] line
            assert says(message, run.last_line()), run.story()


@pytest.mark.parametrize("script", quick_for(DDP[:3], "mnmc_ddp_env.py"))
def test_failed_save_ends_all_ranks_and_keeps_the_old_checkpoint(launch, tmp_path, script):
    """Rank 0 alone writes. Its temporary file cannot be made, because a folder has that name."""
    path = tmp_path / "last.pt"
    model = snsc.ConvNet()
    snsc.save_checkpoint(path, model, torch.optim.SGD(model.parameters(), momentum=0.9), 1)
    before = path.read_bytes()
    (tmp_path / "last.pt.tmp").mkdir()
    options = ("--dataset", "synthetic", "-b", "500", "-e", "100", "--checkpoint", path)
    run = launch(script, 2, *options).wait(90)
    assert 0 not in run.codes, run.story()
    assert "in save_checkpoint" in run.err, run.story()
    assert re.search("Is a directory|last.pt.tmp cannot be opened", run.err)
    run.wait_for(lambda: not run.pids(), 10, "all processes to be gone")
    assert run.epochs() == []
    assert path.read_bytes() == before


@pytest.mark.slow
def test_file_left_over_from_a_killed_run_never_hangs(launch, tmp_path):
    """Its addresses lead to the dead, and the end is an error; without the file the run works."""
    meet = ["--init-method", f"file://{tmp_path}/meet", "--world-size", 2]
    ranks = [["python", "mnmc_ddp_tcp.py", *meet, *LONG, "--rank", rank] for rank in range(2)]
    run = launch(ranks)
    run.wait_for(lambda: len(run.inits()) == 2, 60, "both ranks")
    for pid in run.pids():
        os.kill(pid, signal.SIGKILL)
    assert (tmp_path / "meet").exists()
    late = launch([[*ranks[0], "--timeout", 2]]).wait(60)
    assert late.codes == [1]
    assert says("file is left over", late.last_line()), late.story()
    (tmp_path / "meet").unlink()
    once = [[*rank, "-e", 1] for rank in ranks]
    assert launch(once).succeeded().epochs()[0]["count"] == 2000
