"""check_ddp.py says ok of a right program and NO of each mistake, and ? where it sees less."""

import re
import signal
import types

import check_ddp
import pytest
from launch import MEETING_POINT, REPO, Launch, free_port

TOOL = REPO / "scripts" / "check_ddp.py"

# A program with the eight marks. Its options are mistakes.
PROGRAM = """
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

BAD = set(sys.argv[1:])
rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])


def train():
    device = torch.device("cuda", 0 if "gpu" in BAD else rank)
    x = torch.arange(1280.0).sin().view(256, 5)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    train_set, test_set = data, TensorDataset(*data[:101])
    if "split" in BAD:
        train_set, test_set = random_split(data, [192, 64], torch.Generator().manual_seed(rank))
    if rank == 0 or "files" in BAD:
        torch.save(x, "data.pt")
    dist.barrier()
    sampler = DistributedSampler(train_set)
    if "shard" in BAD:
        sampler = DistributedSampler(train_set, num_replicas=2, rank=0)
    # This generator has one seed on all ranks, and workers take theirs from it.
    options = {"num_workers": 1, "generator": torch.Generator()} if "workers" in BAD else {}
    loader = DataLoader(train_set, 96 // world_size, sampler=sampler, **options)
    test_sampler = range(rank, len(test_set), world_size)
    if "rows" in BAD:
        test_sampler = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, 16, sampler=test_sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.1 * ("seed" in BAD)), nn.Linear(5, 1))
    for name in ("two", "one") if rank and "order" in BAD else ("one", "two"):
        model.register_buffer(name, torch.zeros(1))
    model.to(device)
    ddp_model = DistributedDataParallel(model, device_ids=[device.index])
    if "loads" in BAD and rank == 0:
        torch.save({name: 2 * x for name, x in model.state_dict().items()}, "model.pt")
        model.load_state_dict(torch.load("model.pt", map_location=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if "seed" not in BAD:
        torch.manual_seed(rank)
    for epoch in range(2):
        if "epoch" not in BAD:
            sampler.set_epoch(epoch)
        for inputs, targets in loader:
            outputs = (model if "past" in BAD else ddp_model)(inputs.to(device))
            loss = nn.functional.mse_loss(outputs, targets.to(device))
            if "loss" in BAD:
                dist.all_reduce(loss)
                loss = loss / world_size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        total = torch.zeros(2, dtype=torch.float64 if "dtype" in BAD and rank else torch.float32)
        with torch.no_grad():
            for i, (inputs, targets) in enumerate(test_loader):
                total += (model(inputs.to(device)) - targets.to(device)).square().sum()
                if "add" in BAD and i + 1 == len(test_loader):
                    break  # Loops of libraries end so. The loader does not notice its end.
        if "add" not in BAD:
            dist.all_reduce(total)
        model.train()
        if rank == 0:
            torch.rand(1)  # as for a sample: from here on the ranks' draws are not equal


dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
if "fails" in BAD and rank == 1:
    sys.exit(7)
if "hangs" in BAD and rank == 1:
    while True:
        pass
train()
if "leave" not in BAD:
    dist.destroy_process_group()
"""


def read_report(run):
    """The report's lines: {mark: (verdict, text and place)}; of several lines the worst."""
    report = run.out.partition("check_ddp: ")[2]
    lines = re.findall(
        r"^  (\d|[a-d]) (.{14}) (ok|NO|\?)  (.*(?:\n {8,}.*)?)", report, re.MULTILINE
    )
    found = {}
    for mark, name, verdict, text in lines:
        key = f"{mark} {name.strip()}"
        if key not in found or verdict == "NO":
            found[key] = (verdict, text)
    return found


@pytest.fixture
def check(tmp_path):
    """Runs the tool on the program above."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(*mistakes, options=()):
        command = ["python", TOOL, *options, "program.py", *mistakes]
        with Launch([command], tmp_path / "output", cwd=tmp_path) as launch:
            launch.wait()
        return launch

    return run


def test_right_program_has_no_line_of_no(check):
    run = check(options=("--against-one", ""))
    report = read_report(run)
    assert run.codes == [0], run.story()
    assert {mark for mark, (verdict, _) in report.items() if verdict != "ok"} == set()
    assert {mark[0] for mark in report} == set("12345678acd"), run.story()
    assert "1.00 times" in report["6 as one process"][1]
    assert "gloo for nccl" in run.out


MISTAKES = {
    "gpu": "1 own GPU",
    "files": "3 one writes",
    "shard": "4 own shard",
    "epoch": "4 set_epoch",
    "order": "5 wrapped model",
    "seed": "c random draws",
    "leave": "8 leave",
}
# Where all ranks draw the same rows, their gradients are equal, also past DDP.
OTHERS = {"past": "5 equal weights", "add": "7 add up", "rows": "a test rows"}


@pytest.mark.parametrize("mistakes", (MISTAKES, OTHERS), ids=("same rows", "others"))
def test_each_mistake_has_its_line_with_a_place_and_a_page(check, mistakes):
    run = check(*mistakes)
    report = read_report(run)
    # A program that does not leave the group can abort at exit: then the status is that of this.
    assert run.codes != [0], run.story()
    assert run.out.count("4 set_epoch") == 1, run.story()  # A test is not taken for an epoch.
    for mistake, mark in mistakes.items():
        verdict, text = report[mark]
        assert verdict == "NO", (mistake, run.story())
        assert re.search(r"program.py:\d+|destroy", text), text
        assert re.search(r"-> docs/\w+\.md#[\w-]+$", text), text
    assert (report["d tested model"][0] == "NO") == ("past" in mistakes)  # trained alone


def test_mistakes_that_would_hide_others(check):
    run = check("split", "loss", "dtype", "loads", "workers")
    report = read_report(run)
    assert report["4 split"][0] == report["7 collectives"][0] == "NO", run.story()
    assert "Rank 0 alone loads model.pt" in report["5 equal weights"][1]
    assert "workers of all ranks have one seed" in report["c random draws"][1]


def test_gradient_that_is_halved(check):
    report = read_report(run := check("loss", options=("--against-one", "")))
    assert report["5 loss"][0] == "?", run.story()
    assert report["6 as one process"][0] == "NO" and "0.50 times" in report["6 as one process"][1]


def test_every_page_of_the_report_exists():
    """Each address in the tool leads to a heading."""
    for page, anchor in re.findall(r"\"(\w+\.md)#([\w-]+)\"", TOOL.read_text()):
        headings = re.findall(r"^#+ (.*)", (REPO / "docs" / page).read_text(), re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
        assert anchor in anchors, (page, anchor)


def test_status_of_a_script_that_fails(check):
    run = check("fails")
    assert run.codes == [7], run.story()
    assert read_report(run)["8 leave"][0] == "?"


def test_hang_ends_with_what_waits_where_and_ctrl_c_ends_all(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["python", TOOL, "--patience", "13", "program.py", "hangs"]
    with Launch([command], tmp_path / "output", cwd=tmp_path) as run:
        run.wait(90)
        assert "rank 0 waits in it\n        at train, program.py:26: dist.barrier()" in run.out
        assert run.codes == [1] and run.pids() == []
    with Launch([command], tmp_path / "again", cwd=tmp_path) as run:
        run.wait_for(lambda: len(run.pids()) == 3, 60, "both ranks")
        run.processes[0].send_signal(signal.SIGINT)
        run.wait(30)
        assert run.pids() == []


LESS = """
import sys, types
import check_ddp
check_ddp.dataloader = types.SimpleNamespace()
sys.exit(check_ddp.main())
"""


def test_under_a_launcher_and_with_a_torch_that_hides_its_loader(tmp_path):
    """The notes are read afterwards. Without DataLoader's private names the other rows remain."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "less.py").write_text(LESS)
    command = ["env", f"PYTHONPATH={TOOL.parent}", f"MASTER_PORT={free_port()}", "WORLD_SIZE=2"]
    command += ["MASTER_ADDR=127.0.0.1"]
    commands = [[*command, f"RANK={r}", "python", "less.py", "program.py"] for r in range(2)]
    with Launch(commands, tmp_path / "output", cwd=tmp_path) as run:
        run.succeeded()
    command = ["python", TOOL, "--report", "who_hangs"]
    with Launch([command], tmp_path / "report", cwd=tmp_path) as run:
        report = read_report(run.succeeded())
    assert report["4 a rows"][0] == "?", run.story()
    assert report["5 equal weights"][0] == report["4 own shard"][0] == "ok"
    assert "4 set_epoch" not in report and "a test rows" not in report


def test_torch_without_its_recorders(monkeypatch):
    c10d = types.SimpleNamespace(_distributed_c10d=types.SimpleNamespace())
    monkeypatch.setattr(check_ddp, "torch", types.SimpleNamespace(_C=c10d), raising=False)
    assert check_ddp.read_recorders() == []


@pytest.mark.slow
def test_script_that_spawns_its_processes(tmp_path):
    command = ["python", TOOL, REPO / "mnmc_ddp_mp.py", "--dataset", "synthetic", "-b", "500"]
    command += ["--init-method", MEETING_POINT, "--workers", "1"]
    with Launch([command], tmp_path / "output", cwd=tmp_path) as run:
        report = read_report(run.succeeded(200))
    assert {verdict for verdict, _ in report.values()} <= {"ok", "?"}
    assert report["5 equal weights"][0] == report["4 set_epoch"][0] == "ok", run.story()
    assert "workers have a seed of their own" in report["c random draws"][1], run.story()
