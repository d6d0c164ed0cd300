"""What the judge needs: the answers, the processes that try them, and a log of their calls."""

import functools
import importlib.util
import multiprocessing
import os
import random
import re
import traceback
from datetime import timedelta
from multiprocessing import connection

import pytest
import torch
import torch._dynamo  # Optimizers and DDP import these two late: here once, not in each process.
import torch.distributed as dist
import torch.distributed.tensor.parallel.ddp
from torch.distributed import distributed_c10d

CALLS = []  # what the answers have called in this process: (name, count of numbers)
ONE_RANK_ALONE = (
    "a rank waited for a call that the other rank did not make: all ranks must make the same "
    "collective calls in the same order, so look for one under an if, and for a loop that ends at "
    "different times. Of send and receive, each needs its counterpart on the other rank"
)
READ_FIRST = {
    "shard": "docs/data.md",
    "evaluate": "docs/checkpoints.md",
    "resume": "docs/checkpoints.md",
    "should_stop": "docs/checkpoints.md",
    "ring_all_reduce": "docs/concepts.md",
    "accumulate": "docs/training.md",
    "ShardedOptimizer": "docs/beyond_ddp.md",
}


class SlowRequest:
    """A request whose result is not there before somebody waits for it, as on a slow network."""

    def __init__(self, tensor, op, group):
        self.tensor, self.result = tensor, tensor.detach().clone()
        self.request = all_reduce_of_torch(self.result, op, group, async_op=True)
        self.waited = False

    def wait(self, timeout=None):
        CALLS.append(("waited again" if self.waited else "wait", 0))
        if not self.waited:
            self.waited = True
            self.request.wait()
            self.tensor.detach().copy_(self.result)
        return True

    def is_completed(self):
        return self.request.is_completed()


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


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="changes all numbers and sizes")
    parser.addoption("--seconds", type=int, default=40, help="time limit of an exercise")


def pytest_configure(config):
    """Imports the answers once, before the tests. A mistake there ends pytest with its line."""
    path = config.invocation_params.dir / os.environ.get("ANSWERS", "answers.py")
    if not path.exists():
        raise pytest.UsageError(f"there is no {path}: cp docs/exercises/template.py {path.name}")
    spec = importlib.util.spec_from_file_location("answers", path)
    config.answers = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(config.answers)
    except SyntaxError as error:
        raise pytest.UsageError(f"{path}, line {error.lineno}: {error.msg}") from None
    except Exception as error:  # whatever the file does when it is imported
        line = find_line(error, path)
        raise pytest.UsageError(f"{path}, line {line}: {type(error).__name__}: {error}") from None


def find_line(error, path):
    """Returns the last line of a file in the traceback of an error; None if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if f.filename == str(path)), None)


@pytest.fixture
def numbers(request):
    """Random numbers of this test, which --seed changes."""
    return random.Random(f"{request.config.option.seed} {request.node.name}")


@pytest.fixture
def run_ranks(request, tmp_path):
    """A function that runs case(answer, rank) in several processes and returns their results.

    answer is the function or class of the reader. If a process fails, the test fails with a hint.
    """
    config, processes, outputs = request.config, [], []

    def work(case, answer, rank, world_size, pipe):
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # Nothing listens beyond this machine.
        timeout = timedelta(seconds=config.option.seconds / 4)
        meeting = {"init_method": f"file://{tmp_path}/meet", "timeout": timeout}
        dist.init_process_group("gloo", rank=rank, world_size=world_size, **meeting)
        torch.manual_seed(1000 * config.option.seed + rank)
        CALLS.clear()
        try:
            pipe.send((case(answer, rank), None))
        except (Exception, SystemExit) as error:  # whatever the reader's code raises
            line = find_line(error, config.answers.__file__)
            where = f"line {line}" if line else "what it returns"
            pipe.send((None, (type(error).__name__, f"{where}, on rank {rank}: {error}")))
        pipe.recv()  # stays, because the other ranks would see a closed connection

    def run(name, case, world_size=2):
        answer = getattr(config.answers, name, None)
        fail_if(answer is None, f"the file has no {name}")
        context = multiprocessing.get_context("fork")  # has torch and the answers loaded
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            outputs.append(ours)
            argv = case, answer, rank, world_size, theirs
            processes.append(context.Process(target=work, args=argv, daemon=True))
            processes[-1].start()
            theirs.close()  # Otherwise the end of the process would not close the pipe.
        results = {}
        while len(results) < world_size:
            waiting = [pipe for pipe in outputs if pipe not in results]
            ready = connection.wait(waiting, config.option.seconds)
            fail_if(not ready, "it does not return: is there a loop that does not end?")
            for pipe in ready:
                try:
                    results[pipe], error = pipe.recv()
                except (EOFError, ConnectionError):
                    processes[outputs.index(pipe)].join()
                    code = processes[outputs.index(pipe)].exitcode
                    error = "EOFError", str(code)
                # The first error counts. That of another rank often follows from it.
                fail_if(error, error and explain(name, *error))
        return [results[pipe] for pipe in outputs]

    yield run
    for process in processes:
        process.kill()
        process.join()


def explain(name, kind, message):
    """Returns what to say about an exception of the reader's code."""
    if kind == "NotImplementedError":
        return f"to do. Read {READ_FIRST.get(name, 'docs/by_hand.md')} first"
    if kind == "EOFError" and message == "-6":
        return "gloo ended the process: two calls met that do not fit, in their order or their size"
    if kind == "EOFError":
        return "it ended its process: return, and leave the end to the judge"
    if re.search("Timed out|timeout|closed by peer|reset by peer", message):
        return ONE_RANK_ALONE
    if name == "resume" and kind == "FileNotFoundError":
        return "a rank without the file reads it: rank 0 reads, and sends the content"
    if "doesn't require gradient" in message:
        return "a parameter that needs no gradient gets a hook: leave it out"
    if "'NoneType' object has no attribute 'wait'" in message:
        return "all_reduce gives a request to wait for when it is told so: take async_op=True"
    if "NoneType" in message and name == "average_gradients":
        return "a gradient is None, because its parameter took no part in the loss"
    if "empty parameter list" in message:
        return "parameters is a generator, and empty after one loop: make a list of it first"
    return f"{kind} in {message}"


def fail_if(condition, hint):
    """Fails the test with a hint, and without a page of the judge's own code."""
    if condition:
        pytest.fail(hint, pytrace=False)
