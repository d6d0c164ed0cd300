"""Every script trains from one command, and prints what the README says."""

import pytest
from launch import DDP, PLAIN, REPO, SCRIPTS, Launch, commands_for, free_port
from tiny_data import accept_any_cifar10, write_cifar10, write_mnist

ONE_EPOCH = ("--dataset", "synthetic", "--epochs", "1")
TEST_IMAGES = 2000


def check_run(run, processes, backend="gloo"):
    """One [init] line per rank, one epoch line, all test images counted once, nothing on stderr."""
    ranks = [(rank, processes, rank, "cpu", backend) for rank in range(processes)]
    assert run.inits() == ranks, run.story()
    (epoch,) = run.epochs()
    assert epoch["count"] == TEST_IMAGES, run.story()
    assert epoch["test"] > 95, run.story()
    assert abs(epoch["test"] - 100 * epoch["correct"] / epoch["count"]) < 0.006, run.story()
    assert run.own_err() == "", run.story()
    lines = run.out.splitlines()
    assert len(lines) == processes + 2, run.story()
    assert sum(line.startswith("training finished in ") for line in lines) == 1, run.story()


@pytest.mark.parametrize("script", PLAIN)
def test_one_process(launch, script):
    check_run(launch(script, 1, *ONE_EPOCH).succeeded(), 1, backend="none")


SEEN = {}  # the metrics of a world size, from whichever script ran first


@pytest.mark.parametrize("processes", (1, 2, 3))
@pytest.mark.parametrize("script", DDP)
def test_ddp(launch, script, processes):
    """Right at 1, 2 and 3 processes; the four scripts differ in their start, not in the numbers."""
    run = launch(script, processes, *ONE_EPOCH).succeeded()
    check_run(run, processes)
    assert SEEN.setdefault(processes, run.metrics()) == run.metrics()
    if script == "mnmc_ddp_tcp.py":  # one output per rank: only rank 0 prints more than [init]
        for rank, (out, _) in enumerate(run.outputs[1:], start=1):
            assert out.read_text().count("\n") == 1, f"rank {rank} printed\n{out.read_text()}"


def test_mnist_from_idx_files(launch, tmp_path):
    write_mnist(tmp_path / "data", train=65, test=11)
    options = ("--data-root", tmp_path / "data", "--epochs", "1", "--batch-size", "8")
    for script, processes in (("snsc.py", 1), ("mnmc_ddp_env.py", 3)):
        (epoch,) = launch(script, processes, *options).succeeded().epochs()
        assert epoch["count"] == 11


def test_cifar10_from_batches(launch, tmp_path):
    write_cifar10(tmp_path / "data", per_file=16, test=11)
    env = accept_any_cifar10(tmp_path / "site")
    options = ("--dataset", "cifar10", "--data-root", tmp_path / "data", "-e", "1", "-b", "8")
    for script, processes in (("snsc.py", 1), ("mnmc_ddp_mp.py", 2)):
        (epoch,) = launch(script, processes, *options, env=env).succeeded().epochs()
        assert epoch["count"] == 11


def test_amp_on_cpu_learns_in_other_numbers_than_fp32(launch):
    fp32, amp = (
        launch("mnmc_ddp_tcp.py", 2, *ONE_EPOCH, *more).succeeded() for more in ((), ("--amp",))
    )
    check_run(amp, 2)
    assert amp.metrics() != fp32.metrics()
    assert abs(amp.epochs()[0]["test"] - fp32.epochs()[0]["test"]) < 1


THREE_EPOCHS = ("--dataset", "synthetic", "-e", "3", "-b", "250")
UNINTERRUPTED = {}  # the metrics of a world size: test_ddp shows that the scripts agree on them


@pytest.mark.parametrize("script", SCRIPTS)
def test_resume_equals_uninterrupted(launch, tmp_path, script):
    """Three epochs at once, or killed after the first is saved and started again: same numbers."""
    processes = 1 if script in PLAIN else 2
    if processes not in UNINTERRUPTED:
        UNINTERRUPTED[processes] = launch(script, processes, *THREE_EPOCHS).succeeded().metrics()
    saved = ("--checkpoint", tmp_path / "folder" / "last.pt")
    with Launch(commands_for(script, processes, *THREE_EPOCHS, *saved), tmp_path / "one") as broken:
        broken.wait_for(broken.epochs, 120, "the first epoch")
    resumed = launch(script, processes, *THREE_EPOCHS, *saved).succeeded()
    assert 0 < len(resumed.metrics()) < 3, resumed.story()
    assert resumed.metrics() == UNINTERRUPTED[processes][-len(resumed.metrics()) :]


def test_finished_run_has_nothing_left_to_do(launch, tmp_path):
    options = (*ONE_EPOCH, "--checkpoint", tmp_path / "last.pt")
    assert len(launch("snsc.py", 1, *options).succeeded().epochs()) == 1
    again = launch("mnmc_ddp_env.py", 2, *options).succeeded()  # another script, another world size
    assert again.epochs() == []
    assert "training finished in" in again.out


def test_command_lines_of_older_tutorials(launch):
    """Underscores, --gpuid, --use_mix_precision, --ngpus_per_node and --dist-url still work."""
    address = f"tcp://localhost:{free_port()}"
    words = (
        f"--init_method {address} -g 0 --world_size 2 --use_mix_precision --data_root data".split()
    )
    ranks = [["python", REPO / DDP[0], *words, "--rank", r, *ONE_EPOCH] for r in range(2)]
    run = launch(ranks).succeeded()
    assert [(r[0], r[2]) for r in run.inits()] == [(0, 0), (1, 0)]  # -g 0 is local rank 0, twice
    assert run.epochs()[0]["count"] == TEST_IMAGES
    plain = "python snsc.py --gpuid 0 --use_mix_precision --batch_size=128"
    assert launch([[*plain.split(), *ONE_EPOCH]]).succeeded().epochs()[0]["test"] > 95
    address = f"tcp://127.0.0.1:{free_port()}"
    mp = f"python mnmc_ddp_mp.py --ngpus_per_node 2 --dist-url {address}"
    check_run(launch([[*mp.split(), *ONE_EPOCH]]).succeeded(), 2)


def test_file_init(launch, tmp_path):
    words = ["--init-method", f"file://{tmp_path}/meeting-point", "--world-size", 2]
    ranks = [["python", REPO / DDP[0], *words, "--rank", rank, *ONE_EPOCH] for rank in range(2)]
    check_run(launch(ranks).succeeded(), 2)


def test_mp_on_two_nodes(launch):
    words = ["--nodes", 2, "--nproc-per-node", 2, "--init-method", f"tcp://127.0.0.1:{free_port()}"]
    nodes = [
        ["python", REPO / "mnmc_ddp_mp.py", *words, "--node-rank", n, *ONE_EPOCH] for n in range(2)
    ]
    run = launch(nodes).succeeded()
    assert [(r[0], r[1], r[2]) for r in run.inits()] == [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)]
    assert run.epochs()[0]["count"] == TEST_IMAGES
    assert run.outputs[1][0].read_text().count("\n") == 2  # node 1 prints its [init] lines only
