"""Exercises about DDP, and a judge.

    python scripts/exercises.py start answers.py   # writes your copy, with functions to fill in
    python scripts/exercises.py judge answers.py   # says of each: right, or wrong and a hint

docs/exercises.md says which functions, and what they practise.
"""

import argparse
import importlib.util
import multiprocessing
import re
import shutil
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

TEMPLATE = Path(__file__).with_name("exercises_template.py")
ONE_RANK_ALONE = (
    "a rank waited for a call that the other rank did not make: all ranks must make the same "
    "collective calls, so look for one under an if, and for a loop that does not end"
)

# For each exercise there are two functions. try_… runs in both processes. It calls the reader's
# function, which stands in module, and returns what the judge must know. hint_… gets the results of
# both ranks. It names the mistake, or returns None when there is none.


def try_shard(module, rank, folder):
    return [list(map(int, module.shard(101, epoch))) for epoch in (0, 1, 0)]


def hint_shard(ranks):
    (first, other_epoch, again), (second, *_) = ranks
    missing = len(set(range(101)) - {*first, *second})
    if len(first) != len(second):
        return (
            f"the ranks have {len(first)} and {len(second)} images: the rank with more would wait "
            "for the other in its last step"
        )
    if sorted(first) == sorted(second):
        return "both ranks have the same images: the rank must decide which"
    if missing == 1 and len(first) == 50:
        return "an image is left out: round up, and let an image occur twice"
    if missing:
        return f"{missing} images are on no rank: do all ranks shuffle with the same seed?"
    if len(first) > 51:
        return f"each rank has {len(first)} images where 51 are enough"
    if first != again:
        return "two calls for the same epoch differ: seed a generator with the epoch"
    if first == other_epoch:
        return "every epoch has the same order: the epoch must be part of the seed"


class RecordingModel(nn.Module):
    """Returns its input plus a buffer as logits, and records how it was called.

    The buffer is 0 on rank 0. On rank 1 it makes most answers wrong, unless the reader's function
    sends rank 0's buffer there.
    """

    def __init__(self, rank):
        super().__init__()
        self.register_buffer("shift", torch.tensor([0.0, 0.0, 9.0]) * rank)
        self.seen, self.in_training, self.other_buffer = 0, False, False

    def forward(self, images):
        self.seen += len(images)
        self.in_training |= self.training
        self.other_buffer |= bool(self.shift.any())
        return images + self.shift


def try_evaluate(module, rank, folder):
    model, labels = RecordingModel(rank), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    images = torch.eye(3)[labels]
    images[[1, 6]] = torch.tensor([0.0, 0.5, 1.0])  # right for label 2 alone
    correct, count = module.evaluate(model, images, labels)
    return (float(correct), float(count)), model.seen, model.in_training, model.other_buffer


def hint_evaluate(ranks):
    counts, seen, in_training, other_buffer = zip(*ranks, strict=True)
    if any(in_training):
        return "the model is in training mode, where BatchNorm and dropout work differently"
    if sum(seen) == 14:
        return "each rank tests all images: give each rank its part"
    if sum(seen) > 7:
        return "an image is tested twice: DistributedSampler repeats images, so take other indices"
    if sum(seen) < 7:
        return "an image is not tested: the parts may have different lengths"
    if 0 in seen:
        return "one rank tests all images, and the other rank none: give each rank its part"
    if any(other_buffer):
        return "a rank tests with other buffers than rank 0's: broadcast them from rank 0 before"
    correct, count = counts[0]
    if counts[0] != counts[1] or count in (3, 4):
        return "the ranks return different or partial numbers: add them up on all ranks"
    if (correct, count) != (5, 7):
        return f"{correct:g} of {count:g}, and 5 of 7 is right: add up counts, not averages"


def try_average_gradients(module, rank, folder):
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])  # the second one takes no part
    before = [parameter.clone() for parameter in model.parameters()]
    model[0](torch.tensor([[1.0 + 4 * rank]])).backward()  # the gradients: 1 or 5, and 1
    module.average_gradients(model)
    same = all(map(torch.equal, before, model.parameters()))
    gradients = model[0].weight.grad.item(), model[0].bias.grad.item()
    return *gradients, model[1].weight.grad is None, same


def hint_average_gradients(ranks):
    for rank, (weight, bias, none, same) in enumerate(ranks):
        own = 1 + 4 * rank
        if not same:
            return "the weights have changed: average the gradients and leave the weights alone"
        if not none:
            return "a gradient that was None is a tensor now: leave None alone"
        if (weight, bias) == (6, 2):
            return "the gradients are the sum over the ranks: divide by the world size"
        if (weight, bias) == (1.5, 0.5):
            return "the gradients are half of the average: they are divided twice"
        if (weight, bias) in ((own, 1), (own / 2, 0.5)):
            return f"rank {rank} still has its own gradients: all_reduce works in place"
        if (weight, bias) != (3, 1):
            return f"rank {rank} has the gradients {weight:g} and {bias:g}, and 3 and 1 are right"


def train_steps(seed, steps=1):
    """Returns a small model and its optimizer after some steps; without a step no momentum."""
    torch.manual_seed(seed)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        model(torch.randn(1, 2)).sum().backward()
        optimizer.step()
    return model, optimizer


def read_state(model, optimizer):
    """Returns the weights and the momentum as lists of numbers."""
    rows = [optimizer.state.get(p, {}) for p in model.parameters()]
    momentum = [row["momentum_buffer"] for row in rows if "momentum_buffer" in row]
    return [[t.tolist() for t in tensors] for tensors in (model.parameters(), momentum)]


def try_resume(module, rank, folder):
    """Four times: a file on rank 0 alone, on rank 1 an older one, on rank 1 alone, and on rank 0
    alone with a new optimizer, which has no momentum.
    """
    results = []
    for case, files in enumerate(({0: 3}, {0: 3, 1: 1}, {1: 3}, {0: 3})):
        path = folder / str(case) / str(rank) / "last.pt"
        path.parent.mkdir(parents=True)
        if rank in files:
            model, optimizer = train_steps(10 + rank)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"epoch": files[rank]}, path)
        model, optimizer = train_steps(20 + rank, steps=int(case < 3))
        expected = read_state(*(train_steps(10) if 0 in files else (model, optimizer)))
        epoch = module.resume(path, model, optimizer)
        found = read_state(model, optimizer)
        results.append((epoch, found[0] == expected[0], found[1] == expected[1]))
    return results


def hint_resume(ranks):
    cases = list(zip(*ranks, strict=True))
    for (epoch, *_), (other, *_) in cases:
        if epoch != other:
            return f"rank 0 resumes after epoch {epoch} and rank 1 after {other}: rank 0 decides"
    if [case[0][0] for case in cases] != [3, 3, 0, 3]:
        return f"the epochs are {[case[0][0] for case in cases]}, and [3, 3, 0, 3] is right"
    for rank in (0, 1):
        if not all(cases[2][rank][1:]):
            return f"rank {rank} has changed, and rank 0 has no file: send only if there is one"
        if not all(case[rank][1] for case in cases):
            return f"rank {rank} has other weights than rank 0's file: send all of it"
        if not all(case[rank][2] for case in cases):
            return f"rank {rank} has another momentum than rank 0's file: send and load it, too"


LOSSES = ([0.5, 0.6, 0.7, 0.8, 0.8, 0.8], [0.9, 0.6, 0.3, 0.4, 0.25, 0.3])


def try_should_stop(module, rank, folder):
    return [bool(module.should_stop(LOSSES[rank][: epoch + 1], 2)) for epoch in range(6)]


def hint_should_stop(ranks):
    if ranks[0] != ranks[1]:
        return "the ranks disagree: the one that goes on would wait for the one that stops"
    last = ranks[0].index(True) + 1 if True in ranks[0] else None
    if last == 3:
        return "the ranks agree, but the loss of one rank decides: average the losses first"
    if last is None:
        return "the ranks agree, but never stop: average the losses, not the decisions"
    if ranks[0] != [False] * 4 + [True] * 2:
        return f"the ranks stop after epoch {last}, and 5 is right: count from the best"


EXERCISES = {
    "shard": (try_shard, hint_shard),
    "evaluate": (try_evaluate, hint_evaluate),
    "average_gradients": (try_average_gradients, hint_average_gradients),
    "resume": (try_resume, hint_resume),
    "should_stop": (try_should_stop, hint_should_stop),
}


def worker(name, module, rank, folder, pipe, seconds):
    """One of two processes: tries a function, and sends (result, None) or (None, error)."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=seconds / 4),
    )
    torch.manual_seed(rank)
    try:
        answer = EXERCISES[name][0](module, rank, folder), None
    except (Exception, SystemExit) as error:  # whatever the reader's code raises
        line = find_line(error, module.__file__)
        where = f"line {line}" if line else "what it returns"
        answer = None, (type(error).__name__, f"{where}, on rank {rank}: {error}")
    pipe.send(answer)
    pipe.recv()  # stays, because the other rank would see a closed connection


def find_line(error, path):
    """Returns the last line of a file in the traceback of an error; None if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return lines[-1] if lines else None


def run_both_ranks(name, module, seconds):
    """Tries one function in two processes; returns (results by rank, error or None)."""
    context = multiprocessing.get_context("fork")  # has torch and the reader's file loaded
    results, error = {}, None
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            argv = name, module, rank, Path(folder), theirs, seconds
            processes.append(context.Process(target=worker, args=argv))
            processes[-1].start()
            theirs.close()  # else the end of the process would not close the pipe
            pipes.append(ours)
        while len(results) < 2 and not error:
            ready = connection.wait([pipe for pipe in pipes if pipe not in results], seconds)
            if not ready:
                error = "TimeoutError", ""
            for pipe in ready:
                try:
                    results[pipe], error = pipe.recv()
                except (EOFError, ConnectionError):
                    error = "EOFError", ""
                if error:
                    break  # The second rank's error often follows from that of the first.
        for process in processes:
            process.kill()
            process.join()
    return [results.get(pipe) for pipe in pipes], error


def explain_error(name, kind, message, seconds):
    """Returns what to say about an exception of the reader's function."""
    if kind == "NotImplementedError":
        return "to do"
    if kind == "TimeoutError":
        return f"wrong: it has not returned after {seconds} s: is there a loop that does not end?"
    if kind == "EOFError":
        return "wrong: it has ended its process: return, and leave the end to the judge"
    if re.search("Timed out|timeout|closed by peer|reset by peer", message):
        return f"wrong: {ONE_RANK_ALONE}"
    if name == "resume" and kind == "FileNotFoundError":
        return "wrong: a rank without the file reads it: rank 0 reads, and sends the content"
    if name == "average_gradients" and "NoneType" in message:
        return "wrong: a gradient is None, because its parameter took no part in the loss"
    return f"wrong: {kind} in {message}"


def judge(name, module, seconds):
    """Tries one function in two processes; returns "right" or what to say."""
    if not hasattr(module, name):
        return "wrong: the file has no function of this name"
    results, error = run_both_ranks(name, module, seconds)
    if error:
        return explain_error(name, *error, seconds)
    hint = EXERCISES[name][1](results)
    return f"wrong: {hint}" if hint else "right"


def load_answers(path):
    """Imports the reader's file. A mistake in it ends the program with its line."""
    if not path.exists():
        sys.exit(f"there is no {path}: python scripts/exercises.py start {path} writes it")
    spec = importlib.util.spec_from_file_location("answers", path.resolve())
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        sys.exit(f"{path}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}")
    except Exception as error:  # whatever the reader's code raises
        line = find_line(error, path.resolve())
        sys.exit(f"{path}, line {line}: {type(error).__name__}: {error}")
    return module


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("start", "judge"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=int, default=60, help="for each function; default: 60")
    args = parser.parse_args()
    if args.command == "start":
        if args.file.exists():
            sys.exit(f"{args.file} exists: choose another name")
        shutil.copy(TEMPLATE, args.file)
        print(f"fill in the functions of {args.file}")
        return
    module = load_answers(args.file)
    verdicts = {name: judge(name, module, args.seconds) for name in EXERCISES}
    for name, verdict in verdicts.items():
        print(f"{name:18} {verdict}")
    sys.exit(set(verdicts.values()) != {"right"})


if __name__ == "__main__":
    main()
