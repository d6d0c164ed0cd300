"""The broken programs show their symptom, and their judge tells a repair from one that hides it.

This file answers all eight. Try the exercises before you read on.
"""

import os
import re
import shutil
import subprocess
import sys
from itertools import zip_longest

import pytest
from launch import REPO, page_commands, quick_for, run_forked_ranks

BUGS = REPO / "docs" / "exercises" / "bugs"
DDP = "DistributedDataParallel("
LOG = """        for name, loss in losses.items():
            mean = loss.detach() / world_size
            dist.all_reduce(mean)
"""
LOG_OF_ALL = LOG.replace("name, loss in losses.items()", 'name in ("bird", "place")')
LOG_OF_ALL = LOG_OF_ALL.replace("loss.detach()", "losses.get(name, torch.zeros(())).detach()")
PRINT = "        if rank == 0:\n            print("
PLACE = re.search(r"    if birds.any.*?\n    return", (BUGS / "boxes.py").read_text(), re.DOTALL)[0]
TEST = "evaluate(model, own_houses, own_prices, len(houses))"
GATHER = """        states = [None] * world_size
        dist.all_gather_object(states, noise.get_state())
"""
STEP = "        optimizer.step()\n"
# What a repair changes, and what the judge says of it; of a right one nothing.
NOTHING = ""
REPAIRS = {
    "boxes": [
        ([(LOG, LOG_OF_ALL)], NOTHING),
        ([], "it does not end"),
        ([(PLACE, re.sub("(?m)^    ", "", PLACE).partition("\n")[2][:-6] + "    return")], NOTHING),
        ([(DDP + "Detector()", DDP + "Detector(), broadcast_buffers=False")], "with 2 processes"),
        ([("< 0.2", "< 0.9")], "the model is not that of one process"),
        ([("losses.items():", "list(losses.items())[:1]:")], "the losses of step"),
        ([("            dist.all_reduce(mean)\n", "")], "the losses of step"),
        ([(PRINT, "        dist.barrier()\n" + PRINT)], "it does not end"),
        ([('group("gloo")', 'group("gloo", timeout=timedelta(days=9))')], "it does not end"),
    ],
    "sentences": [
        ([], "0 are on no rank, and 240 are there more"),
        ([("range(len(self.sentences)),", "self.sampler,")], NOTHING),
        (
            [("iter(batches)", "iter(batches[self.sampler.rank :: self.sampler.num_replicas])")],
            NOTHING,
        ),
        ([("batch_sampler=batches", "batch_size=8, sampler=sampler")], "are padding"),
        ([("(self.sampler.epoch)", "(self.sampler.epoch + self.sampler.rank)")], "more than once"),
        ([("iter(batches)", "iter(batches[: len(batches) // 2])")], "120 are on no rank, and 120"),
        (
            [
                ("range(len(self.sentences)),", "self.sampler,"),
                ("set_epoch(epoch)", "set_epoch(0)"),
            ],
            "the same order",
        ),
        ([("batch_size=8", "batch_size=4")], "more than once"),
        ([("seed(seed)", "seed(seed + dist.get_rank())")], "are not those of one process"),
    ],
    "clicks": [
        ([("int(labels.sum()), 8)", "len(batch), 8)[labels]")], NOTHING),
        ([], "epoch 1: of 1200 rows"),
        (
            [
                (
                    "torch.randperm(len(visits))",
                    "torch.randperm(len(visits), generator=torch.Generator().manual_seed(epoch))",
                )
            ],
            NOTHING,
        ),
        ([("        counts =", "        torch.manual_seed(seed)\n        counts =")], "same order"),
        (
            [("        counts =", "        torch.manual_seed(epoch + rank)\n        counts =")],
            "epoch 0: of 1200 rows",
        ),
        (
            [("inputs[labels] += 0.3 * torch.rand(int(labels.sum()), 8)", "pass")],
            "has no noise any more",
        ),
        ([("torch.randperm(", "torch.arange(")], "the same order"),
        ([("(counts > 0).sum()", "counts.sum()")], "epoch 1: of 1200 rows"),
    ],
    "houses": [
        (
            [
                (
                    "    variance =",
                    "    mean = prices.sum()\n    dist.all_reduce(mean)\n    variance =",
                ),
                ("prices.mean()", "mean / count"),
            ],
            NOTHING,
        ),
        ([], "error and R² of epoch 0"),
        (
            [
                (TEST, "evaluate(model, own_houses, own_prices, prices)"),
                ("prices.mean()", "count.mean()"),
                ("errors / count", "errors / len(count)"),
            ],
            NOTHING,
        ),
        ([(".tensor_split(world_size)[rank]", "[rank::world_size]")], "error and R² of epoch 0"),
        ([("dist.all_reduce(sums)", "dist.reduce(sums, dst=0)")], "error and R² of epoch 0"),
        ([("dist.all_reduce(sums)", "dist.broadcast(sums, src=0)")], "error and R² of epoch 0"),
        (
            [(TEST, "evaluate(model, houses, prices, len(houses) * world_size)")],
            "is tested 2 times",
        ),
        ([("1 - errors", "1 - errors * dist.get_world_size()")], "error and R² of epoch 0"),
    ],
    "energy": [
        ([], "end with different models"),
        ([("return loss", "return mean")], NOTHING),
        (
            [
                (
                    "own_days[n + batch_size :], own_needs[n + batch_size :]",
                    "days[480:], needs[480:]",
                )
            ],
            NOTHING,
        ),
        (
            [("return loss", "dist.broadcast(loss, src=0)\n    return loss")],
            "not that of one process",
        ),
        ([("        scheduler.step(", "        (")], "not that of one process"),
        ([(DDP + "model", DDP + "model, broadcast_buffers=False")], "end with different models"),
        ([("patience=0", "patience=99")], "not that of one process"),
        (
            [
                (
                    '        print(f"epoch',
                    "        for p in model.parameters():\n"
                    '            dist.broadcast(p.data, src=0)\n        print(f"epoch',
                )
            ],
            "not that of one process",
        ),
    ],
    "letters": [
        ([], "the model is not that of one process"),
        (
            [
                (
                    STEP,
                    "        for p in model.parameters():\n            p.grad *= world_size\n"
                    + STEP,
                )
            ],
            NOTHING,
        ),
        (
            [
                ("losses.sum()", "world_size * losses.sum()"),
                ("loss.detach()", "loss.detach() / world_size"),
            ],
            NOTHING,
        ),
        ([("lr=1.0", "lr=1.0 * world_size")], "the model is not that of one process"),
        ([("        dist.all_reduce(count)\n", "")], "the model is not that of one process"),
        ([("losses.sum()", "world_size * losses.sum()")], "the loss of step 0"),
        ([("SGD", "Adam"), ("lr=1.0", "lr=0.01")], "the model is not that of one process"),
        ([("range(60)", "range(120)")], "trains on 1440 rows"),
        ([("losses.sum() / count", "losses.mean()")], "the model is not that of one process"),
    ],
    "sensors": [
        (
            [
                (PRINT, GATHER + PRINT),
                ('"noise": noise.get_state()', '"noise": states'),
                ('state["noise"]', 'state["noise"][rank]'),
            ],
            NOTHING,
        ),
        ([], "the resumed run ends with another model"),
        (
            [
                (
                    "        order =",
                    "        noise.manual_seed(100 * seed + 10 * epoch + rank)\n        order =",
                )
            ],
            NOTHING,
        ),
        ([("noise.set_state(", "len(")], "the resumed run ends with another model"),
        ([("manual_seed(seed + rank)", "manual_seed(seed)")], "the same noise"),
        ([("0.5 * torch", "0 * torch")], "there is no noise any more"),
        (
            [("if file.exists()", "if False")],
            "after 2 of 4 epochs the resumed run trains on 480 rows",
        ),
        (
            [("        noise.set_state", "        if rank == 0:\n            noise.set_state")],
            "ends with another model",
        ),
    ],
    "animals": [
        ([("torch.zeros(2)", "torch.zeros(2, dtype=torch.long)")], NOTHING),
        ([], "the connection to another rank|the process of rank 1 crashes"),
        (
            [
                (
                    "        dist.all_reduce(totals)",
                    "        totals = totals.double()\n        dist.all_reduce(totals)",
                )
            ],
            NOTHING,
        ),
        (
            [
                (
                    "        dist.all_reduce(totals)",
                    "        dist.barrier()\n        dist.all_reduce(totals)",
                )
            ],
            "the connection to another rank|crashes",
        ),
        ([("split(20)", "split(240)")], "with 3 processes: "),
        ([("        dist.all_reduce(totals)\n", "")], "the owls of epoch 0"),
        ([("dist.all_reduce(totals)", "dist.all_reduce(totals.float())")], "the owls of epoch 0"),
        (
            [
                ("own.split(20)", "torch.arange(480).split(20)"),
                ("        dist.all_reduce(totals)\n", ""),
            ],
            "is tested 2 times",
        ),
        (
            [
                ("    if not owls.any():\n        return torch.zeros(2)\n", ""),
                ("in own.split(20))", "in own.split(20) if 3 in labels[batch])"),
            ],
            "with 3 processes: AttributeError",
        ),
    ],
}
ROUNDS = list(zip_longest(*REPAIRS.values(), fillvalue=(None, None)))


def judge(folder, programs, *options):
    """Judges a folder of programs; returns (exit status, hints by program, what was printed)."""
    argv = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    argv = [sys.executable, *argv, REPO / "docs" / "exercises" / "test_bugs.py"]
    env = os.environ | {"COLUMNS": "1000", "BUGS": str(programs)}  # so that pytest cuts no line
    run = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    hints = re.findall(r"^FAILED \S+::test_(\w+) - (.+)$", run.stdout, re.MULTILINE)
    return run.returncode, dict(hints), run.stdout + run.stderr


@pytest.mark.parametrize("number", quick_for(range(len(ROUNDS)), 0))
def test_judge_accepts_what_is_right_and_nothing_that_hides_a_symptom(tmp_path, number):
    programs, expected = tmp_path / "mybugs", {}
    programs.mkdir()
    for name, (changes, hint) in zip(REPAIRS, ROUNDS[number], strict=True):
        if changes is None:
            continue
        text = (BUGS / f"{name}.py").read_text()
        for old, new in changes:
            assert old in text, (name, old)
            text = text.replace(old, new)
        (programs / f"{name}.py").write_text(text)
        if hint:
            expected[name] = hint
    chosen = " or ".join(file.stem for file in programs.iterdir())
    code, hints, output = judge(tmp_path, programs, "-k", chosen, "--seed", str(number))
    assert hints.keys() == expected.keys(), output
    for name, hint in expected.items():
        assert re.search(hint, hints[name]), (name, hint, hints[name])


def run_program(name, processes, folder, *arguments):
    """Runs a broken program as it is; returns (statuses, what it printed)."""
    argv = f"{name}.py", processes, folder, arguments
    codes, out, _ = run_forked_ranks(BUGS / argv[0], *argv[1:], seconds=6)
    return codes, out


def read_numbers(what, printed):
    return re.findall(rf"^.*{what} ([\d.]+)", printed, re.MULTILINE)


@pytest.mark.slow
def test_each_program_goes_wrong_as_its_user_tells(tmp_path):
    printed = {}
    for name in REPAIRS:
        for processes in (1, 2):
            files = [
                (tmp_path / f"{run}{processes}.pt", n) for run, n in (("w", 4), ("h", 2), ("h", 4))
            ]
            for number, arguments in enumerate(files if name == "sensors" else [()]):
                folder = tmp_path / f"{name}{processes}{number}"
                printed[name, processes, number] = run_program(name, processes, folder, *arguments)
    good = [
        codes for (name, _, _), (codes, _) in printed.items() if name not in ("boxes", "animals")
    ]
    assert not any(map(any, good)), printed
    one, two = ({name: printed[name, n, 0] for name in REPAIRS} for n in (1, 2))

    assert one["boxes"][0] == [0] and "step 39:" in one["boxes"][1], one
    assert two["boxes"][0] == [None, None] and "step 0:" in two["boxes"][1], two
    assert one["animals"][0] == [0] and two["animals"][0] != [0, 0], (one, two)
    losses = [read_numbers("last loss", run["sentences"][1]) for run in (one, two)]
    assert len(losses[0]) == 4 and sorted(losses[0] * 2) == sorted(losses[1]), losses
    visits = re.findall(r"(\d+) visits", two["clicks"][1])
    assert visits[0] == "1200" and max(visits[1:]) < "1200", visits
    (error, other), (higher, lower) = (
        [read_numbers(what, run["houses"][1])[-1] for run in (one, two)]
        for what in ("squared error", "R²")
    )
    assert error == other and float(lower) < float(higher) - 0.05, (one, two)
    predicted = re.findall(r"epoch (\d), rank \d: tomorrow (\S+)", two["energy"][1])
    by_epoch = [{p for e, p in predicted if e == str(epoch)} for epoch in range(10)]
    assert len(by_epoch[0]) == 1 and len(by_epoch[9]) == 2, by_epoch
    first, second = (read_numbers("loss", run["letters"][1]) for run in (one, two))
    assert first[0] == second[0] and float(second[-1]) > 1.5 * float(first[-1]), (first, second)
    for processes, resumes in ((1, True), (2, False)):
        whole, _, halves = (printed["sensors", processes, n][1] for n in range(3))
        assert (whole.splitlines()[-1] == halves.splitlines()[-1]) == resumes, printed


@pytest.mark.slow
def test_commands_of_the_course_find_all_programs_wrong(tmp_path):
    shutil.copytree(REPO / "docs" / "exercises", tmp_path / "docs" / "exercises")
    commands = "\n".join(page_commands("docs/course.md", "Find the bug"))
    commands = commands.replace("\npytest", f"\n{sys.executable} -m pytest")
    run = subprocess.run(["bash", "-c", commands], cwd=tmp_path, capture_output=True, text=True)
    assert f"{len(REPAIRS)} failed" in run.stdout and "passed" not in run.stdout, run.stdout
