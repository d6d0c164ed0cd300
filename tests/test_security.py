"""Who can connect to a run: what listens where, and what keeps strangers out.

All of this stays on 127.0.0.1 and between network namespaces that the tests make. The strangers
know an address and a port, and nothing else.
"""

import contextlib
import ipaddress
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import needs_hosts
from hosts import ADDRESSES, Hosts
from launch import REPO, SCRIPTS, Launch, commands_for, marked_processes, page_commands

PAGE = "docs/security.md"
LONG = "--dataset synthetic -e 1000 -b 125"


def read_address(text):
    """The address that a line of /proc/net/tcp or tcp6 has: 32-bit words, the last byte first."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


def read_places(pid):
    """(address, port) of each socket on which a process listens, in its own network namespace."""
    places, sockets = [], set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        for file in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                sockets.add(os.readlink(f"/proc/{pid}/fd/{file}"))
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # 0A: it listens
                    address, port = fields[1].split(":")
                    places.append((read_address(address), int(port, 16)))
    return places


def name_role(process):
    """Which process of a run this is, in the words of the page's table."""
    argv = [Path(part).name for part in process.cmdline()]
    for launcher in ("srun", "slurmstepd:", "torchrun"):
        if launcher in argv[:2] or argv[0].startswith(launcher):
            return launcher.rstrip(":")
    is_rank = any(word in " ".join(argv) for word in ("mnmc_ddp", "spawn_main"))
    return "rank" if is_rank and argv[0].startswith("python") else ""


def find_listening(run):
    """(role, address, port) of all that the processes of a run listen on, once the ranks met."""
    ended = lambda: any(process.poll() is not None for process in run.processes)  # noqa: E731
    run.wait_for(lambda: len(run.inits()) == 2 or ended(), 120, "two ranks")
    assert len(run.inits()) == 2, run.story()
    return [
        (name_role(process), *place)
        for process in marked_processes(run.mark)
        for place in read_places(process.pid)
    ]


def describe(rows):
    """The places as on the page: `*` is every address, `free` a port that the kernel chose."""
    names = {"127.0.0.1": "lo", "0.0.0.0": "*", "::": "*"} | dict.fromkeys(ADDRESSES, "name")
    found = Counter()
    for role, address, port in rows:
        port = port if port in (18888, 29400, 29500) else "free"
        found[role, f"`{names[str(address)]}:{port}`"] += 1
    texts = []
    for (role, place), count in found.items():
        if role == "rank":
            texts.append(f"{'each rank' if count == 2 else 'rank 0'} {place}")
        else:
            texts.append(f"{role} {place}" + " twice" * (count == 2))
    return ", ".join(sorted(texts))


TCP = "python mnmc_ddp_tcp.py --world-size 2 --init-method"
MP = "python mnmc_ddp_mp.py --nproc-per-node"
TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 1 --master-addr 192.0.2.1"
ELASTIC = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 1"
ELASTIC += " --rdzv-id r --rdzv-backend c10d --rdzv-endpoint 192.0.2.1:29400"
FAR = "tcp://192.0.2.1:18888"
# How the page names a way to start two ranks, the lines that start them, and what listens.
ONE_MACHINE = {
    "`mnmc_ddp_tcp.py`, `tcp://`": [f"{TCP} tcp://127.0.0.1:18888 --rank {n}" for n in (0, 1)],
    "`mnmc_ddp_tcp.py`, `file://`": [f"{TCP} file://$FOLDER/meet --rank {n}" for n in (0, 1)],
    "`mnmc_ddp_mp.py`": [f"{MP} 2"],
    "`torchrun --standalone`": ["torchrun --standalone --nproc-per-node 2 mnmc_ddp_env.py"],
    "`scripts/mnmc_ddp_tcp.sh`, `scripts/mnmc_ddp_mp.sh`": ["bash scripts/mnmc_ddp_tcp.sh"],
    "`scripts/mnmc_ddp_env.sh`": ["bash scripts/mnmc_ddp_env.sh"],
}
TWO_HOSTS = {
    "rank 0 `*:18888`": [f"{TCP} {FAR} --rank {n} --local-rank 0" for n in (0, 1)],
    "rank 0 `*:18888` ": [f"{MP} 1 --nodes 2 --init-method {FAR} --node-rank {n}" for n in (0, 1)],
    "torchrun `*:29500`": [f"{TORCHRUN} --node-rank {n} mnmc_ddp_env.py" for n in (0, 1)],
    "rank 0 `*:free`, torchrun `*:29400`": [
        f"{ELASTIC} --rdzv-conf is_host={1 - n} --local-addr {ADDRESSES[n]} mnmc_ddp_env.py"
        for n in (0, 1)
    ],
}


def start_on(hosts, folder, lines):
    """Starts each line on a host of its own, or all of them where there is one host."""
    last = len(hosts.namespaces) - 1
    commands = [hosts.command_on(min(n, last), f"{line} {LONG}") for n, line in enumerate(lines)]
    return Launch(commands, folder / "output", env={"NPROC": "2", "FOLDER": str(folder)})


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("way", ONE_MACHINE)
def test_one_machine_listens_as_the_page_says(tmp_path, name, way):
    """On a host whose name leads to its address on the network."""
    shown = re.search(rf"^\| {re.escape(way)} \| (.+?) \|", (REPO / PAGE).read_text(), re.M)
    with (
        Hosts(name, tmp_path, number=1, names_known=True) as hosts,
        start_on(hosts, tmp_path, ONE_MACHINE[way]) as run,
    ):
        assert describe(find_listening(run)) == shown[1]


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("store", TWO_HOSTS)
def test_two_hosts_listen_as_the_page_says(tmp_path, name, store):
    with (
        Hosts(name, tmp_path, names_known=True) as hosts,
        start_on(hosts, tmp_path, TWO_HOSTS[store]) as run,
    ):
        assert describe(find_listening(run)) == f"each rank `name:free`, {store.strip()}"


@pytest.mark.slow
def test_srun_and_its_job_listen_on_every_address(cluster, tmp_path):
    command = ["srun", "-n2", "-N2", "python", "mnmc_ddp_slurm.py", *LONG.split()]
    with Launch([command], tmp_path / "output", env=cluster.env) as run:
        rows = find_listening(run)
    everywhere = {(role, port) for role, address, port in rows if address.is_unspecified}
    assert Counter(role for role, _ in everywhere) == {"srun": 4, "rank": 1}, rows
    (port,) = (port for role, port in everywhere if role == "rank")
    assert 10000 <= port < 30000


# One machine.


@pytest.mark.parametrize("how", ("scripts/mnmc_ddp_tcp.sh", "scripts/mnmc_ddp_mp.sh", "the page"))
def test_on_one_machine_nothing_listens_beyond_loopback(launch, tmp_path, how):
    """With gloo, and with nccl as far as its setting goes. Nobody else can read what is saved."""
    if how == "the page":
        *lines, command = page_commands(PAGE, "One machine")
        command = f"{command.replace('python ', f'python {REPO}/')} --nproc-per-node 2"
        line = "; ".join([f"cd {tmp_path}", *lines, command])
    else:
        line = f"bash {how}"
    run = launch([["bash", "-c", f"{line} {LONG}"]], env={"NPROC": "2"})
    rows = find_listening(run)
    assert len(rows) == 2 and all(address.is_loopback for _, address, _ in rows), rows
    ranks = [process for process in marked_processes(run.mark) if name_role(process) == "rank"]
    for process in ranks:
        settings = process.info["environ"]
        assert settings["GLOO_SOCKET_IFNAME"] == settings["NCCL_SOCKET_IFNAME"] == "lo"
    if how == "the page":
        run.wait_for(run.epochs, 180, "a checkpoint")
    for path in tmp_path.glob("run/**/*"):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.slow
def test_run_ends_well_among_rude_strangers(launch):
    """HTTP requests, random bytes and silent connections at every port, open until the end."""
    options = ("--dataset", "synthetic", "-e", 3, "-b", 125, "--timeout", 60)
    run = launch(commands_for("mnmc_ddp_env.py", 2, *options), env={"GLOO_SOCKET_IFNAME": "lo"})
    messages = [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", random.Random(0).randbytes(4096), b""]
    with contextlib.ExitStack() as connections:
        for _, _, port in find_listening(run):
            for message in messages:
                stranger = connections.enter_context(socket.create_connection(("127.0.0.1", port)))
                stranger.sendall(message)
        assert len(run.epochs()) < 3, "the strangers came too late"
        run.succeeded(180)
    assert len(run.epochs()) == 3


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_load_weights_only_and_send_no_objects(script):
    """Neither a checkpoint nor another rank can run code."""
    code = (REPO / script).read_text()
    assert "pickle" not in code and not re.search(r"\w+_object(_list)?\(", code)
    loads = re.findall(r"torch\.load\(.*", code)
    assert len(loads) == 1 and "weights_only=True" in loads[0]


# Several hosts.

KNOCK = """
import socket, sys
for place in sys.argv[1:]:
    try:
        socket.create_connection(place.split(":"), timeout=1).close()
        print("connected")
    except OSError as error:
        print(type(error).__name__)
"""


@needs_hosts
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nft"), reason="needs the package nftables")
def test_firewall_keeps_a_third_host_out(tmp_path, name):
    """Two hosts meet and train behind the rules of the page. Without the rules the third is in."""
    with Hosts(name, tmp_path, number=3, names_known=True) as hosts:
        enter = [["ip", "netns", "exec", namespace] for namespace in hosts.namespaces]
        rules = "\n".join(page_commands(PAGE, "A firewall"))
        for inside in enter[:2]:
            subprocess.check_call([*inside, "bash", "-ec", rules])
        with start_on(hosts, tmp_path, TWO_HOSTS["torchrun `*:29500`"]) as run:
            rows = find_listening(run)
            places = {f"{'192.0.2.1' if a.is_unspecified else a}:{port}" for _, a, port in rows}
            assert {place.split(":")[0] for place in places} == set(ADDRESSES[:2])
            knock = [*enter[2], sys.executable, "-c", KNOCK, *places]
            assert set(subprocess.check_output(knock, text=True).split()) == {"TimeoutError"}
            for inside in enter[:2]:
                subprocess.check_call([*inside, "nft", "delete", "table", "inet", "ddp"])
            assert set(subprocess.check_output(knock, text=True).split()) == {"connected"}
            before = len(run.epochs())
            run.wait_for(lambda: len(run.epochs()) > before, 90, "the next epoch")
