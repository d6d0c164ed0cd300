"""The judge of the eight broken programs: says what of a program is still wrong, and not why.

    cp -r docs/exercises/bugs mybugs
    pytest docs/exercises/test_bugs.py                     # -k boxes takes one of the eight
    BUGS=mine pytest docs/exercises/test_bugs.py --seed 7  # another folder, and other data

Each test calls train(seed) of the reader's copy in two and in three processes. What it must reach
is what the broken program reaches in one process, where nothing is wrong with it. How it does that
is the reader's choice.
"""

import os
import re
import runpy
from collections import Counter, namedtuple
from pathlib import Path

import pytest
import torch
from conftest import explain, fail_if, run_processes
from torch.nn.modules import module as modules

BUGS = Path(os.environ.get("BUGS", "mybugs")).resolve()
if not BUGS.exists():
    pytest.skip(
        f"there is no {BUGS}: type  cp -r docs/exercises/bugs {BUGS.name}", allow_module_level=True
    )
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
PROCESS_ENDED = "the process of rank {rank} crashes, without an error of Python"
# What train() returned on a rank, and what its models were given: rows as tuples, batch by batch.
Outcome = namedtuple("Outcome", "weights log training testing")


class Recorder:
    """Notes the inputs of each model that is called, and whether it is called to train."""

    def __init__(self):
        self.depth, self.training, self.testing = 0, [], []
        modules.register_module_forward_pre_hook(self.enter)
        modules.register_module_forward_hook(self.leave, always_call=True)

    def enter(self, module, inputs):
        has_parameters = next(module.parameters(), None) is not None
        if self.depth == 0 and has_parameters and inputs and isinstance(inputs[0], torch.Tensor):
            # A single row is a prediction.
            trains = module.training and torch.is_grad_enabled() and len(inputs[0]) > 1
            calls = self.training if trains else self.testing
            calls.append(list(map(tuple, inputs[0].detach().tolist())))
        self.depth += 1

    def leave(self, module, inputs, outputs):
        self.depth -= 1


def call_train(file, argv):
    """Calls train() of a program, and returns what happened."""
    recorder = Recorder()
    returned = runpy.run_path(str(file))["train"](*argv)
    model, log = returned if isinstance(returned, tuple) else (returned, None)
    weights = [n for p in model.parameters() for n in p.detach().flatten().tolist()]
    return Outcome(weights, log, recorder.training, recorder.testing)


@pytest.fixture
def run(request, tmp_path):
    """A function that runs a program in processes; returns what happened on each rank."""
    seed = request.config.option.seed
    program = request.node.name.removeprefix("test_") + ".py"
    given = Path(__file__).parent / "bugs" / program

    def run(world_size, argv=(), original=False):
        file = given if original else BUGS / program
        fail_if(not file.exists(), f"there is no {file}")

        def work(rank):
            try:
                return call_train(file, (seed, *argv)), None
            except (Exception, SystemExit) as error:  # whatever the reader's code raises
                return None, describe(error, file, rank)

        outcomes, hint = run_processes(work, world_size, tmp_path, seed, PROCESS_ENDED)
        fail_if(hint, f"with {world_size} processes: {hint}")
        return outcomes

    return run


def describe(error, file, rank):
    """Returns what happened to a rank, without the reason."""
    if re.search("Timed out|timeout", str(error)):
        return f"it does not end: rank {rank} waits for another rank, and the time is over"
    if re.search("closed by peer|reset by peer|Broken pipe", str(error)):
        return f"rank {rank} has lost the connection to another rank, which has ended or crashed"
    return explain(error, file, rank)


def close(a, b):
    a, b = (torch.tensor(numbers, dtype=torch.double) for numbers in (a, b))
    return a.shape == b.shape and torch.allclose(a, b, atol=1e-4)


def judge_weights(ranks, expected=None):
    """Fails if the ranks end with other weights than each other, or than one process."""
    processes = f"with {len(ranks)} processes"
    for rank, outcome in enumerate(ranks):
        equal = close(outcome.weights, ranks[0].weights)
        fail_if(not equal, f"{processes}: ranks 0 and {rank} end with different models")
    if expected:
        equal = close(ranks[0].weights, expected.weights)
        fail_if(not equal, f"{processes}: the model is not that of one process")


def judge_log(ranks, expected, what):
    """Fails if a rank has other numbers in its log than one process, lists of numbers."""
    for rank, outcome in enumerate(ranks):
        where = f"with {len(ranks)} processes, rank {rank}"
        lengths = len(outcome.log), len(expected.log)
        fail_if(
            lengths[0] != lengths[1], f"{where}: the log has {lengths[0]} entries, not {lengths[1]}"
        )
        for number, (found, right) in enumerate(zip(outcome.log, expected.log, strict=True)):
            shown, wanted = ([round(float(n), 4) for n in numbers] for numbers in (found, right))
            fail_if(
                not close(found, right),
                f"{where}: {what} {number} are {shown}, and {wanted} with one process",
            )


def rows_of(calls):
    return [row for call in calls for row in call]


def judge_shares(ranks, expected):
    """Fails unless the ranks share out the rows to train on."""
    total = len(rows_of(expected.training))
    for rank, outcome in enumerate(ranks):
        count = len(rows_of(outcome.training))
        fail_if(
            abs(count * len(ranks) - total) > total / 10,
            f"with {len(ranks)} processes: rank {rank} trains on {count} rows, and one process on "
            f"{total}. Each rank should have its share of them",
        )


def judge_epochs(ranks, expected, epochs, read_row):
    """Fails unless the ranks train on each row once in an epoch, in a new order each time."""
    every = {read_row(row) for row in rows_of(expected.training)}
    shards = []
    for outcome in ranks:
        rows = [read_row(row) for row in rows_of(outcome.training)]
        length = len(rows) // epochs
        shards.append([rows[n : n + length] for n in range(0, epochs * length, length)])
    for epoch, parts in enumerate(zip(*shards, strict=True)):
        counts = Counter(row for part in parts for row in part)
        missing, twice = len(every - counts.keys()), sum(n > 1 for n in counts.values())
        fail_if(
            missing or twice,
            f"with {len(ranks)} processes, epoch {epoch}: of {len(every)} rows {missing} are on no "
            f"rank, and {twice} are there more than once",
        )
        others = len(counts.keys() - every)
        fail_if(others, f"with {len(ranks)} processes: {others} rows are not those of one process")
    same = [shard for shard in shards if shard[0] == shard[1]]
    fail_if(same, f"with {len(ranks)} processes: every epoch has the same order")


def judge_tests(ranks, epochs):
    """Fails if a row is tested more than once in an epoch."""
    counts = Counter(row for outcome in ranks for row in rows_of(outcome.testing))
    often = max(counts.values()) / epochs
    fail_if(often > 1, f"with {len(ranks)} processes: a row is tested {often:g} times an epoch")


def test_boxes(run):
    (expected,) = run(1, original=True)
    for world_size in (2, 3):
        ranks = run(world_size)
        judge_shares(ranks, expected)
        judge_weights(ranks, expected)
        names = ("bird", "place")
        logs = [o._replace(log=[[d.get(n, 0) for n in names] for d in o.log]) for o in ranks]
        right = expected._replace(log=[[d.get(n, 0) for n in names] for d in expected.log])
        judge_log(logs, right, "the losses of step")


def test_sentences(run):
    (expected,) = run(1, original=True)
    for world_size in (2, 3):
        ranks = run(world_size)
        judge_weights(ranks)
        judge_epochs(ranks, expected, 4, lambda row: tuple(n for n in row if n))
        numbers = [n for outcome in ranks for row in rows_of(outcome.training) for n in row]
        padding = numbers.count(0) / len(numbers)
        fail_if(
            padding > 0.2,
            f"with {world_size} processes: {padding:.0%} of the numbers are padding, because the "
            "sentences of a batch are not about equally long any more",
        )


def test_clicks(run):
    (expected,) = run(1, original=True)
    for world_size in (2, 3):
        ranks = run(world_size)
        judge_weights(ranks)
        judge_epochs(ranks, expected, 4, lambda row: tuple(map(int, row)))
        for rank, outcome in enumerate(ranks):
            noise = {n % 1 for row in rows_of(outcome.training) for n in row}
            fail_if(noise == {0}, f"with {world_size} processes: rank {rank} has no noise any more")


def test_houses(run):
    (expected,) = run(1, original=True)
    for world_size in (2, 3):
        ranks = run(world_size)
        judge_weights(ranks, expected)
        judge_tests(ranks, 5)
        judge_log(ranks, expected, "error and R² of epoch")


def test_energy(run):
    (expected,) = run(1, original=True)
    for world_size in (2, 3):
        ranks = run(world_size)
        judge_shares(ranks, expected)
        judge_weights(ranks, expected)


def test_letters(run):
    (expected,) = run(1, original=True)
    for world_size in (2, 3):
        ranks = run(world_size)
        judge_shares(ranks, expected)
        judge_weights(ranks, expected)
        losses = [outcome._replace(log=[[n] for n in outcome.log]) for outcome in ranks]
        judge_log(losses, expected._replace(log=[[n] for n in expected.log]), "the loss of step")


def test_sensors(run, tmp_path):
    (expected,) = run(1, (tmp_path / "expected.pt", 4), original=True)
    for world_size in (2, 3):
        processes = f"with {world_size} processes"
        file = tmp_path / str(world_size)
        whole = run(world_size, (file.with_suffix(".whole"), 4))
        run(world_size, (file.with_suffix(".halves"), 2))
        resumed = run(world_size, (file.with_suffix(".halves"), 4))
        judge_shares(whole, expected)
        counts = [len(rows_of(ranks[0].training)) for ranks in (resumed, whole)]
        fail_if(
            2 * counts[0] != counts[1],
            f"{processes}: after 2 of 4 epochs the resumed run trains on {counts[0]} rows on rank "
            f"0, and the whole run trained on {counts[1]}",
        )
        fail_if(
            not close(resumed[0].weights, whole[0].weights),
            f"{processes}: the resumed run ends with another model than the whole run",
        )
        for ranks in (whole, resumed):
            judge_weights(ranks)
            noise = [read_noise(outcome) for outcome in ranks]
            fail_if({(0,) * 8} in noise, f"{processes}: there is no noise any more")
            same = any(noise[0] & other for other in noise[1:])
            fail_if(same, f"{processes}: the ranks add the same noise to different rows")


def read_noise(outcome):
    """Returns the noise of each row that a rank trained on; without it the rows are integers."""
    return {tuple(round(n % 1, 3) for n in row) for row in rows_of(outcome.training)}


def test_animals(run):
    (expected,) = run(1, original=True)
    for world_size in (2, 3):
        ranks = run(world_size)
        judge_shares(ranks, expected)
        judge_weights(ranks, expected)
        judge_tests(ranks, 3)
        judge_log(ranks, expected, "the owls of epoch")
