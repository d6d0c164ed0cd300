"""Who can connect to a run: what listens where, what strangers do to it, and what keeps them out.

All of this stays on 127.0.0.1 and between network namespaces that the tests make. The strangers are
a few lines with sockets, or torch's own client. They know an address and a port, and nothing else.
"""

import contextlib
import inspect
import ipaddress
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import needs_hosts
from forked import run_forked_ranks
from launch import REPO, SCRIPTS, Launch, free_port, marked_processes, page_commands
from slurm import Cluster, skip_without_slurm
from test_two_hosts import Hosts

PAGE = "docs/security.md"
LONG = "--dataset synthetic -e 1000 -b 125"


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(NODES="2", CPUS="4")
    yield cluster
    cluster.stop()


# What listens where.


def decode_address(text):
    """The address that a line of /proc/net/tcp or tcp6 has: 32-bit words, the last byte first."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


def places_of(pid):
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
                    places.append((decode_address(address), int(port, 16)))
    return places


def role_of(process):
    """Which process of a run this is, in the words of the page's table."""
    argv = [Path(part).name for part in process.cmdline()]
    for launcher in ("srun", "slurmstepd:", "mpirun", "torchrun"):
        if launcher in argv[:2] or argv[0].startswith(launcher):
            return launcher.rstrip(":")
    return "rank" if any(word in " ".join(argv) for word in ("mnmc_ddp", "spawn_main")) else ""


def listening(run):
    """(role, process id, address, port) of all that the processes of a run listen on."""
    return [
        (role_of(process), process.pid, address, port)
        for process in marked_processes(run.mark)
        for address, port in places_of(process.pid)
    ]


def describe(rows, ranks, ports):
    """The places as on the page: `*` is every address, `free` a port that the kernel chose."""
    found = Counter()
    for role, _, address, port in rows:
        where = "*" if address.is_unspecified else str(address)
        where = {"127.0.0.1": "lo", "::1": "lo"}.get(where, where)
        where = "name" if where in (*Hosts.ADDRESSES, "10.77.0.1", "10.77.0.2") else where
        found[role, f"`{where}:{port if port in ports else 'free'}`"] += 1
    texts = []
    for (role, place), count in found.items():
        who = "each rank" if role == "rank" and count == ranks else role
        who = "rank 0" if role == "rank" and count == 1 else who
        texts.append(f"{who} {place}" + (" twice" if role != "rank" and count == 2 else ""))
    return ", ".join(sorted(texts)) or "nothing"


def table(section, page=PAGE):
    """The rows of the first table of a page's section, each a list of cells, without the heads."""
    text = (REPO / page).read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \|$", text, re.MULTILINE)
    return [row.split(" | ") for row in rows[2:]]


TCP = "python mnmc_ddp_tcp.py --world-size 2 --init-method"
TWO = "torchrun --nnodes 2 --nproc-per-node 1 --master-addr 192.0.2.1 --node-rank"
ELASTIC = (
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 1 --rdzv-id r "
)
ELASTIC += "--rdzv-backend c10d --rdzv-endpoint 192.0.2.1:29400"
# How the page names a way to start two ranks, and its lines: all on host 0, or one on each host.
ONE_MACHINE = {
    "`mnmc_ddp_tcp.py`, `tcp://`": [f"{TCP} tcp://127.0.0.1:18888 --rank {n}" for n in (0, 1)],
    "`mnmc_ddp_tcp.py`, `file://`": [f"{TCP} file://FOLDER/meet --rank {n}" for n in (0, 1)],
    "`mnmc_ddp_mp.py`": ["python mnmc_ddp_mp.py --nproc-per-node 2"],
    "`torchrun --standalone`": ["torchrun --standalone --nproc-per-node 2 mnmc_ddp_env.py"],
    "`scripts/mnmc_ddp_tcp.sh`, `scripts/mnmc_ddp_mp.sh`": ["bash scripts/mnmc_ddp_tcp.sh"],
    "`scripts/mnmc_ddp_env.sh`": ["bash scripts/mnmc_ddp_env.sh"],
}
TWO_HOSTS = {
    "`mnmc_ddp_tcp.py`": [f"{TCP} tcp://192.0.2.1:18888 --rank {n} --local-rank 0" for n in (0, 1)],
    "`mnmc_ddp_mp.py`": [
        "python mnmc_ddp_mp.py --nodes 2 --nproc-per-node 1 --init-method tcp://192.0.2.1:18888 "
        f"--node-rank {n}"
        for n in (0, 1)
    ],
    "`torchrun --nnodes 2`": [f"{TWO} {n} mnmc_ddp_env.py" for n in (0, 1)],
    "`torchrun --nnodes 1:2 --rdzv-backend c10d`": [
        f"{ELASTIC} --rdzv-conf is_host={1 - n} --local-addr 192.0.2.{1 + n} mnmc_ddp_env.py"
        for n in (0, 1)
    ],
}
PORTS = (18888, 29400, 29500)


# Rude strangers.


def reachable(run):
    """Where a process of this machine reaches the processes of a run."""
    places = {(address, port) for _, _, address, port in listening(run)}
    return sorted({f"{'127.0.0.1' if a.is_unspecified else a}:{port}" for a, port in places})


def has_ended(run):
    """Whether a command of a run has ended, so that a test need not wait for more of it."""
    return any(process.poll() is not None for process in run.processes)


def wait_for(gate):
    """The beginning of a command that waits until this file exists."""
    return ["bash", "-c", f'until [ -e {gate} ]; do sleep 0.1; done; exec "$@"', "bash"]


def commands_of(launcher, gate, options):
    """Two ranks, of which the second starts when the gate exists; --standalone starts both."""
    address = ["--init-method", "tcp://127.0.0.1:18888"]
    torchrun = ["torchrun", "--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1"]
    nodes = ["--nodes", 2, "--nproc-per-node", 1, "--node-rank"]
    if launcher == "torchrun --standalone":
        return [["torchrun", "--standalone", "--nproc-per-node", 2, "mnmc_ddp_env.py", *options]]
    if launcher == "srun":
        wait = f'[ "$SLURM_PROCID" = 0 ] || until [ -e {gate} ]; do sleep 0.1; done; exec "$@"'
        start = ["srun", "-n2", "-N2", "--kill-on-bad-exit=1", "bash", "-c", wait, "bash"]
        return [[*start, "python", "mnmc_ddp_slurm.py", *options]]
    lines = {
        "python": ["python", "mnmc_ddp_tcp.py", *address, "--world-size", 2, *options, "--rank"],
        "mp.spawn": ["python", "mnmc_ddp_mp.py", *address, *options, *nodes],
        "torchrun --nnodes 2": [*torchrun, "--node-rank"],
    }
    first, second = (
        [*lines[launcher], rank, *(["mnmc_ddp_env.py", *options] if "nnodes" in launcher else [])]
        for rank in (0, 1)
    )
    return [first, [*wait_for(gate), *second]]


LAUNCHERS = ("python", "torchrun --standalone", "torchrun --nnodes 2", "mp.spawn", "srun")


@contextlib.contextmanager
def network(name):
    """A network namespace without a way out; yields what a command in it begins with.

    A store asks the name server about each address that connects, so strangers in the machine's own
    network would send thousands of questions. Slurm wants an address beside that of lo.
    """
    ip(f"netns add {name}")
    try:
        ip(f"-n {name} link set lo up")
        ip(f"-n {name} link add eth0 type veth peer name eth1")
        ip(f"-n {name} address add 192.0.2.1/24 dev eth0")
        ip(f"-n {name} link set eth0 up")
        yield ["nsenter", f"--net=/run/netns/{name}"]
    finally:
        ip(f"netns delete {name}")


class ClusterInNetwork(Cluster):
    """A Slurm in a network namespace."""

    def __init__(self, inside):
        self.inside = inside
        super().__init__()

    def run(self, action):
        command = [*self.inside, "bash", "scripts/cluster/local_slurm.sh", action]
        return subprocess.check_output(command, env=self.settings, text=True, timeout=90, cwd=REPO)


# Most systems let a process have so many open files unless it asks for more.
USUAL_LIMIT = ("prlimit", "--nofile=1024")
TIMEOUT = 60
RUDE = ("--dataset", "synthetic", "-e", 3, "-b", 125, "--timeout", TIMEOUT)


def train_among_strangers(folder, inside, launcher, phases, kind):
    """Runs a training that strangers disturb; returns how it ended, and what it printed."""
    path, gate = folder / "last.pt", folder / "gate"
    commands = commands_of(launcher, gate, (*RUDE, "--checkpoint", path))
    start = [*inside, *USUAL_LIMIT]
    with contextlib.ExitStack() as stack:
        env = {"GLOO_SOCKET_IFNAME": "lo"}
        if launcher == "srun":
            cluster = ClusterInNetwork(inside)
            stack.callback(cluster.stop)
            env |= cluster.env
        commands = [[*start, *command] for command in commands]
        run = stack.enter_context(Launch(commands, folder / "output", env=env))
        made = 0
        for phase in phases:
            if phase == "training":
                gate.touch()
                run.wait_for(lambda: run.epochs() or has_ended(run), 120, "an epoch")
            else:
                run.wait_for(lambda: reachable(run), 60, "a port")
            strangers = [sys.executable, REPO / "tests" / "strangers.py", kind, *reachable(run)]
            visitors = stack.enter_context(
                subprocess.Popen(
                    [*inside, *strangers], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            made += int(visitors.stdout.readline())
        gate.touch()
        try:
            run.wait(TIMEOUT + 60)
        except AssertionError:
            return "hung", made, run.story()
        assert run.epochs() == [] or path.exists(), run.story()
        if path.exists():
            saved = torch.load(path, weights_only=True)["epoch"]
            assert saved in (len(run.epochs()), len(run.epochs()) + 1), run.story()
        well = run.codes == [0] * len(commands) and len(run.epochs()) == RUDE[3]
        return "well" if well else run.err[-3000:], made, run.story()


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS[:-1])
def test_run_ends_well_among_rude_strangers(tmp_path, name, launcher):
    """HTTP requests, random bytes, TLS hellos and open connections, at every port."""
    phases = ("rendezvous", "training")
    with network(f"{name}0") as inside:
        how, made, story = train_among_strangers(tmp_path, inside, launcher, phases, "all")
    assert how == "well" and made >= 66, story


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "phase", "ending"),
    (
        ("python", "rendezvous", "well"),
        ("python", "training", "accept: Too many open files"),
        ("srun", "rendezvous", "well"),
    ),
)
def test_run_in_a_storm_of_connections(tmp_path, name, launcher, phase, ending):
    """gloo keeps what strangers have left, until the process may open no more files."""
    if launcher == "srun":
        skip_without_slurm()
    with network(f"{name}0") as inside:
        how, made, story = train_among_strangers(tmp_path, inside, launcher, [phase], "storm")
    assert ending in how and made > 1000, story


# What listens where, as on the page.


def listens_in_training(tmp_path, hosts, lines, two):
    """What two ranks listen on, in the words of the page; the lines run on one host or on two."""
    lines = [f"{line} {LONG}".replace("FOLDER", str(tmp_path)) for line in lines]
    commands = [hosts.command_on(n if two else 0, line) for n, line in enumerate(lines)]
    with Launch(commands, tmp_path / "output", env={"NPROC": "2"}) as run:
        run.wait_for(lambda: run.epochs() or has_ended(run), 90, "an epoch")
        return describe(listening(run), 2, PORTS)


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("way", ONE_MACHINE)
def test_one_machine_listens_as_the_page_says(tmp_path, name, way):
    """On a host whose name leads to its address on the network."""
    shown = {row[0]: row[1] for row in table("What listens where")}
    assert list(shown) == list(ONE_MACHINE)
    with Hosts(name, tmp_path, Hosts.ADDRESSES) as hosts:
        assert listens_in_training(tmp_path, hosts, ONE_MACHINE[way], False) == shown[way]


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("way", TWO_HOSTS)
def test_two_hosts_listen_as_the_page_says(tmp_path, name, way):
    ports = {"mnmc_ddp_tcp.py": "rank 0 `*:18888`", "nnodes 2": "torchrun `*:29500`"}
    ports |= {"mnmc_ddp_mp.py": "rank 0 `*:18888`"}
    ports |= {"c10d": "rank 0 `*:free`, torchrun `*:29400`"}
    (expected,) = (text for part, text in ports.items() if part in way)
    with Hosts(name, tmp_path, Hosts.ADDRESSES) as hosts:
        found = listens_in_training(tmp_path, hosts, TWO_HOSTS[way], True)
    assert found == f"each rank `name:free`, {expected}"


@pytest.mark.slow
def test_srun_and_its_job_listen_on_every_address(cluster, tmp_path):
    command = ["srun", "-n2", "-N2", "python", "mnmc_ddp_slurm.py", *LONG.split()]
    with Launch([command], tmp_path / "output", env=cluster.env) as run:
        run.wait_for(lambda: run.epochs() or has_ended(run), 90, "an epoch")
        rows = listening(run)
    everywhere = {(role, port) for role, _, address, port in rows if address.is_unspecified}
    assert Counter(role for role, _ in everywhere) == {"srun": 4, "rank": 1}, rows
    (port,) = (port for role, port in everywhere if role == "rank")
    assert 10000 <= port < 30000


# One machine.


def beyond_loopback(run):
    """The places of a run that other machines, or other addresses of this one, may reach."""
    return [row for row in listening(run) if not row[2].is_loopback]


def test_on_one_machine_nothing_listens_beyond_loopback(launch):
    """By a file and lo. With tcp://127.0.0.1 the store listens on every address."""
    opened = launch([f"{TCP} tcp://127.0.0.1:{free_port()} --rank 0".split()])
    closed = launch([["bash", "scripts/mnmc_ddp_tcp.sh", *LONG.split()]], env={"NPROC": "2"})
    opened.wait_for(lambda: listening(opened), 30, "the store")
    ((_, _, address, _),) = beyond_loopback(opened)
    assert address.is_unspecified
    closed.wait_for(lambda: closed.inits()[1:] or has_ended(closed), 60, "both ranks")
    assert len(listening(closed)) == 2 and beyond_loopback(closed) == [], closed.story()


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("interface", ("lo", ""))
def test_interface_of_gloo(tmp_path, name, interface):
    """Where the host's name leads to its address on the network, gloo listens there by default."""
    line = f"GLOO_SOCKET_IFNAME={interface} {TCP} file://{tmp_path}/meet"
    with Hosts(name, tmp_path, Hosts.ADDRESSES) as hosts:
        commands = [hosts.command_on(0, f"{line} --rank {rank} {LONG}") for rank in (0, 1)]
        with Launch(commands, tmp_path / "output") as run:
            run.wait_for(lambda: run.epochs() or has_ended(run), 60, "an epoch")
            addresses = {str(address) for _, _, address, _ in listening(run)}
            assert addresses == {"127.0.0.1" if interface else "192.0.2.1"}, run.story()


def test_store_on_one_address():
    """TCPStore takes over a socket that is bound already, and listens nowhere else."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    places = [place for place in places_of(os.getpid()) if place[1] == port]
    assert places == [(ipaddress.ip_address("127.0.0.1"), port)]
    assert ask_store(port, lambda store: store.set("key", "value")) is None
    assert store.get("key") == b"value"


# Two ranks that meet in such a store, train, and wait for a file before they leave.
TRAIN_WITH_STORE = """
import pathlib, socket, sys, time
import torch
import torch.distributed as dist
import torch.distributed.nn

rank, port, gate = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
listener = socket.create_server(("127.0.0.1", port)).detach() if rank == 0 else None
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, master_listen_fd=listener)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
torch.manual_seed(rank)

def train():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
    return sum(parameter.grad.sum() for parameter in model.parameters()).item()

print("trained", train(), flush=True)
while not gate.exists():
    time.sleep(0.1)
dist.destroy_process_group()
"""


def test_training_with_a_store_on_one_address(launch, tmp_path):
    """Nothing of it listens beyond loopback, and DDP averages as ever."""
    port, gate = free_port(), tmp_path / "gate"
    commands = [["python", "-c", TRAIN_WITH_STORE, rank, port, gate] for rank in (0, 1)]
    run = launch(commands, env={"GLOO_SOCKET_IFNAME": "lo"})
    run.wait_for(lambda: run.out.count("trained") == 2 or has_ended(run), 60, "both ranks")
    places = [place for process in run.processes for place in places_of(process.pid)]
    assert len(places) == 3 and all(address.is_loopback for address, _ in places), run.story()
    gate.touch()
    first, second = run.succeeded().out.splitlines()
    assert first == second


def ask_store(port, action):
    """What a stranger gets who knows the port."""
    client = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
    )
    return action(client)


def test_command_of_the_page_for_one_machine(launch, tmp_path):
    """Nothing beyond lo, and nobody else can read the checkpoint."""
    lines = page_commands(PAGE, "One machine")
    assert lines[-1].startswith("python mnmc_ddp_mp.py ")
    lines[-1] = f"{lines[-1].replace('python ', f'python {REPO}/')} {LONG} --nproc-per-node 2"
    run = launch([["bash", "-c", f"cd {tmp_path}; " + "; ".join(lines)]])
    run.wait_for(lambda: run.epochs() or has_ended(run), 60, "an epoch")
    assert len(listening(run)) == 2 and beyond_loopback(run) == [], run.story()
    for path in (tmp_path / "run", tmp_path / "run" / "last.pt"):
        assert path.stat().st_mode & 0o077 == 0, path


# What strangers can do.


# Starts a script with its imports done, when a file exists: they can take longer than --timeout.
IMPORTED = """
import pathlib, runpy, sys, time
import torch.distributed.nn, torchvision, tqdm
gate, *sys.argv = sys.argv[1:]
while not pathlib.Path(gate).exists():
    time.sleep(0.05)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Meeting:
    """Ranks of mnmc_ddp_tcp.py: rank 0 waits already, and two that want to be rank 1 are ready."""

    def __init__(self, launch, folder):
        self.port, self.gates = free_port(), [folder / "true", folder / "stranger"]
        options = [*TCP.split()[1:], f"tcp://127.0.0.1:{self.port}", *RUDE, "--timeout", 8]
        commands = [
            [sys.executable, "-c", IMPORTED, gate, *options, "-r", 1] for gate in self.gates
        ]
        commands.append([sys.executable, *options, "-r", 0])
        runs = [launch([command], env={"GLOO_SOCKET_IFNAME": "lo"}) for command in commands]
        self.rank_1, self.stranger, self.rank_0 = runs
        self.rank_0.wait_for(lambda: listening(self.rank_0), 60, "the store")

    def let_in(self, run):
        self.gates[(self.rank_1, self.stranger).index(run)].touch()


lists_keys = pytest.mark.skipif(
    not hasattr(dist.TCPStore, "list_keys"), reason="this torch's store does not list its keys"
)


@lists_keys
@pytest.mark.slow
def test_stranger_reads_and_changes_the_store(launch, tmp_path):
    """In a run that knows nothing of it, and ends well."""
    meeting = Meeting(launch, tmp_path)
    ask_store(meeting.port, lambda store: store.set("stranger", "was here"))
    meeting.let_in(meeting.rank_1)
    meeting.rank_0.wait_for(meeting.rank_0.epochs, 90, "an epoch")
    keys = ask_store(meeting.port, lambda store: {key: store.get(key) for key in store.list_keys()})
    assert keys.pop("stranger") == b"was here"
    own = socket.inet_aton("127.0.0.1")
    assert len(keys) == 2 and all(own in value for value in keys.values()), "addresses of the ranks"
    assert meeting.rank_0.wait(90).codes == meeting.rank_1.wait(90).codes == [0]


@lists_keys
@pytest.mark.slow
def test_stranger_deletes_a_key_while_the_ranks_meet(launch, tmp_path):
    """It is counted as rank 1, and deletes the address of rank 0, which rank 1 then waits for."""
    meeting = Meeting(launch, tmp_path)
    place = ("127.0.0.1", meeting.port, 2, False)
    store = dist.TCPStore(*place, timeout=timedelta(seconds=10))
    meeting.rank_0.wait_for(lambda: store.list_keys(), 10, "the address of rank 0")
    assert all(store.delete_key(key) for key in store.list_keys())
    meeting.let_in(meeting.rank_1)
    assert meeting.rank_1.wait(60).codes == [1], meeting.rank_1.story()
    assert "DistStoreError: wait timeout after 8000ms" in meeting.rank_1.last_line()
    check_ends_without_its_peer(meeting.rank_0)


def check_ends_without_its_peer(run):
    """In gloo one of two ranks waits for the other to connect, up to five times --timeout."""
    assert run.wait(5 * 8 + 60).codes == [1], run.story()
    assert re.search("Connection|Connect timeout|Timed out waiting", run.last_line()), run.story()


@pytest.mark.slow
def test_stranger_who_comes_before_rank_1_trains_in_its_place(launch, tmp_path):
    """Rank 0 ends well. The true rank 1 cannot train, and waits up to five times --timeout."""
    meeting = Meeting(launch, tmp_path)
    meeting.let_in(meeting.stranger)
    meeting.rank_0.wait_for(meeting.rank_0.inits, 60, "rank 1, which is the stranger")
    meeting.let_in(meeting.rank_1)
    assert meeting.rank_0.wait(90).codes == meeting.stranger.wait(30).codes == [0]
    assert len(meeting.rank_0.epochs()) == RUDE[3]
    check_ends_without_its_peer(meeting.rank_1)
    assert meeting.rank_1.epochs() == []


# What a rank that unpickles runs: it makes a file in its folder.
UNPICKLE = """
import os, sys
from pathlib import Path
import torch.distributed as dist

class Harmless:
    def __reduce__(self):
        return Path.touch, (Path("code_has_run"),)

dist.init_process_group("gloo")
objects = [Harmless() if dist.get_rank() == 1 else None]
try:
    dist.broadcast_object_list(objects, src=1, weights_only=WEIGHTS_ONLY)
finally:
    dist.destroy_process_group()
"""
HAS_WEIGHTS_ONLY = "weights_only" in inspect.signature(dist.broadcast_object_list).parameters


@pytest.mark.parametrize("closed", (False, True)[: 1 + HAS_WEIGHTS_ONLY])
def test_collective_of_objects_runs_code_of_another_rank(tmp_path, closed):
    """With weights_only=True, which torch 2.15 has, it does not."""
    argument = f"weights_only={closed}" if HAS_WEIGHTS_ONLY else ""
    path = tmp_path / "objects.py"
    path.write_text(UNPICKLE.replace("weights_only=WEIGHTS_ONLY", argument))
    codes, _, err = run_forked_ranks(path, 2, free_port(), tmp_path / "run")
    assert (tmp_path / "run" / "0" / "code_has_run").exists() != closed, err
    assert (codes == [0, 0]) != closed, err


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_load_weights_only_and_send_no_objects(script):
    code = (REPO / script).read_text()
    assert "pickle" not in code and not re.search(r"\w+_object(_list)?\(", code)
    loads = re.findall(r"torch\.load\(.*", code)
    assert len(loads) == 1 and "weights_only=True" in loads[0]


# Several hosts.


def has_nft():
    """Whether the rules of the page can be tried, in a network of their own."""
    ask = ["unshare", "--net", "nft", "list", "ruleset"]
    return bool(shutil.which("nft")) and subprocess.run(ask, capture_output=True).returncode == 0


needs_nft = pytest.mark.skipif(not has_nft(), reason="needs root and the package nftables")


class ThreeHosts(Hosts):
    """A stranger, 192.0.2.3, is at the same switch as the two."""

    ADDRESSES = (*Hosts.ADDRESSES, "192.0.2.3")

    def __init__(self, name, folder):
        super().__init__(name, folder, Hosts.ADDRESSES)
        self.stranger, self.switch = f"{name}2", f"{name}3"
        self.namespaces += [self.stranger, self.switch]

    def __enter__(self):
        for namespace in self.namespaces:
            ip(f"netns add {namespace}")
        ip(f"-n {self.switch} link add bridge up type bridge")
        for number, address in enumerate(self.ADDRESSES):
            host = self.namespaces[number]
            ip(f"-n {host} link add eth0 type veth peer name port{number} netns {self.switch}")
            ip(f"-n {self.switch} link set port{number} master bridge up")
            ip(f"-n {host} address add {address}/24 dev eth0")
            ip(f"-n {host} link set eth0 up")
            ip(f"-n {host} link set lo up")
        return self


def ip(words):
    subprocess.check_call(["ip", *words.split()])


READ_STORE = """
import torch.distributed as dist
from datetime import timedelta
store = dist.TCPStore("192.0.2.1", 29500, is_master=False, wait_for_workers=False,
                      timeout=timedelta(seconds=5))
print("keys:", store.num_keys())
"""
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
@needs_nft
@pytest.mark.slow
def test_firewall_keeps_a_third_host_out(tmp_path, name):
    """Two hosts meet and train behind the rules of the page. Without the rules the third is in."""
    with ThreeHosts(name, tmp_path) as hosts:
        enter = [["ip", "netns", "exec", namespace] for namespace in hosts.namespaces]
        for inside in enter[:2]:
            for line in page_commands(PAGE, "A firewall"):
                subprocess.check_call([*inside, "bash", "-c", line])
        lines = TWO_HOSTS["`torchrun --nnodes 2`"]
        commands = [
            hosts.command_on(n, f"GLOO_SOCKET_IFNAME=eth0 {lines[n]} {LONG}") for n in (0, 1)
        ]
        with Launch(commands, tmp_path / "output") as run:
            run.wait_for(lambda: run.epochs() or has_ended(run), 90, "an epoch")
            places = {
                f"192.0.2.1:{port}" if address.is_unspecified else f"{address}:{port}"
                for _, _, address, port in listening(run)
            }
            assert {place.split(":")[0] for place in places} == set(Hosts.ADDRESSES), places
            knock = [*enter[2], sys.executable, "-c", KNOCK, *places]
            read = [*enter[2], sys.executable, "-c", READ_STORE]
            for answer, message in (
                ("TimeoutError", "The client socket has timed out"),
                ("connected", "keys: "),
            ):
                assert set(subprocess.check_output(knock, text=True).split()) == {answer}
                store = subprocess.run(read, capture_output=True, text=True)
                assert message in store.stdout + store.stderr, store
                before = len(run.epochs())
                run.wait_for(lambda n=before: len(run.epochs()) > n, 30, "the next epoch")
                for inside in enter[:2] if answer == "TimeoutError" else ():
                    subprocess.check_call([*inside, "nft", "delete", "table", "inet", "ddp"])


# Files.


def test_local_slurm_is_for_its_user_alone(cluster):
    """Its ports are open, but a request needs what munge makes with the key."""
    modes = {name: (cluster.folder / name).stat().st_mode & 0o777 for name in (".", "munge.key")}
    assert modes == {".": 0o700, "munge.key": 0o400}
    if os.getuid() == 0:
        ask = ["munge", "--no-input", "--socket", cluster.folder / "munge.socket"]
        nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        assert subprocess.run(ask, capture_output=True).returncode == 0
        refused = subprocess.run([*nobody, *ask], capture_output=True, text=True)
        assert "Permission denied" in refused.stderr, refused


@pytest.mark.parametrize("kind", ("folder", "link"))
def test_local_slurm_takes_no_folder_of_another_user(launch, tmp_path, kind):
    """Who could have written a slurm.conf that loads a program."""
    skip_without_slurm()
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    place = tmp_path / "local_slurm_root"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "cluster_of_local_slurm").touch()
    if kind == "folder":
        place = tmp_path / "theirs"
    else:
        place.symlink_to(tmp_path / "theirs")
    os.chown(place, 65534, 65534, follow_symlinks=False)
    for action in ("start", "settings", "status", "stop"):
        command = ["bash", "scripts/cluster/local_slurm.sh", action]
        run = launch([command], env={"LOCAL_SLURM": str(place)}).wait()
        assert run.codes == [1] and run.out == "", run.story()
        assert run.err == f"{place} belongs to another user: choose another LOCAL_SLURM\n"
