"""What the two judges need: processes that try a reader's code, and a log of their calls."""

import functools
import multiprocessing
import os
import random
import re
import tempfile
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import pytest
import torch
import torch._dynamo  # Optimizers and DDP import these two late: here once, not in each process.
import torch.distributed as dist
import torch.distributed.tensor.parallel.ddp
from torch.distributed import distributed_c10d

SECONDS = 40  # the time limit of an exercise
CALLS = []  # what the answers have called in this process: (name, count of numbers)
ONE_RANK_ALONE = (
    "a rank waited for a call that the other rank did not make: all ranks must make the same "
    "collective calls in the same order, so look for one under an if, and for a loop that ends at "
    "different times. Of send and receive, each needs its counterpart on the other rank: start "
    "both, and wait for them afterwards"
)
PROCESS_ENDED = (
    "the process of rank {rank} ended: gloo ends it where two calls meet that do not fit, in their "
    "order or their size, or the function itself called exit"
)


class SlowRequest:
    """A request whose result is not there before somebody waits for it, as on a slow network."""

    def __init__(self, tensor, op, group):
        self.tensor, self.result = tensor, tensor.detach().clone()
        self.request = all_reduce_of_torch(self.result, op, group, async_op=True)

    def wait(self, timeout=None):
        CALLS.append(("wait", 0))
        self.request.wait()
        self.tensor.detach().copy_(self.result)
        return True


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    CALLS.append(("all_reduce in the background" if async_op else "all_reduce", tensor.numel()))
    if async_op:
        return SlowRequest(tensor, op, group)
    return all_reduce_of_torch(tensor, op, group)


def record(name):
    """Puts a function round one of torch.distributed, which notes its calls in CALLS."""
    original = getattr(dist, name)

    @functools.wraps(original)
    def recorded(*args, **kwargs):
        numbers = args[0].numel() if args and isinstance(args[0], torch.Tensor) else 0
        CALLS.append((name, numbers))
        return original(*args, **kwargs)

    put(name, recorded)


def put(name, function):
    for module in (dist, distributed_c10d):  # torch's own functions look here.
        setattr(module, name, function)


all_reduce_of_torch = dist.all_reduce
put("all_reduce", all_reduce)
for name in ("broadcast", "reduce", "gather", "all_gather", "all_gather_object", "isend", "send"):
    record(name)
for name in ("all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"):
    record(name)


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="changes all numbers and sizes")


@pytest.fixture
def numbers(request):
    """Random numbers of this test, which --seed changes."""
    return random.Random(f"{request.config.option.seed} {request.node.name}")


@pytest.fixture
def run_ranks(request, tmp_path):
    """A function that runs case(answer, rank) in several processes and returns their results.

    answer is the function or class of the reader. If a process fails, the test fails with a hint.
    """

    def run(name, case, world_size=2):
        answers = request.module.answers
        answer = getattr(answers, name, None)
        fail_if(answer is None, f"the file has no {name}")
        work = functools.partial(try_answer, Path(answers.__file__), case, answer)
        seed = request.config.option.seed
        results, hint = run_processes(work, world_size, tmp_path, seed, PROCESS_ENDED)
        fail_if(hint, hint)
        return results

    return run


def try_answer(file, case, answer, rank):
    """Returns what the case returns, and a hint if the reader's code raises an error."""
    try:
        return case(answer, rank), None
    except (Exception, SystemExit) as error:  # whatever the reader's code raises
        return None, explain(error, file, rank)


def run_processes(work, world_size, folder, seed, ended):
    """Runs work(rank), which returns (result, hint), in processes; returns (results, first hint).

    ended is the hint if a process ends before it returns something.
    """
    meeting_point = Path(tempfile.mkdtemp(dir=folder)) / "meet"
    processes, pipes, results = [], [], {}

    def join_and_work(rank, pipe):
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # Nothing listens beyond this machine.
        meeting = {"init_method": f"file://{meeting_point}"}
        meeting["timeout"] = timedelta(seconds=SECONDS / 4)
        dist.init_process_group("gloo", rank=rank, world_size=world_size, **meeting)
        torch.manual_seed(1000 * seed + rank)
        CALLS.clear()
        pipe.send(work(rank))
        pipe.recv()  # stays, because the other ranks would see a closed connection

    try:
        context = multiprocessing.get_context("fork")  # has torch and the answers loaded
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            pipes.append(ours)
            argv = rank, theirs
            processes.append(context.Process(target=join_and_work, args=argv, daemon=True))
            processes[-1].start()
            theirs.close()  # Otherwise the end of the process would not close the pipe.
        while len(results) < world_size:
            ready = connection.wait([pipe for pipe in pipes if pipe not in results], SECONDS)
            if not ready:
                return None, "it does not return: is there a loop that does not end?"
            for pipe in ready:
                try:
                    results[pipe], hint = pipe.recv()
                except (EOFError, ConnectionError):
                    hint = ended.format(rank=pipes.index(pipe))
                if hint:  # The first error counts. That of another rank often follows from it.
                    return None, hint
        return [results[pipe] for pipe in pipes], None
    finally:
        for process in processes:
            process.kill()
            process.join()


def explain(error, file, rank):
    """Returns what to say about an exception of the code in the reader's file."""
    if isinstance(error, NotImplementedError):
        return "to do: its docstring says what"
    if re.search("Timed out|timeout|closed by peer|reset by peer", str(error)):
        return ONE_RANK_ALONE
    if "empty parameter list" in str(error):
        return "parameters is a generator, and empty after one loop: make a list of it first"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    where = f"line {lines[-1]}" if lines else "what it returns"
    hint = f"{type(error).__name__} in {where}, on rank {rank}: {error}"
    if "NoneType" in hint:
        hint += ". A gradient can be None, and collectives return None without async_op=True"
    return hint


def fail_if(condition, hint):
    """Fails the test with a hint, and without a page of the judge's own code."""
    if condition:
        pytest.fail(hint, pytrace=False)
