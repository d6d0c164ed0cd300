"""Two network hosts on one machine: all launchers across them, a cut cable, a host that leaves."""

import os
import re
import shutil
import signal
import subprocess

import pytest
import torch
from conftest import hosts_called, needs_hosts
from launch import INIT, REPO, Launch, page_commands
from messages import says

ONE_EPOCH = ("--dataset", "synthetic", "-e", "1")
SCRIPTS = ("mnmc_ddp_tcp.py", "mnmc_ddp_env.py", "mnmc_ddp_mp.py")

RESTARTS = "Fault tolerance and elastic training"


def two_hosts(script, *options):
    return ["bash", REPO / "scripts" / "cluster" / "two_hosts.sh", script, *options]


ACROSS = page_commands("docs/clusters.md", "Two hosts on one machine")


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("command", ACROSS)
def test_readme_command_runs_across_two_hosts(launch, name, command):
    run = launch([["bash", "-c", command]], env={"HOSTS": name}).succeeded()
    assert [row[:3] for row in run.inits()] == [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)]
    assert run.epochs()[0]["count"] == 2000
    assert run.own_err() == "", run.story()


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_cut_cable_ends_both_hosts(launch, tmp_path, name, script):
    """With an error, soon after --timeout; the same command goes on from the checkpoint."""
    options = ("--dataset", "synthetic", "-e", "3", "-b", "125", "--timeout", "10")
    command = two_hosts(script, *options, "--checkpoint", tmp_path / "last.pt")
    settings = {"HOSTS": name, "NPROC": "2"}
    run = launch([command], env=settings)
    run.wait_for(run.epochs, 90, "an epoch")
    subprocess.check_call(["ip", "-n", f"{name}0", "link", "set", "eth0", "down"])
    run.wait(10 + 80)
    assert run.codes == [1], run.story()
    assert says("rank stalled", run.err, 10000), run.story()
    run.wait_for(lambda: not run.pids(), 10, "all processes to be gone")
    assert len(run.epochs()) < 3
    again = launch([command], env=settings).succeeded()
    assert [line["epoch"] for line in again.epochs()] == [2, 3][len(run.epochs()) - 1 :]


@needs_hosts
@pytest.mark.slow
def test_interface_that_is_wrong_or_missing(launch, name):
    """GLOO_SOCKET_IFNAME of another machine; and none, where the host's name leads nowhere."""
    options = (*ONE_EPOCH, "--timeout", "5")
    settings = {"HOSTS": name, "NPROC": "1"}
    wrong = launch([two_hosts(SCRIPTS[0], *options)], env=settings | {"GLOO_SOCKET_IFNAME": "ib0"})
    assert wrong.wait().codes == [1]
    assert says("interface is missing", wrong.last_line()), wrong.story()
    missing = launch([two_hosts(SCRIPTS[0], *options)], env=settings | {"GLOO_SOCKET_IFNAME": ""})
    assert missing.wait().codes == [1]
    assert says("name leads to itself", missing.err), missing.story()


@needs_hosts
@pytest.mark.slow
def test_hosts_are_taken_down_when_the_launcher_is_stopped(launch, name):
    options = ("--dataset", "synthetic", "-e", "1000")
    run = launch([two_hosts(SCRIPTS[2], *options)], env={"HOSTS": name, "NPROC": "1"})
    run.wait_for(lambda: len(run.inits()) == 2, 60, "both ranks")
    assert len(hosts_called(name)) == 2
    same_name = launch([two_hosts(SCRIPTS[2], *options)], env={"HOSTS": name}).wait()
    assert same_name.err == f"there are hosts called {name} already: choose another name, HOSTS=…\n"
    assert len(run.pids()) >= 2 and len(hosts_called(name)) == 2  # not touched by that
    while run.processes[0].poll() is None:  # as timeout does, which sends its signal twice
        run.processes[0].send_signal(signal.SIGTERM)
    assert run.wait(30).codes == [143]
    run.wait_for(lambda: not run.pids(), 10, "all processes to be gone")


def test_two_hosts_says_what_it_needs(launch, tmp_path):
    """Without ip; the words are the same without root."""
    for tool in ("bash", "id", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    run = launch([["env", f"PATH={tmp_path}", *two_hosts(SCRIPTS[0])]]).wait()
    assert run.codes == [1]
    assert run.err.startswith("two_hosts.sh needs root and the package iproute2"), run.story()


def test_two_hosts_waits_between_looks_for_processes_that_end(launch, tmp_path):
    """Both hosts seem to have a process for another second, which no machine can have."""
    for program in ("ip", "id"):
        (tmp_path / program).write_text(STANDS_FOR[program])
        (tmp_path / program).chmod(0o755)
    command = ["env", f"PATH={tmp_path}:{os.environ['PATH']}", *two_hosts(SCRIPTS[1])]
    run = launch([command], env={"HOSTS": "none", "NPROC": "1", "TMPDIR": tmp_path}).succeeded()
    assert 4 <= (tmp_path / "looks").read_text().count("look") < 40, run.story()


# Programs that seem to be root's, and to make hosts. A kernel's largest process id is 4194304.
STANDS_FOR = {
    "id": "#!/bin/sh\necho 0\n",
    "ip": """#!/bin/bash
[ "$1 $2" = "netns pids" ] || exit 0
echo look "$3" >>"$TMPDIR/looks"
first="$(stat --format %W "$TMPDIR/looks")"
[ "$(date +%s)" -gt "$((first + 1))" ] || echo 4194305
""",
}


@needs_hosts
@pytest.mark.parametrize("value", ["bad", "100", "0mbit", "-5mbit", "100mbit; true"])
@pytest.mark.parametrize("setting", ["RATE", "DELAY"])
def test_bad_rate_or_delay_is_answered_in_one_line(launch, name, setting, value):
    """The fixture checks that no host is left."""
    run = launch([two_hosts(SCRIPTS[1])], env={"HOSTS": name, setting: value}).wait()
    assert run.codes == [2], run.story()
    assert re.fullmatch(f"{setting}={value}: give a number and .+\n", run.err), run.story()


@needs_hosts
def test_delay_works_or_says_what_the_kernel_lacks(launch, name):
    """The fixture checks that no host is left, also where the kernel cannot delay."""
    settings = {"HOSTS": name, "NPROC": "1", "DELAY": "50ms"}
    run = launch([two_hosts(SCRIPTS[1], "--help")], env=settings).wait()
    if kernel_has_netem():
        assert run.codes == [0] and run.own_err() == "", run.story()
    else:
        assert run.codes == [1], run.story()
        assert re.fullmatch(
            r"this kernel cannot slow the cable with netem .+ unknown\.\n", run.err
        ), run.story()


def kernel_has_netem():
    """Asks the kernel in a network of its own, which ends with the command."""
    ask = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(ask, capture_output=True).returncode == 0


class Hosts:
    """Two network namespaces joined by a cable. Names lead to 127.0.1.1, as Debian writes it."""

    ADDRESSES = ("192.0.2.1", "192.0.2.2")  # those of the page's commands

    def __init__(self, name, folder, names_lead_to=("127.0.1.1", "127.0.1.1")):
        self.namespaces = [f"{name}0", f"{name}1"]
        self.files = [folder / f"{namespace}.hosts" for namespace in self.namespaces]
        for host, file in enumerate(self.files):
            # Debian's file has the machine's own name alone.
            known = (host,) if names_lead_to[0] == names_lead_to[1] else (0, 1)
            names = "".join(f"{names_lead_to[number]} host{number}\n" for number in known)
            file.write_text(f"127.0.0.1 localhost\n{names}")

    def __enter__(self):
        for namespace in self.namespaces:
            ip("netns", "add", namespace)
        first, second = self.namespaces
        ip(*f"-n {first} link add eth0 type veth peer name eth0 netns {second}".split())
        for namespace, address in zip(self.namespaces, self.ADDRESSES, strict=True):
            ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_):
        for namespace in self.namespaces:
            ip("netns", "delete", namespace)

    def command_on(self, host, line):
        """The command that runs a shell line there, with the host's own name and /etc/hosts."""
        # ip netns exec gives the command mounts of its own, so that no other process sees this one.
        settings = f"mount --bind {self.files[host]} /etc/hosts; hostname host{host}"
        shell = ["unshare", "--uts", "bash", "-c", f"{settings}; exec env {line}"]
        return ["ip", "netns", "exec", self.namespaces[host], *shell]


def ip(*argv):
    subprocess.check_call(["ip", *argv])


def learning_rate(checkpoint, world_size, epochs, batch_size):
    """That of an epoch's last step, which the optimizer's state keeps."""
    steps = -(-10_000 // world_size // batch_size)
    done = (checkpoint["epoch"] - 0.5 / steps) / epochs
    return 0.1 * world_size * batch_size / 64 * min(done / 0.2, (1 - done) / 0.8)


def elastic_command(host, checkpoint, *options):
    """The page's command for that host, with what the page says to replace replaced."""
    _, *commands = page_commands("docs/clusters.md", RESTARTS)
    command = commands[host].replace("node gpu", "node 1").replace("/shared/last.pt", checkpoint)
    return f"{command} {' '.join(map(str, options))}"


@needs_hosts
@pytest.mark.slow
def test_elastic_host_leaves_and_comes_back(tmp_path, name):
    """torchrun --nnodes 1:2: alone from the checkpoint, then both again, at a rate to match."""
    path, epochs, batch_size = tmp_path / "last.pt", 1000, 125
    options = ("--dataset", "synthetic", "-e", epochs, "-b", batch_size)

    def trains_with(world_size):
        """Waits for two more epochs, and checks the learning rate at the end of the last one."""
        before = len(first.epochs())
        first.wait_for(lambda: len(first.epochs()) >= before + 2, 60, "two epochs")
        checkpoint = torch.load(path, weights_only=True)
        (group,) = checkpoint["optimizer"]["param_groups"]
        expected = learning_rate(checkpoint, world_size, epochs, batch_size)
        assert group["lr"] == pytest.approx(expected), first.story()

    with Hosts(name, tmp_path) as hosts:
        start = [hosts.command_on(n, elastic_command(n, str(path), *options)) for n in (0, 1)]
        with (
            Launch([start[0]], tmp_path / "0") as first,
            Launch([start[1]], tmp_path / "1") as second,
        ):
            first.wait_for(first.epochs, 90, "an epoch")
            trains_with(2)
            for pid in second.pids():
                os.kill(pid, signal.SIGKILL)
            first.wait_for(lambda: worlds(first)[-1] == 1, 120, "host 0 to go on alone")
            trains_with(1)
            with Launch([start[1]], tmp_path / "again") as back:
                back.wait_for(lambda: worlds(back) == [2], 120, "host 1 to be back")
                trains_with(2)
            assert {match["host"] for match in INIT.finditer(first.out)} == {"host0"}


# What the page's command has for hosts whose names lead to 127.0.1.1.
FOR_DEBIAN = r"GLOO_SOCKET_IFNAME=\S+ | --rdzv-conf \S+| --local-addr \S+"


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("mended", (False, True))
def test_elastic_command_without_addresses(tmp_path, name, mended):
    """It trains where /etc/hosts has the real addresses, and otherwise says the message."""
    options = ("--dataset", "synthetic", "-e", 1, "-b", 125)
    lines = [elastic_command(n, str(tmp_path / "last.pt"), *options) for n in (0, 1)]
    plain = [re.sub(FOR_DEBIAN, "", line) for line in lines]
    assert plain[0] == plain[1]
    leads_to = Hosts.ADDRESSES if mended else ("127.0.1.1", "127.0.1.1")
    if not mended:  # The test need not wait for a minute, which is the default.
        soon = "--rdzv-conf read_timeout=5 --rdzv-id"
        plain = [line.replace("--rdzv-id", soon) for line in plain]
    with Hosts(name, tmp_path, leads_to) as hosts:
        commands = [hosts.command_on(host, line) for host, line in enumerate(plain)]
        with Launch(commands, tmp_path / "output") as run:
            run.wait(120)
            if mended:
                assert run.codes == [0, 0] and worlds(run) == [2, 2], run.story()
            else:
                assert run.codes == [1, 1] and run.out == "", run.story()
                for errors in (paths[1].read_text() for paths in run.outputs):
                    assert says("nobody opens the store", errors), run.story()


def worlds(run):
    """The world sizes of the [init] lines, in the order in which they were printed."""
    return [int(match["world"]) for match in INIT.finditer(run.out)]
