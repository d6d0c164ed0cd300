"""A rank that dies, stalls or never comes ends the others; the same command then resumes."""

import os
import re
import signal
import socket

import pytest
import torch
from launch import DDP, REPO, Launch, assert_same, commands_for, free_port, page_commands
from messages import says
from packaging.version import Version

import snsc

pytestmark = pytest.mark.slow
EPOCHS = 2
OPTIONS = ("--dataset", "synthetic", "-e", EPOCHS, "-b", "250")
LONG = ("--dataset", "synthetic", "-e", "1000", "-b", "250")


def gone(run, seconds):
    """Waits until nothing of the launch is left, and checks that no command succeeded."""
    run.wait_for(lambda: not run.pids(), seconds, "all processes to be gone")
    run.wait(seconds)
    assert 0 not in run.codes, run.story()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The metrics and the checkpoints of runs that nothing happens to, by number of processes.

    Each rank has a worker, which draws no random number that would change a result.
    """
    found = {}
    for processes, script in ((1, "snsc.py"), (2, "mnmc_ddp_env.py")):
        folder = tmp_path_factory.mktemp("undisturbed")
        options = (*OPTIONS, "--workers", 1, "--checkpoint", folder / "last.pt")
        command = commands_for(script, processes, *options)
        with Launch(command, folder) as run:
            metrics = run.succeeded().metrics()
        found[processes] = metrics, folder / "last.pt"
    return found


@pytest.mark.parametrize("script", ["snsc.py", "mnmc_ddp_mp.py"])
def test_killed_run_resumes_and_ends_as_an_undisturbed_one(launch, tmp_path, undisturbed, script):
    """SIGKILL in the second epoch.

    Nothing is left running, also no worker, and the same command resumes after the last whole
    epoch, and says so. Metrics and weights are those of an undisturbed run, to the bit, and so
    with any number of workers.
    """
    processes = 1 if script == "snsc.py" else 2
    metrics, expected = undisturbed[processes]
    path = tmp_path / "folder" / "last.pt"
    killed = launch(script, processes, *OPTIONS, "--workers", 1, "--checkpoint", path)
    killed.wait_for(killed.epochs, 120, "an epoch")
    os.kill(killed.pid_of(0), signal.SIGKILL)
    gone(killed, 30)
    run = launch(script, processes, *OPTIONS, "--checkpoint", path).succeeded()
    assert run.out.count(f"resumed {path} after epoch 1/{EPOCHS}\n") == 1, run.story()
    assert run.own_err() == "", run.story()
    assert killed.metrics() + run.metrics() == metrics
    assert_same(path, expected)


def test_torchrun_restarts_killed_ranks_by_itself(launch, tmp_path, undisturbed):
    """The restarted ranks resume and end with the metrics of an undisturbed run."""
    command, *_ = page_commands("docs/clusters.md", "Fault tolerance and elastic training")
    command = command.replace("gpu", "2").replace("checkpoints/last.pt", f"{tmp_path}/last.pt")
    run = launch([["bash", "-c", f"{command} {' '.join(map(str, OPTIONS))}"]])
    run.wait_for(run.epochs, 120, "an epoch")
    os.kill(run.pid_of(1), signal.SIGKILL)
    run.succeeded()
    assert len(run.inits()) == 4, run.story()  # both ranks started twice
    assert run.metrics() == undisturbed[2][0]


def test_ctrl_c_ends_all_ranks(launch):
    """It goes to all processes of a terminal's foreground."""
    tcp = [["bash", REPO / "scripts" / "mnmc_ddp_tcp.sh", *LONG]]
    for commands in (tcp, *(commands_for(script, 2, *LONG) for script in DDP[1:3])):
        run = launch(commands, env={"NPROC": "2"})
        run.wait_for(lambda run=run: len(run.inits()) == 2, 60, "both ranks")
        os.killpg(run.processes[0].pid, signal.SIGINT)
        gone(run, 30)


def test_interrupt_of_the_main_process_alone_ends_its_workers(launch):
    """As by an IDE's button, which interrupts what the IDE has started."""
    run = launch("mnmc_ddp_mp.py", 2, *LONG)
    run.wait_for(lambda: len(run.inits()) == 2, 60, "both ranks")
    run.processes[0].send_signal(signal.SIGINT)
    gone(run, 30)


def test_nohup_survives_the_end_of_its_terminal(launch):
    """Of its launcher. torchrun alone ends its ranks on SIGHUP."""
    if Version(torch.__version__) < Version("2.10"):
        pytest.skip("torchrun has --signals-to-handle since 2.10")
    start = f"trap '' HUP; exec bash scripts/mnmc_ddp_env.sh {' '.join(LONG)}"
    run = launch([["bash", "-c", start]], env={"NPROC": "2"})
    run.wait_for(lambda: len(run.inits()) == 2, 60, "both ranks")
    os.killpg(run.processes[0].pid, signal.SIGHUP)
    epochs = len(run.epochs())
    run.wait_for(lambda: len(run.epochs()) > epochs + 1, 60, "two epochs more")


def test_rank_that_never_comes_is_told_by_the_last_line(launch):
    """So are an address that is taken and one that nobody listens on, soon after --timeout."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        tcp = ["python", "mnmc_ddp_tcp.py", "--world-size", 2, "--init-method"]
        mp = ["python", "mnmc_ddp_mp.py", "--nodes", 2, "--nproc-per-node", 1, "--init-method"]
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        late, refused = "ranks are missing", "nobody listens"
        commands = [
            # docs/course.md
            ([*tcp, f"tcp://127.0.0.1:{free_port()}", "--rank", 0], "1/2 clients joined"),
            ([*tcp, f"tcp://127.0.0.1:{free_port()}", "--rank", 1], refused),
            ([*tcp, f"tcp://127.0.0.1:{taken}", "--rank", 0], "port is taken"),
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


def test_failed_save_ends_all_ranks_and_keeps_the_old_checkpoint(launch, tmp_path):
    """Rank 0 alone writes. Its temporary file cannot be made, because a folder has that name."""
    path = tmp_path / "last.pt"
    model = snsc.ConvNet()
    snsc.save_checkpoint(path, model, torch.optim.SGD(model.parameters(), momentum=0.9), 1)
    before = path.read_bytes()
    (tmp_path / "last.pt.tmp").mkdir()
    options = ("--dataset", "synthetic", "-b", "500", "-e", "100", "--checkpoint", path)
    run = launch("mnmc_ddp_env.py", 2, *options).wait(90)
    assert 0 not in run.codes, run.story()
    assert "in save_checkpoint" in run.err, run.story()
    assert re.search("Is a directory|last.pt.tmp cannot be opened", run.err)
    run.wait_for(lambda: not run.pids(), 10, "all processes to be gone")
    assert run.epochs() == []
    assert path.read_bytes() == before


def test_file_left_over_from_a_killed_run_never_hangs(launch, tmp_path):
    """Its addresses lead to the dead, and the end is an error."""
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
