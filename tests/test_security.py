"""Who can connect to a run: what listens where, and what keeps strangers out.

All of this stays on 127.0.0.1 and between network namespaces that the tests make. The strangers
know an address and a port, and nothing else.
"""

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import needs_hosts
from hosts import ADDRESSES, Hosts
from launch import REPO, SCRIPTS, Launch, marked_processes, page_commands

PAGE = "docs/security.md"
LONG = "--dataset synthetic -e 1000 -b 125"


def name_role(process):
    """Which process of a run this is, in the words of the page's table."""
    argv = [Path(part).name for part in process.info["cmdline"]]
    if "torchrun" in argv[:2]:
        return "torchrun"
    is_rank = any(word in " ".join(argv) for word in ("mnmc_ddp", "spawn_main"))
    return "rank" if is_rank and argv[0].startswith("python") else ""


def find_listening(run, entrances=((),)):
    """(role, address, port) of all that the processes of a run listen on, once the ranks met.

    entrances: for each network host, the words that a command on it begins with.
    """
    ended = lambda: any(process.poll() is not None for process in run.processes)  # noqa: E731
    run.wait_for(lambda: len(run.inits()) == 2 or ended(), 120, "two ranks")
    assert len(run.inits()) == 2, run.story()
    roles = {process.pid: name_role(process) for process in marked_processes(run.mark)}
    found = []
    for words in entrances:
        table = subprocess.check_output([*words, "ss", "--no-header", "-ltnp"], text=True)
        for line in table.splitlines():
            address, _, port = line.split()[3].rpartition(":")
            address = address.replace("0.0.0.0", "*").strip("[]").removeprefix("::ffff:")
            pids = set(map(int, re.findall(r"pid=(\d+)", line)))
            found += [(roles[pid], address, int(port)) for pid in pids & roles.keys()]
    return found


def describe(rows):
    """The places as on the page: `*` is every address, `free` a port that the kernel chose."""
    names = {"127.0.0.1": "lo", "*": "*"} | dict.fromkeys(ADDRESSES, "name")
    found = Counter()
    for role, address, port in rows:
        port = port if port == 18888 else "free"
        found[role, f"`{names[address]}:{port}`"] += 1
    texts = []
    for (role, place), count in found.items():
        if role == "rank":
            texts.append(f"{'each rank' if count == 2 else 'rank 0'} {place}")
        else:
            texts.append(f"{role} {place}" + " twice" * (count == 2))
    return ", ".join(sorted(texts))


TCP = "python mnmc_ddp_tcp.py --world-size 2 --init-method"
MP = "python mnmc_ddp_mp.py --nproc-per-node"
# How the page names a way to start two ranks, and the lines that start them.
ONE_MACHINE = {
    "`mnmc_ddp_tcp.py`, `tcp://`": [f"{TCP} tcp://127.0.0.1:18888 --rank {n}" for n in (0, 1)],
    "`mnmc_ddp_tcp.py`, `file://`": [f"{TCP} file://$FOLDER/meet --rank {n}" for n in (0, 1)],
    "`mnmc_ddp_mp.py`": [f"{MP} 2"],
    "`torchrun --standalone`": ["torchrun --standalone --nproc-per-node 2 mnmc_ddp_env.py"],
    "`scripts/mnmc_ddp_tcp.sh`, `scripts/mnmc_ddp_mp.sh`": ["bash scripts/mnmc_ddp_tcp.sh"],
    "`scripts/mnmc_ddp_env.sh`": ["bash scripts/mnmc_ddp_env.sh"],
}


def enter(hosts):
    """For each host the words that a command on it begins with."""
    return [("ip", "netns", "exec", namespace) for namespace in hosts.namespaces]


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
        assert describe(find_listening(run, enter(hosts))) == shown[1]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("ss"), reason="needs the package iproute2")
def test_on_one_machine_nothing_listens_beyond_loopback(launch, tmp_path):
    """With gloo, by the lines of the page. Nobody else can read what is saved."""
    *lines, command = page_commands(PAGE, "One machine")
    command = f"{command.replace('python ', f'python {REPO}/')} --nproc-per-node 2 {LONG}"
    run = launch([["bash", "-c", "; ".join([f"cd {tmp_path}", *lines, command])]])
    rows = find_listening(run)
    assert [address for _, address, _ in rows] == ["127.0.0.1"] * 2, rows
    run.wait_for(run.epochs, 180, "a checkpoint")
    for path in tmp_path.glob("run/**/*"):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_load_weights_only_and_send_no_objects(script):
    """Neither a checkpoint nor another rank can run code."""
    code = (REPO / script).read_text()
    assert "pickle" not in code and not re.search(r"\w+_object(_list)?\(", code)
    loads = re.findall(r"= torch\.load\(.*", code)
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
    torchrun = "torchrun --nnodes 2 --nproc-per-node 1 --master-addr 192.0.2.1 --node-rank"
    lines = [f"{torchrun} {node} mnmc_ddp_env.py" for node in (0, 1)]
    with Hosts(name, tmp_path, number=3, names_known=True) as hosts:
        *two, third = enter(hosts)
        rules = "\n".join(page_commands(PAGE, "A firewall"))
        for inside in two:
            subprocess.check_call([*inside, "bash", "-ec", rules])
        with start_on(hosts, tmp_path, lines) as run:
            rows = find_listening(run, two)
            places = {f"{address.replace('*', '192.0.2.1')}:{port}" for _, address, port in rows}
            assert {place.split(":")[0] for place in places} == set(ADDRESSES[:2])
            knock = [*third, sys.executable, "-c", KNOCK, *places]
            assert set(subprocess.check_output(knock, text=True).split()) == {"TimeoutError"}
            for inside in two:
                subprocess.check_call([*inside, "nft", "delete", "table", "inet", "ddp"])
            assert set(subprocess.check_output(knock, text=True).split()) == {"connected"}
            before = len(run.epochs())
            run.wait_for(lambda: len(run.epochs()) > before, 90, "the next epoch")
