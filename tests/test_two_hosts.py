"""Two network hosts on one machine: all launchers across them, a cut cable, a host that leaves."""

import os
import re
import signal
import subprocess

import pytest
import torch
from conftest import hosts_called, needs_hosts
from hosts import Hosts
from launch import INIT, REPO, Launch, page_commands
from messages import says

pytestmark = needs_hosts
SCRIPTS = ("mnmc_ddp_tcp.py", "mnmc_ddp_env.py", "mnmc_ddp_mp.py")
LONG = ("--dataset", "synthetic", "-e", "1000")


def two_hosts(script, *options):
    return ["bash", REPO / "scripts" / "cluster" / "two_hosts.sh", script, *options]


@pytest.mark.slow
@pytest.mark.parametrize("command", page_commands("docs/clusters.md", "Two hosts on one machine"))
def test_command_of_the_page_runs_across_two_hosts(launch, name, command):
    run = launch([["bash", "-c", command]], env={"HOSTS": name}).succeeded()
    assert [row[:3] for row in run.inits()] == [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)]
    assert [epoch["count"] for epoch in run.epochs()] == [2000], run.story()
    assert run.own_err() == "", run.story()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS[:2])
def test_cut_cable_ends_both_hosts(launch, name, script):
    """With an error, soon after --timeout.

    On a busy machine the first of four ranks waits some seconds for the last one to start.
    """
    options = ("--dataset", "synthetic", "-e", "3", "-b", "125", "--timeout", "15")
    run = launch([two_hosts(script, *options)], env={"HOSTS": name, "NPROC": "2"})
    run.wait_for(run.epochs, 90, "an epoch")
    subprocess.check_call(["ip", "-n", f"{name}0", "link", "set", "eth0", "down"])
    run.wait(15 + 80)
    assert run.codes == [1], run.story()
    assert says("rank stalled", run.err, 15000), run.story()
    assert says("rank stalled in training", run.err), run.story()
    run.wait_for(lambda: not run.pids(), 10, "all processes to be gone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interface", "message"), (("ib0", "interface is missing"), ("", "name leads to itself"))
)
def test_interface_that_is_wrong_or_missing(launch, name, interface, message):
    """GLOO_SOCKET_IFNAME of another machine; and none, where the host's name leads nowhere."""
    settings = {"HOSTS": name, "NPROC": "1", "GLOO_SOCKET_IFNAME": interface}
    run = launch([two_hosts(SCRIPTS[0], *LONG, "--timeout", "5")], env=settings).wait()
    assert run.codes == [1] and says(message, run.err), run.story()


@pytest.mark.slow
def test_hosts_are_taken_down_when_the_launcher_is_stopped(launch, name):
    run = launch([two_hosts(SCRIPTS[2], *LONG)], env={"HOSTS": name, "NPROC": "1"})
    run.wait_for(lambda: len(run.inits()) == 2, 60, "both ranks")
    same_name = launch([two_hosts(SCRIPTS[2])], env={"HOSTS": name}).wait()
    assert same_name.codes == [1] and "File exists" in same_name.err
    assert len(run.pids()) >= 2 and len(hosts_called(name)) == 2  # not touched by that
    while run.processes[0].poll() is None:  # as timeout does, which sends its signal twice
        run.processes[0].send_signal(signal.SIGTERM)
    assert run.wait(30).codes == [143]
    run.wait_for(lambda: not run.pids(), 10, "all processes to be gone")


@pytest.mark.parametrize("setting", ("RATE=100", "RATE=0mbit"))
def test_bad_rate_is_answered_in_one_line(launch, name, setting):
    """The fixture checks that no host is left."""
    run = launch([["env", setting, *two_hosts(SCRIPTS[1])]], env={"HOSTS": name}).wait()
    assert run.codes == [2] and run.err.count("\n") == 1 and setting in run.err, run.story()


# Elastic torchrun: hosts whose own names lead to 127.0.1.1, as on Debian.


def elastic_commands(*options):
    """The page's commands for the two hosts, with what the page says to replace replaced."""
    lines = page_commands("docs/clusters.md", "Fault tolerance and elastic training")[1:]
    words = " ".join(map(str, options))
    # torchrun waits 10 seconds for a host that may come, and not 30.
    lines = [re.sub("(is_host=.)", r"\1,last_call_timeout=10", line) for line in lines]
    return [re.sub("gpu mnmc_ddp_env.py .*", f"1 mnmc_ddp_env.py {words}", line) for line in lines]


def read_worlds(run):
    """The world sizes of the [init] lines, in the order in which they were printed."""
    return [int(match["world"]) for match in INIT.finditer(run.out)]


@pytest.mark.slow
def test_elastic_host_leaves_and_comes_back(tmp_path, name):
    """torchrun --nnodes 1:2: alone from the checkpoint, then both again, at a rate to match."""
    path, epochs, batch_size = tmp_path / "last.pt", 1000, 125
    lines = elastic_commands(*LONG, "-b", batch_size, "--checkpoint", path)

    def check_learning_rate(world_size):
        """That of the last step of an epoch that has begun now, which the optimizer keeps."""
        before = len(first.epochs())
        first.wait_for(lambda: len(first.epochs()) >= before + 2, 60, "two epochs")
        checkpoint = torch.load(path, weights_only=True)
        done = (checkpoint["epoch"] - 0.5 / (-(-10_000 // world_size // batch_size))) / epochs
        expected = 0.1 * world_size * batch_size / 64 * min(done / 0.2, (1 - done) / 0.8)
        (group,) = checkpoint["optimizer"]["param_groups"]
        assert group["lr"] == pytest.approx(expected), first.story()

    with Hosts(name, tmp_path) as hosts:
        commands = [[hosts.command_on(host, lines[host])] for host in (0, 1)]
        with Launch(commands[0], tmp_path / "0") as first:
            with Launch(commands[1], tmp_path / "1") as second:
                first.wait_for(first.epochs, 90, "an epoch")
                check_learning_rate(2)
                for pid in second.pids():
                    os.kill(pid, signal.SIGKILL)
            first.wait_for(lambda: read_worlds(first)[-1] == 1, 120, "host 0 to go on alone")
            check_learning_rate(1)
            with Launch(commands[1], tmp_path / "again") as back:
                back.wait_for(lambda: read_worlds(back) == [2], 120, "host 1 to be back")
                check_learning_rate(2)
            assert {match["host"] for match in INIT.finditer(first.out)} == {"host0"}


@pytest.mark.slow
@pytest.mark.parametrize("names_known", (False, True))
def test_elastic_command_without_addresses(tmp_path, name, names_known):
    """It trains where /etc/hosts has the real addresses, and otherwise says the message."""
    lines = elastic_commands("--dataset", "synthetic", "-e", 1, "-b", 125)
    addresses = r"GLOO_SOCKET_IFNAME=\S+ | --rdzv-conf \S+| --local-addr \S+"
    plain = [re.sub(addresses, "", line) for line in lines]
    assert plain[0] == plain[1] != lines[0]
    if not names_known:  # The test need not wait for a minute, which is the default.
        soon = "--rdzv-conf read_timeout=5 --rdzv-id"
        plain = [line.replace("--rdzv-id", soon) for line in plain]
    with Hosts(name, tmp_path, names_known=names_known) as hosts:
        commands = [hosts.command_on(host, line) for host, line in enumerate(plain)]
        with Launch(commands, tmp_path / "output") as run:
            run.wait(120)
            if names_known:
                assert run.codes == [0, 0] and read_worlds(run) == [2, 2], run.story()
            else:
                assert run.codes == [1, 1] and run.out == "", run.story()
                for errors in (paths[1].read_text() for paths in run.outputs):
                    assert says("nobody opens the store", errors), run.story()
