"""Runs a DDP script with two processes on this machine, and says what they did wrong.

    python scripts/check_ddp.py my_training.py --its-options

The ranks write notes about what they do: the rows that they draw, checksums of their weights and
gradients, their collective calls. Where the notes of two ranks are not what DDP needs, a line says
NO, and where to read on. A ? is something to look at: it may be right. Two epochs are enough.

    python scripts/check_ddp.py --against-one "--batch-size 128" my_training.py --batch-size 64
    torchrun --nproc-per-node 2 scripts/check_ddp.py my_training.py  # under a launcher of your own
    python scripts/check_ddp.py --report who_hangs                   # then this reads the notes

--against-one trains once more in one process, with these options for the same global batch, and
compares the gradients. Without GPUs a script that asks for some gets the CPU and gloo (--cpu: no).
"""

import argparse
import contextlib
import faulthandler
import functools
import glob
import json
import os
import random
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import who_hangs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Subset, dataloader

HERE, START = os.path.dirname(os.path.realpath(__file__)), os.getcwd()
# What a rank remembers of itself.
NOTES = {"pid": None, "early": []}  # its file of notes, and the notes before it has a number
COUNTS, CALLS, REPLACED, DRAWS = {}, {}, {}, {}
WRAPPED, OPTIMIZERS = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()
NAMES, FROZEN, INSIDE, PASSES, OPENING, TESTS = {}, set(), [], [], [], []


# The notes that who_hangs.py reads. A script can copy these three functions and their imports.


def read_recorders():
    """Returns the collectives that torch remembers of this rank: JSON text for each library."""
    c10d, texts = torch._C._distributed_c10d, []  # private, as all of its functions here
    if hasattr(c10d, "_dump_fr_trace_json"):  # gloo's, since torch 2.8
        texts.append(c10d._dump_fr_trace_json())
    if hasattr(c10d, "_dump_nccl_trace_json"):  # nccl's, up to torch 2.14
        texts.append(c10d._dump_nccl_trace_json())
    if hasattr(c10d, "_dump_fr_trace_file"):  # torch 2.15, whose nccl is called nccl2
        texts.append(c10d._dump_fr_trace_json(backend="nccl2"))
    return [text.decode() for text in texts]


def watch(rank, world_size, folder):
    """Writes every five seconds where this rank is, until its script has ended."""
    os.makedirs(folder, exist_ok=True)
    main, running = threading.main_thread(), True
    while running:
        running = main.is_alive()
        stack = traceback.extract_stack(sys._current_frames()[main.ident])
        note = {"rank": rank, "world_size": world_size, "host": os.uname().nodename}
        note |= {"pid": os.getpid(), "time": time.time(), "running": running}
        note |= {"stack": [list(frame) for frame in stack], "recorder": read_recorders()}
        with open(f"{folder}/{rank}.new", "w") as file:
            json.dump(note, file)
        os.replace(f"{folder}/{rank}.new", f"{folder}/{rank}.json")
        main.join(timeout=5)


def start_watching(rank, world_size, folder="who_hangs"):
    """Call it before init_process_group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")  # collectives that torch remembers
    faulthandler.enable()  # An abort prints the line of each thread.
    folder = os.path.abspath(folder)  # The script may go to another folder.
    threading.Thread(target=watch, args=(rank, world_size, folder)).start()


# What each rank notes.


def find_line():
    """Returns the line of the user's own code that runs now, as file:line."""
    frame = sys._getframe()
    while frame and (
        frame.f_code.co_filename == __file__ or who_hangs.INSTALLED.search(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    if not frame:
        return ""
    path = os.path.relpath(os.path.join(START, frame.f_code.co_filename), START)
    return f"{path}:{frame.f_lineno}"


def note(kind, key, **facts):
    """Notes a fact. The facts of all ranks with the same kind and key will be compared."""
    line = json.dumps({"kind": kind, "key": str(key), "where": find_line()} | facts)
    if NOTES["pid"] == os.getpid():  # else a DataLoader's worker
        NOTES["file"].write(line + "\n")
        NOTES["file"].flush()
    elif NOTES["pid"] is None:
        NOTES["early"].append(line)


def start_notes(rank, world_size):
    """Opens the notes of this rank, and starts those for who_hangs.py."""
    if NOTES["pid"] == os.getpid():
        return
    folder = os.environ["CHECK_DDP_NOTES"]
    os.makedirs(folder, exist_ok=True)
    NOTES["file"] = open(f"{folder}/{rank}.facts", "w")  # noqa: SIM115
    NOTES["pid"] = os.getpid()
    NOTES["file"].writelines(line + "\n" for line in NOTES.pop("early", []))
    start_watching(rank, world_size, folder)


def count(name):
    """Counts what happens; returns how often it has."""
    COUNTS[name] = COUNTS.get(name, 0) + 1
    return COUNTS[name]


def is_due(number):
    """Whether to look closely this time: at powers of two, because checksums take time."""
    return number & (number - 1) == 0


def replace(owner, name, function):
    """Puts function in the place of owner.name. Its first argument is what stood there."""
    original = getattr(owner, name, None)
    if original is None:
        note("absent", name)
        return

    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return function(original, *args, **kwargs)

    setattr(owner, name, replacement)
    REPLACED[id(original)] = replacement


def compute_checksum(tensor):
    """Returns a checksum of all bits and some of the numbers; None if there is no tensor."""
    if tensor is None:
        return None
    flat = tensor.detach().to_dense().cpu().contiguous().flatten()
    some = flat[:: max(1, len(flat) // 16)]
    return [zlib.crc32(flat.view(torch.uint8).numpy()), some.to(torch.float64).tolist()]


def compute_checksums(tensors):
    """Returns checksums by name. Ranks hold different parts of a DTensor: it is left out."""
    return {n: compute_checksum(t) for n, t in tensors.items() if not hasattr(t, "to_local")}


def list_tensors(batch):
    """Returns the tensors in a batch: lists and dictionaries of tensors."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    return sum(map(list_tensors, parts), []) if isinstance(parts, (list, tuple)) else []


def note_joined(original, *args, **kwargs):
    """A rank joins the process group."""
    rank, world_size = kwargs.get("rank", -1), kwargs.get("world_size", -1)
    rank = int(os.environ.get("RANK", 0)) if rank < 0 else rank
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size < 0 else world_size
    start_notes(rank, world_size)
    backend = args[0] if args else kwargs.get("backend")
    if "CHECK_DDP_CPU" in os.environ:
        args, kwargs = args[1:], kwargs | {"backend": "gloo", "device_id": None}
        if args:
            kwargs, args = kwargs | {"init_method": args[0]}, ()
    note("joined", "", backend=backend, world_size=world_size)
    return original(*args, **kwargs)


def note_wrapped(original, ddp, module, *args, **kwargs):
    """DDP is built: the parameters and buffers that it will keep equal."""
    number = count("wrapped")
    names = [name for name, _ in module.named_parameters()]
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    buffers = [name for name, _ in module.named_buffers()]
    device = str(next(module.parameters()).device)
    batch_norm = any("BatchNorm" in type(part).__name__ for part in module.modules())
    note("wrapped", number, names=names, frozen=frozen, buffers=buffers, device=device,
         batch_norm=batch_norm, init_sync=kwargs.get("init_sync", True))  # fmt: skip
    if "CHECK_DDP_CPU" in os.environ:
        args, kwargs = (), kwargs | {"device_ids": None, "output_device": None}
    original(ddp, module, *args, **kwargs)
    WRAPPED[module] = number
    prefix = type(module).__name__
    NAMES.update({id(p): f"{prefix}.{name}" for name, p in module.named_parameters()})
    FROZEN.update(f"{prefix}.{name}" for name in frozen)


def note_forward(original, ddp, *inputs, **kwargs):
    """A forward of DDP: its inputs, and whether the backward will average."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        INSIDE.append(ddp.module)
    else:
        count("forward" if ddp.require_backward_grad_sync else "no_sync")
        number = count(f"inputs {WRAPPED.get(ddp.module)}")
        if is_due(number) and number > 1:
            sums = [compute_checksum(tensor)[0] for tensor in list_tensors([inputs, kwargs])]
            note("inputs", f"{WRAPPED.get(ddp.module)} {number}", sums=sums)
        INSIDE.append(ddp.module)
    try:
        return original(ddp, *inputs, **kwargs)
    finally:
        INSIDE.pop()


def note_module(module, inputs):
    """A forward of any module: it may go past DDP, or be a test."""
    if torch.compiler.is_compiling():
        return
    trains = torch.is_grad_enabled()
    count("with gradient" if trains else "without gradient")
    if module not in WRAPPED:
        return
    if trains and module not in INSIDE:
        count("past DDP")
        CALLS.setdefault("past DDP", find_line())
    if not trains and not module.training and "steps" in COUNTS:
        last = f"tested {WRAPPED[module]}"
        if CALLS.get(last) != COUNTS["steps"]:  # the first forward of this test
            CALLS[last] = COUNTS["steps"]
            buffers = compute_checksums(dict(module.named_buffers()))
            note("tested", f"{WRAPPED[module]} {count(last)}", buffers=buffers)


def read_generators():
    """Returns a checksum of the state of each generator of random numbers."""
    states = {"torch": torch.get_rng_state().numpy().tobytes(), "random": random.getstate()}
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    if "numpy" in sys.modules:
        states["numpy"] = [str(part) for part in sys.modules["numpy"].random.get_state()[2:]]
        states["numpy"] += [sys.modules["numpy"].random.get_state()[1].tobytes()]
    return {name: zlib.crc32(repr(state).encode()) for name, state in states.items()}


def name_parameters(optimizer):
    """Returns an optimizer's parameters by name; by a number where no DDP wraps them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {NAMES.get(id(p), f"no. {i} {tuple(p.shape)}"): p for i, p in enumerate(parameters)}


def note_step(optimizer, *_):
    """An optimizer is about to step: its weights and gradients, and random draws."""
    number = OPTIMIZERS.setdefault(optimizer, len(OPTIMIZERS) + 1)
    end_tests()
    count("steps")
    if DRAWS and DRAWS["passes"] == COUNTS.get("passes"):  # no epoch began meanwhile
        note("draws", DRAWS["step"], before=DRAWS["state"], after=read_generators())
    DRAWS.clear()
    if is_due(step := count(f"optimizer {number}")):
        named = name_parameters(optimizer)
        gradients = compute_checksums({name: p.grad for name, p in named.items()})
        thawed = sorted(name for name in FROZEN if gradients.get(name))
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        rows = [row for pass_ in PASSES for row in list_delivered(pass_)] if step == 1 else []
        note("step", f"{number} {step}", weights=compute_checksums(named), gradients=gradients,
             thawed=thawed, rates=rates, rows=rows, counts=COUNTS, calls=CALLS)  # fmt: skip


def note_stepped(optimizer, *_):
    """An optimizer has stepped: its weights."""
    number = OPTIMIZERS[optimizer]
    step = COUNTS[f"optimizer {number}"]
    if is_due(step):
        weights = compute_checksums(name_parameters(optimizer))
        note("step", f"{number} {step} after", weights=weights, gradients={}, counts=COUNTS)
        if number == 1:
            DRAWS.update(step=step, passes=COUNTS.get("passes"), state=read_generators())


def begin_pass(original, loader):
    """A loop over a DataLoader begins."""
    for pass_ in [p for p in PASSES if p["loader"]() is loader]:
        end_pass(pass_)
    where, (base, indices) = find_line(), find_base(loader.dataset)
    pass_ = {"where": where, "number": count(f"pass {where}"), "loader": weakref.ref(loader)}
    pass_ |= {"drawn": [], "delivered": 0, "rows": {}, "stream": [], "complete": False}
    pass_ |= {"size": measure_size(base), "indices": indices, "before": dict(COUNTS)}
    count("passes")
    PASSES.append(pass_)
    OPENING.append(pass_)
    try:
        iterator = original(loader)
    finally:
        OPENING.pop()
    iterator.check_ddp = pass_
    return iterator


def find_base(dataset):
    """Returns what a Subset, or a Subset of a Subset, was taken from, and its rows there."""
    indices = None
    while isinstance(dataset, Subset):
        own = [int(row) for row in dataset.indices]
        indices = own if indices is None else [own[row] for row in indices]
        dataset = dataset.dataset
    return dataset, indices


def measure_size(dataset):
    """Returns the number of a data set's rows, None if it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def note_indices(original, iterator):
    """A DataLoader takes the indices of its next batch from its sampler."""
    pass_ = OPENING[-1] if OPENING else iterator.check_ddp
    try:
        drawn = original(iterator)
    except StopIteration:
        pass_["complete"] = True
        raise
    rows = drawn if isinstance(drawn, (list, tuple)) else [drawn]
    if pass_["indices"] is not None:
        rows = [pass_["indices"][int(row)] for row in rows]
    pass_["drawn"].append([int(row) if hasattr(row, "__index__") else None for row in rows])
    return drawn


def note_batch(original, iterator):
    """A DataLoader delivers a batch: what is in some of its rows, or in all of a stream."""
    pass_ = iterator.check_ddp
    try:
        batch = original(iterator)
    except StopIteration:
        end_pass(pass_)
        raise
    pass_["delivered"] += 1
    if not pass_["drawn"] or pass_["number"] > 2:
        return batch
    rows = pass_["drawn"][min(pass_["delivered"], len(pass_["drawn"])) - 1]
    tensors = [t for t in list_tensors(batch) if t.ndim and not t.is_sparse]
    if None in rows:  # a stream
        if pass_["delivered"] <= 64:
            for parts in zip(*tensors, strict=False):
                pass_["stream"].append([compute_checksum(part)[0] for part in parts])
        return batch
    tensors = [t for t in tensors if len(t) == len(rows)]
    for i, row in enumerate(rows):
        if tensors and row % ((pass_["size"] or 1) // 64 + 1) == 0:
            pass_["rows"][row] = [compute_checksum(t[i])[0] for t in tensors]
    return batch


def list_delivered(pass_):
    """Returns the rows that a pass has delivered to the script. Workers draw more in advance."""
    return sum(pass_["drawn"][: pass_["delivered"]], [])


def is_test(pass_):
    """Whether models were called in a pass, and none with gradients."""
    trained, called = (
        COUNTS.get(name, 0) > pass_["before"].get(name, 0)
        for name in ("with gradient", "without gradient")
    )
    return called and not trained and COUNTS.get("steps") == pass_["before"].get("steps")


def end_pass(pass_):
    """A loop over a DataLoader has ended, or the script has."""
    if pass_ not in PASSES:
        return
    PASSES.remove(pass_)
    loader, where, number = pass_["loader"](), pass_["where"], pass_["number"]
    kind = "test" if is_test(pass_) else "train"
    if kind == "test":
        TESTS.append(pass_)
    if number <= 4 or is_due(number):
        sampler = type(loader.sampler).__name__ if loader else ""
        rows = pass_["stream"] or list_delivered(pass_)
        note("pass", f"{where} {number}", use=kind, line=where, rows=rows, size=pass_["size"],
             content=pass_["rows"], stream=bool(pass_["stream"]), complete=pass_["complete"],
             batches=pass_["delivered"], sampler=sampler,
             subset=pass_["indices"] is not None)  # fmt: skip


def end_tests():
    """Training goes on after a test, or the script ends: were the ranks' counts added up?"""
    for pass_ in [p for p in PASSES if is_test(p) and p["delivered"]]:
        end_pass(pass_)
    while TESTS:
        pass_ = TESTS.pop()
        added = COUNTS.get("sent", 0) > pass_["before"].get("sent", 0)
        note("added", f"{pass_['where']} {pass_['number']}", added=added)


def note_collective(original, *args, **kwargs):
    """A collective call: who calls it where with which dtype, and is it in the loss?"""
    name, where = original.__name__, find_line()
    if name not in ("barrier", "broadcast"):
        count("sent")
    number = count(f"call {where}")
    tensors = list_tensors([args, kwargs])
    dtype = str(tensors[0].dtype) if tensors else ""
    if CALLS.get(where) != [name, dtype]:
        CALLS[where] = [name, dtype]
        note("call", f"{where} {number}", name=name, dtype=dtype, line=where)
    if "CHECK_DDP_CPU" in os.environ:
        kwargs.pop("device_ids", None)
        op = kwargs.get("op", args[1] if len(args) > 1 else None)
        if name == "all_reduce" and op == dist.ReduceOp.AVG:  # gloo has no AVG
            original(tensors[0])
            return tensors[0].detach().div_(dist.get_world_size(kwargs.get("group")))
    result = original(*args, **kwargs)
    if name == "all_reduce" and torch.is_grad_enabled() and tensors[0].requires_grad:
        if not tensors[0].is_leaf and f"loss {where}" not in CALLS:
            tensors[0].register_hook(functools.partial(note_reduced_loss, where))
    return result


def note_reduced_loss(where, gradient):
    """A backward goes through a tensor that was all-reduced."""
    if f"loss {where}" not in CALLS:
        CALLS[f"loss {where}"] = True
        note("loss", where, line=where)


def note_open(event, args):
    """A file is opened for writing."""
    if event == "open" and os.getpid() == NOTES["pid"]:
        path, mode, flags = args
        if isinstance(path, (str, bytes)) and flags & (os.O_WRONLY | os.O_RDWR):
            note_written(os.path.abspath(os.fsdecode(path)))


def note_written(path):
    """A file is written: notes it once, unless it is a device, a lock or in a hidden folder."""
    ignored = path.startswith(("/dev/", "/proc/", "/sys/")) or "/." in path
    ignored = ignored or path.endswith(".lock") or path.startswith(os.environ["CHECK_DDP_NOTES"])
    if not ignored and f"wrote {path}" not in CALLS and (where := find_line()):
        CALLS[f"wrote {path}"] = True
        note("wrote", os.path.relpath(path, START), line=where)


def note_saved(original, state, file, *args, **kwargs):
    """torch.save, which opens its file beyond Python's sight."""
    if isinstance(file, (str, os.PathLike)):
        note_written(os.path.abspath(file))
    return original(state, file, *args, **kwargs)


def note_loaded(original, file, *args, **kwargs):
    """torch.load."""
    if isinstance(file, (str, os.PathLike)):
        note("loaded", os.path.relpath(file, START))
    if "CHECK_DDP_CPU" in os.environ:
        kwargs["map_location"] = "cpu"
    return original(file, *args, **kwargs)


def note_end():
    """The script has ended well."""
    for pass_ in list(PASSES):
        end_pass(pass_)
    end_tests()
    for optimizer, number in OPTIMIZERS.items():
        weights = compute_checksums(name_parameters(optimizer))
        note("step", f"{number} end", weights=weights, gradients={}, counts=COUNTS)
    names = [Path(path).read_text() for path in glob.glob("/proc/self/task/*/comm")]
    threads = sum("gloo" in name for name in names)
    note("end", "", initialized=dist.is_initialized(), threads=threads, counts=COUNTS)


COLLECTIVES = (
    "all_reduce reduce broadcast all_gather all_gather_into_tensor all_gather_object gather"
)
COLLECTIVES += " gather_object reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single"
COLLECTIVES += " broadcast_object_list scatter send recv isend irecv batch_isend_irecv barrier"


def start_noting():
    """Puts the functions above into torch."""
    replace(dist, "init_process_group", note_joined)
    replace(DistributedDataParallel, "__init__", note_wrapped)
    replace(DistributedDataParallel, "forward", note_forward)
    nn.modules.module.register_module_forward_pre_hook(note_module)
    register_optimizer_step_pre_hook(note_step)
    register_optimizer_step_post_hook(note_stepped)
    replace(DataLoader, "__iter__", begin_pass)
    # Private since long before torch 2.8: the iterator of a DataLoader, and its next indices.
    for kind in ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
        if hasattr(dataloader, kind):
            replace(getattr(dataloader, kind), "_next_index", note_indices)
            replace(getattr(dataloader, kind), "__next__", note_batch)
    for name in COLLECTIVES.split():
        replace(dist, name, note_collective)
    replace(torch, "save", note_saved)
    replace(torch, "load", note_loaded)
    replace(torch.multiprocessing, "spawn", spawn_noting)
    sys.addaudithook(note_open)


def spawn_noting(original, fn, args=(), nprocs=1, *others, **kwargs):
    """mp.spawn: the processes of the script write notes, too."""
    return original(run_spawned, (fn, args), nprocs, *others, **kwargs)


def run_spawned(i, fn, args):
    """A process of mp.spawn. It imported the script before the functions were replaced."""
    if "CHECK_DDP_CPU" in os.environ:
        pretend_gpus()
    start_noting()
    for name, value in list(vars(sys.modules["__mp_main__"]).items()):
        setattr(sys.modules["__mp_main__"], name, REPLACED.get(id(value), value))
    fn(i, *args)
    note_end()


# Without GPUs the CPU answers.


def note_device(index):
    """A script asks for a GPU."""
    index = CALLS.get("gpu", 0) if index is None else index
    if f"cuda:{index}" not in CALLS:
        CALLS[f"cuda:{index}"] = True
        note("gpu", f"{os.environ.get('CUDA_VISIBLE_DEVICES')} cuda:{index}")


def answer_device(value):
    """Returns the CPU in place of a GPU, and anything else as it is."""
    if isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value):
        value = torch.device(value)
    if isinstance(value, torch.device) and value.type == "cuda":
        note_device(value.index)
        return torch.device("cpu")
    return value


class AnswerByCpu(TorchFunctionMode):
    """Gives every function of torch the CPU where it is given a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.device:
            return function(*args, **kwargs)
        if function is torch.Tensor.cuda:
            answer_device(torch.device("cuda", *args[1:2]) if args[1:2] != (None,) else "cuda")
            return args[0]
        if function is torch.Tensor.pin_memory:
            return args[0]
        if function is torch.Tensor.to and type(args[1:2] and args[1]) is int:
            args = (args[0], torch.device("cuda", args[1]), *args[2:])
        if type(kwargs.get("device")) is int:
            kwargs = kwargs | {"device": torch.device("cuda", kwargs["device"])}
        kwargs = {name: answer_device(value) for name, value in kwargs.items()}
        return function(*map(answer_device, args), **kwargs)


def pretend_gpus():
    """Makes torch tell the script, but not itself, that there are GPUs."""
    number = int(os.environ["CHECK_DDP_CPU"])

    def answer(owner, name, value):
        def answer_script(original, *args, **kwargs):
            asks = sys._getframe(2).f_code.co_filename
            return original(*args, **kwargs) if who_hangs.INSTALLED.search(asks) else value

        replace(owner, name, answer_script)

    def set_device(_, device):
        device = torch.device(device) if isinstance(device, str) else device
        CALLS["gpu"] = getattr(device, "index", device) or 0
        note_device(CALLS["gpu"])

    def move(original, module, *args, **kwargs):
        args = [torch.device("cuda", a) if type(a) is int else a for a in args]
        return original(module, *args, **kwargs)

    def new_group(original, *args, **kwargs):
        return original(*args[:2], **{k: v for k, v in kwargs.items() if k != "backend"})

    for name in ("is_available", "is_bf16_supported"):
        answer(torch.cuda, name, True)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        answer(torch.cuda, name, 0)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        answer(torch.cuda, name, None)
    answer(torch.cuda, "get_device_name", "no GPU")
    answer(torch.cuda, "device_count", number)
    answer(torch.accelerator, "device_count", number)
    answer(torch.accelerator, "is_available", True)
    answer(torch.accelerator, "synchronize", None)
    answer(torch.accelerator, "current_accelerator", torch.device("cuda"))
    answer(dist, "is_nccl_available", True)
    replace(torch.cuda, "current_device", lambda _: CALLS.get("gpu", 0))
    replace(torch.cuda, "device", lambda _, device: contextlib.nullcontext())
    replace(torch.cuda, "set_device", set_device)
    replace(torch.accelerator, "set_device_index", set_device)
    replace(nn.Module, "to", move)
    replace(nn.SyncBatchNorm, "convert_sync_batchnorm", lambda _, module, *__: module)
    replace(dist, "new_group", new_group)
    AnswerByCpu().__enter__()


# The report: each function compares the notes of all ranks, and returns lines.


def read_facts(folder):
    """Returns the notes of each rank: {kind: {key: facts}}."""
    ranks = {}
    for path in sorted(Path(folder).glob("*.facts"), key=lambda path: int(path.stem)):
        ranks[int(path.stem)] = facts = {}
        for line in path.read_text().splitlines():
            fact = json.loads(line)
            facts.setdefault(fact["kind"], {})[fact["key"]] = fact
    return ranks


def pair_facts(ranks, kind):
    """Returns [key, facts of each rank] of the keys that all ranks have."""
    first, *others = (facts.get(kind, {}) for facts in ranks.values())
    return [
        (key, [fact, *(other[key] for other in others)])
        for key, fact in first.items()
        if all(key in other for other in others)
    ]


def name_some(names):
    """classifier.weight and 9 more."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def judge_gpus(ranks):
    asked = [facts.get("gpu", {}) for facts in ranks.values()]
    names = [sorted({key.split()[1] for key in gpus}) for gpus in asked]
    devices = [facts[0]["device"] for _, facts in pair_facts({0: ranks[0]}, "wrapped")][:1]
    for rank, gpus in enumerate(asked):
        if shared := [key for key in gpus if any(key in other for other in asked[:rank])]:
            where = gpus[shared[0]]["where"]
            text = f"rank {rank} asks for {shared[0].split()[1]}, which rank 0 has, too"
            return [("1 own GPU", "NO", text, where, "model.md#torchcudaset_device")]
    if any(names):
        return [("1 own GPU", "ok", " and ".join(", ".join(part) for part in names), "", "")]
    if devices and len(ranks) > 1 and devices[0] != "cpu":
        own = [facts.get("wrapped", {}).get("1", {}) for facts in ranks.values()]
        names = [wrapped.get("device", "") for wrapped in own]
        if len(set(names)) == len(names):
            return [("1 own GPU", "ok", " and ".join(names), "", "")]
        verdict = "NO" if ranks[0]["start"][""]["gpus"] >= len(names) else "?"
        text = f"the ranks have their models on {' and '.join(names)}"
        return [("1 own GPU", verdict, text, own[1]["where"], "model.md#torchcudaset_device")]
    return [("1 own GPU", "ok", "all is on the CPU", "", "")]


def judge_files(ranks):
    lines, several = [], {}
    for rank, facts in ranks.items():
        for path, fact in facts.get("wrote", {}).items():
            several.setdefault(path, []).append((rank, fact["line"]))
    for path, writers in several.items():
        if len(writers) > 1:
            text = f"{who_hangs.name_ranks([rank for rank, _ in writers])} write {path}"
            page = "checkpoints.md#checkpoints"
            lines.append(("3 7 one writes", "NO", text, writers[-1][1], page))
    written = [path for path, w in several.items() if len(w) == 1 and not path.startswith("..")]
    if written and not lines:
        return [("3 7 one writes", "ok", name_some(written), "", "")]
    return lines


def are_same_rows(facts):
    """Whether rows with the same number are the same on all ranks: True, False or None."""
    if facts[0]["stream"]:
        return True
    first, *others = (fact["content"] for fact in facts)
    shared = [row for row in first if all(row in other for other in others)]
    if not shared or len({fact["size"] for fact in facts}) > 1:
        return None if not shared else False
    pairs = [(a, other[row][i]) for other in others for row in shared
             for i, a in enumerate(first[row]) if i < len(other[row])]  # fmt: skip
    equal = sum(a == b for a, b in pairs)
    return True if equal == len(pairs) else None if equal else False


def freeze(rows):
    return [tuple(row) if isinstance(row, list) else row for row in rows]


def judge_shards(ranks):
    lines, key_lines = [], set()
    page = "data.md#distributedsampler-shuffle-and-set_epoch"
    for _, facts in pair_facts(ranks, "pass"):
        rows, where = [freeze(fact["rows"]) for fact in facts], facts[0]["line"]
        if facts[0]["use"] == "test" or where in key_lines or len(rows) < 2 or not all(rows):
            continue
        key_lines.add(where)
        same, size = are_same_rows(facts), facts[0]["size"]
        whole = all(fact["complete"] and len(set(r)) == len(r) for fact, r in zip(facts, rows))
        twice = set(rows[0]) & set(rows[1])
        total = f"{len(set().union(*rows)):,} of {size:,} rows" if size else "rows"
        if facts[0]["stream"]:
            page = "data.md#iterabledataset-by-rank-and-by-worker"
            if any(len(set(r)) < 0.6 * len(r) for r in rows):
                text = "a rank reads its rows several times: does each worker read all?"
                lines.append(("4 own shard", "NO", text, where, page))
                continue
        if rows[0] == rows[1] or (whole and set(rows[0]) == set(rows[1])):
            order = ", in the same order" if rows[0] == rows[1] else ""
            text = f"all ranks draw the same {len(set(rows[0])):,} rows{order}"
            if same is False:
                text = "each rank has a data set of its own"
            verdict = {True: "NO", False: "ok", None: "?"}[same]
        elif len(twice) > max(0.05 * len(rows[0]), 2) and same is not False:
            verdict, text = "?", f"{len(twice):,} rows are drawn by ranks 0 and 1"
            if any(len(set(r)) < len(r) for r in rows):
                verdict, text = "ok", "the ranks draw rows at random, some of them several times"
        elif facts[0]["stream"]:
            verdict, text = "ok", "the ranks read different rows"
        else:
            verdict, text = "ok", f"{total}, each rank has others"
        lines.append(("4 own shard", verdict, text, where, page))
    return lines or judge_inputs(ranks)


def judge_inputs(ranks):
    """Without a loader: what goes into DDP's forward."""
    page = "data.md#distributedsampler-shuffle-and-set_epoch"
    pairs = [(key, facts) for key, facts in pair_facts(ranks, "inputs") if facts[0]["sums"]]
    if len(ranks) < 2 or not pairs:
        return []
    if all(fact["sums"] == facts[0]["sums"] for _, facts in pairs for fact in facts):
        text = "all ranks give the same inputs to the model"
        return [("4 own shard", "NO", text, pairs[0][1][0]["where"], page)]
    return [("4 own shard", "ok", "the ranks give different inputs to the model", "", "")]


def judge_epochs(ranks):
    lines, passes = [], {}
    for fact in ranks[0].get("pass", {}).values():
        if fact["use"] == "train" and not fact["stream"] and len(fact["rows"]) > 1:
            passes.setdefault((fact["line"], fact["size"]), []).append(fact)
    for (where, _), facts in passes.items():
        first, second = (freeze(fact["rows"]) for fact in (facts * 2)[:2])
        shorter = min(len(first), len(second))
        if len(facts) < 2 or shorter < 8:
            lines.append(("4 set_epoch", "?", "one epoch: run two", where, ""))
        elif first[:shorter] != second[:shorter]:
            lines.append(("4 set_epoch", "ok", "the second epoch has another order", "", ""))
        elif first == sorted(first):
            lines.append(("4 set_epoch", "?", "no epoch is shuffled", where, ""))
        else:
            text = "the second epoch draws the rows in the order of the first"
            page = "data.md#distributedsampler-shuffle-and-set_epoch"
            lines.append(("4 set_epoch", "NO", text, where, page))
    return lines


def judge_split(ranks):
    """A row that one rank trains on and another tests."""
    passes = {}
    for rank, facts in ranks.items():
        for fact in facts.get("pass", {}).values():
            if fact["subset"]:
                passes.setdefault(fact["use"], {}).setdefault(rank, fact)
    train, test = passes.get("train", {}), passes.get("test", {})
    for rank, trained in train.items():
        for other, tested in test.items():
            leaked = set(trained["rows"]) & set(tested["rows"])
            own = set(trained["rows"]) & set(test.get(rank, {"rows": []})["rows"])
            if other != rank and leaked and not own and are_same_rows([trained, tested]):
                text = f"rank {other} tests {len(leaked):,} rows on which rank {rank} trains"
                return [("4 split", "NO", text, tested["line"], "data.md#random-seeds")]
    return []


def judge_wrapping(ranks):
    page, pairs = "model.md#equal-weights-on-all-ranks", pair_facts(ranks, "wrapped")
    for _, facts in pairs:
        for what in ("names", "buffers", "frozen"):
            if any(fact[what] != facts[0][what] for fact in facts):
                kind = {"names": "parameters", "buffers": "buffers"}.get(what, "frozen parameters")
                text = f"the ranks have other {kind}, or another order of them"
                return [("5 wrapped model", "NO", text, facts[0]["where"], page)]
    if pairs:
        return [("5 wrapped model", "ok", f"{len(pairs)} with DDP", "", "")]
    return []


def is_close(one, other):
    """Whether two checksums are equal, or their numbers up to rounding."""
    if None in (one, other) or one[0] == other[0]:
        return one == other or None not in (one, other)
    largest = max(map(abs, one[1]))
    return all(abs(a - b) <= 1e-5 * largest for a, b in zip(one[1], other[1], strict=True))


def find_difference(ranks):
    """Returns (facts, "weights" or "gradients", names, count) of the first difference."""
    for _, facts in pair_facts(ranks, "step"):
        for what in ("weights", "gradients"):
            names = set.intersection(*(set(fact[what]) for fact in facts))
            sums = {n: [fact[what][n] for fact in facts] for n in facts[0][what] if n in names}
            other = [n for n, all_ in sums.items() if not all(is_close(all_[0], s) for s in all_)]
            if other:
                return facts, what, other, len(sums)
    return None


def judge_weights(ranks):
    page = "model.md#equal-weights-on-all-ranks"
    pairs = pair_facts(ranks, "step")
    wrapped = ranks[0].get("wrapped", {})
    if len(ranks) < 2 or not any(fact["weights"] for _, facts in pairs for fact in facts):
        return [("5 equal weights", "?", "no step of an optimizer was seen on all ranks", "", "")]
    if not (found := find_difference(ranks)):
        how = "" if wrapped else ", without DDP"
        text = f"equal in all looks at weights and gradients{how}"
        return [("5 equal weights", "ok", text, "", "")]
    facts, what, names, total = found
    kind, *step = facts[0]["key"].split()
    counts, when = facts[0]["counts"], f"step {step[0]}"
    which = f"all {total}" if len(names) == total else f"{len(names)} of {total}"
    text = f"{what} differ in {when}: {which}, {name_some(names)}"
    where = facts[0]["where"]
    if not wrapped:
        text = f"no DDP was built, and {text}"
    elif what == "weights" and step == ["1"]:
        text = f"the weights differ before step 1: {which}, {name_some(names)}"
        loads = [set(r.get("loaded", {})) for r in ranks.values()]
        if any(load != loads[0] for load in loads):
            rank = max(range(len(loads)), key=lambda r: len(loads[r]))
            loaded = next(iter(ranks[rank]["loaded"].values()))
            text += f". Rank {rank} alone loads {loaded['key']}"
            where, page = loaded["where"], "checkpoints.md#checkpoints"
    elif what == "weights":
        rates = [
            f.get("step", {}).get(f"{kind} {step[0]}", {}).get("rates") for f in ranks.values()
        ]
        text += ", after equal gradients"
        if any(rate != rates[0] for rate in rates):
            text += f": the learning rates are {' and '.join(str(r[0]) for r in rates if r)}"
        page = "checkpoints.md#checkpoints"
    elif facts[0]["thawed"]:
        text += ". They were frozen when DDP was built"
        page = "model.md#frozen-layers"
    elif all(name.startswith("no. ") for name in names):
        text += ". They are in no DDP model"
    elif counts.get("no_sync"):
        text += f". {counts['no_sync']} forwards were under no_sync()"
        page = "training.md#gradient-accumulation-with-no_sync"
    elif counts.get("past DDP"):
        text += f". {counts['past DDP']} forwards went past DDP"
        where = facts[0]["calls"]["past DDP"]
    ends = [(k, f) for k, f in pairs if k.endswith("end")]
    if ends and not find_difference({r: {"step": {k: f["step"][k] for k, _ in ends}}
                                     for r, f in ranks.items()}):  # fmt: skip
        return [("5 equal weights", "?", f"{text}. At the end all weights are equal", where, page)]
    return [("5 equal weights", "NO", text, where, page)]


def judge_batch(ranks):
    page = "training.md#learning-rate-and-global-batch-size"
    for fact in list(ranks[0].get("step", {}).values())[:1]:
        each = len(fact["rows"])
        if each and fact["rates"]:
            text = f"{len(ranks)} x {each} rows in step 1, learning rate {fact['rates'][0]:.3g}: "
            text += f"is it meant for {len(ranks) * each}?"
            return [("6 global batch", "?", text, fact["where"], page)]
    return []


def judge_tests(ranks):
    lines, seen = [], set()
    page = "checkpoints.md#exact-evaluation-and-metrics-over-all-ranks"
    for key, facts in pair_facts(ranks, "pass"):
        where, rows = facts[0]["line"], [freeze(fact["rows"]) for fact in facts]
        if any(f["use"] != "test" for f in facts) or where in seen or len(facts) < 2:
            continue
        seen.add(where)
        size, every = facts[0]["size"], set().union(*rows)
        drawn, same = sum(map(len, rows)), are_same_rows(facts)
        if all(set(r) == every for r in rows) and same is not False:
            lines.append(("a test rows", "ok", f"each rank tests all {len(every):,} rows", "", ""))
            continue
        added = [r.get("added", {}).get(key, {}).get("added", True) for r in ranks.values()]
        sharded = facts[0]["sampler"] == "DistributedSampler"
        if not all(added):
            text = f"each rank tests a part, and no collective call adds the parts up: {len(rows[0]):,} rows"
            lines.append(("7 add up", "NO", text, where, page))
        else:
            lines.append(("7 add up", "ok", "a collective call follows the test", "", ""))
        if drawn > len(every) and (same or sharded):
            text = f"{drawn:,} rows are tested, of {size:,}: some twice"
            lines.append(("a test rows", "NO", text, where, page))
        elif drawn > len(every):
            lines.append(("a test rows", "?", "some may be tested twice", where, page))
        elif sharded and size:
            text = f"each once with {len(ranks)} ranks. Where W does not divide {size:,}, "
            text += "DistributedSampler repeats some"
            lines.append(("a test rows", "?", text, where, page))
        else:
            text = f"{len(every):,} of {size:,}, each once" if size else "each once"
            lines.append(("a test rows", "ok", text, "", ""))
    return lines


def judge_draws(ranks):
    pairs = pair_facts(ranks, "draws")
    if len(ranks) < 2 or not pairs:
        return [("b random draws", "?", "no two steps of an epoch were seen", "", "")]
    found = {}
    for _, facts in pairs:
        for name, before in facts[0]["before"].items():
            moved = all(f["before"].get(name) != f["after"].get(name) for f in facts)
            alike = all(f["before"].get(name) == before for f in facts)
            alike &= all(f["after"].get(name) == facts[0]["after"].get(name) for f in facts)
            if moved:
                found.setdefault(name, []).append((alike, facts[0]))
    for name, looks in found.items():
        if all(alike for alike, _ in looks):
            text = f"all ranks draw the same random numbers from {name} in their steps"
            verdict = "NO" if name.startswith("torch") else "?"
            where = looks[0][1]["where"]
            return [("b random draws", verdict, text, where, "data.md#random-seeds")]
    text = "each rank has its own" if found else "no random numbers in a step"
    return [("b random draws", "ok", text, "", "")]


def judge_buffers(ranks):
    pairs = pair_facts(ranks, "tested")
    for _, facts in pairs:
        first = facts[0]["buffers"]
        names = [
            n for n in first if any(not is_close(first[n], f["buffers"].get(n)) for f in facts)
        ]
        if names:
            text = f"the ranks test with different buffers: {name_some(names)}"
            page = "checkpoints.md#who-validates-all-ranks-or-rank-0-alone"
            return [("c buffers", "NO", text, facts[0]["where"], page)]
    if len(ranks) > 1 and any(facts[0]["buffers"] for _, facts in pairs):
        return [("c buffers", "ok", "all ranks test with the same", "", "")]
    return []


def judge_calls(ranks):
    lines = []
    for key, facts in pair_facts(ranks, "call"):
        if len({fact["dtype"] for fact in facts}) > 1 and key.split()[-1] == "1":
            text = f"{facts[0]['name']} of {' and '.join(fact['dtype'] for fact in facts)}"
            page = "troubleshooting.md#which-collective-differs"
            lines.append(("7 collectives", "NO", text, facts[0]["line"], page))
    for fact in ranks[0].get("loss", {}).values():
        text = f"backward goes through all_reduce, which has no gradient: a {len(ranks)}th may come out"
        page = "training.md#contrastive-loss-over-all-ranks"
        lines.append(("5 loss", "?", text, fact["line"], page))
    return lines


def judge_leaving(ranks):
    ends = [facts["end"][""] for facts in ranks.values() if "end" in facts]
    page = "troubleshooting.md#gloo-aborts-python-at-exit"
    if len(ends) < len(ranks):
        return [("8 leave", "?", "a rank did not come to the end of the script", "", "")]
    if any(end["initialized"] for end in ends):
        text = "destroy_process_group() is not called"
        return [("8 leave", "NO", text, "", page)]
    if any(end["threads"] for end in ends) and "CHECK_DDP_CPU" not in os.environ:
        text = f"{ends[0]['threads']} threads of gloo live on: is a DDP model left?"
        return [("8 leave", "?", text, "", page)]
    return [("8 leave", "ok", "the process group is closed", "", "")]


JUDGES = (judge_gpus, judge_files, judge_shards, judge_epochs, judge_split, judge_wrapping)
JUDGES += (judge_weights, judge_calls, judge_batch, judge_tests, judge_draws, judge_buffers)
JUDGES += (judge_leaving,)


def compare_with_one(ranks, one):
    """The gradients of step 1 against those of one process with the same global batch."""
    page, mark = "concepts.md#distributeddataparallel", "6 as one process"
    several, single = (facts.get("step", {}).get("1 1") for facts in (ranks[0], one[0]))
    if not several or not single:
        return [(mark, "?", "one of the two runs has no step", "", "")]
    rows = [row for facts in ranks.values() for row in facts["step"]["1 1"]["rows"]]
    if sorted(map(str, rows)) != sorted(map(str, single["rows"])):
        text = f"step 1 has other rows: {len(rows)}, and {len(single['rows'])} in one process"
        return [(mark, "?", text, "", page)]
    weights, sums = several["weights"], {}
    if any(not is_close(weights[n], single["weights"].get(n)) for n in weights):
        return [
            (mark, "?", "the two runs begin with different weights", "", "data.md#random-seeds")
        ]
    for name, checksum in several["gradients"].items():
        pair = checksum, single["gradients"].get(name)
        for a, b in zip(*(c[1] for c in pair), strict=True) if all(pair) else ():
            for what, product in (("ab", a * b), ("bb", b * b), ("aa", a * a)):
                sums[what] = sums.get(what, 0) + product
    if not sums.get("bb"):
        return [(mark, "?", "no gradients to compare", "", "")]
    ratio = sums["ab"] / sums["bb"]
    alike = sums["ab"] / (sums["aa"] * sums["bb"]) ** 0.5
    text = f"the gradients of step 1 are {ratio:.2f} times those of one process"
    if alike < 0.99:
        norm = any(fact["batch_norm"] for fact in ranks[0].get("wrapped", {}).values())
        text = "the gradients have another direction" + (": BatchNorm alone does that" * norm)
        return [(mark, "?", text, several["where"], page)]
    verdict = "ok" if abs(ratio - 1) < 0.02 else "NO"
    return [(mark, verdict, text, several["where"], page)]


def print_report(ranks, more=()):
    """Prints all lines; returns whether one is NO."""
    if not ranks or not any("joined" in facts for facts in ranks.values()):
        print(
            "\ncheck_ddp: no process joined a process group. Start the script by its launcher, as in"
        )
        print(
            "    torchrun --nproc-per-node 2 scripts/check_ddp.py SCRIPT, then --report who_hangs"
        )
        return False
    steps = ranks[0].get("end", {}).get("", {}).get("counts", {}).get("steps", "?")
    pretended = any("gpu" in facts for facts in ranks.values())
    cpu = ". There is no GPU: the CPU and gloo took the place of GPUs and nccl" if pretended else ""
    print(f"\ncheck_ddp: {len(ranks)} ranks, {steps} steps of optimizers{cpu}")
    lines = [line for judge in JUDGES for line in judge(ranks)] + list(more)
    for mark, verdict, text, where, page in lines:
        print(f"  {mark:<17} {verdict:<3} {text}")
        if verdict != "ok" and (where or page):
            print(" " * 24 + where + "  docs/" * bool(page) + page)
    return any(line[1] == "NO" for line in lines)


def run_script(script, options):
    """Runs the script as Python does, and notes what it does."""
    os.environ.setdefault("CHECK_DDP_NOTES", os.path.abspath("who_hangs"))
    if not torch.cuda.is_available() and "CHECK_DDP_REAL" not in os.environ:
        os.environ.setdefault("CHECK_DDP_CPU", os.environ.get("WORLD_SIZE", "2"))
    number, gpus = os.environ.get("RANK"), torch.accelerator.device_count()
    if number:
        start_notes(int(number), int(os.environ["WORLD_SIZE"]))
    note("start", "", gpus=gpus)
    if "CHECK_DDP_CPU" in os.environ:
        pretend_gpus()
    start_noting()
    sys.argv = [script, *options]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    sys.path.append(HERE)
    left = runpy.run_path(script, run_name="__main__")
    note_end()
    del left


def start_ranks(args, world_size, folder, more=()):
    """Starts the processes; returns their exit status, or the report of a hang."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    spawns = re.search(r"\bspawn\(", Path(args.script).read_text())
    settings = os.environ | {"CHECK_DDP_NOTES": folder, "MASTER_ADDR": "127.0.0.1"}
    settings |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    settings |= {"CHECK_DDP_REAL": ""} if args.cpu else {}
    settings.setdefault("OMP_NUM_THREADS", "1")
    processes = []
    for rank in range(1 if spawns else world_size):
        options = [word.replace("{rank}", str(rank)) for word in [*args.options, *more]]
        names = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "RANK": rank}
        names |= {"LOCAL_RANK": rank, "GROUP_RANK": 0}
        own = {} if spawns else {name: str(value) for name, value in names.items()}
        command = [sys.executable, "-u", __file__, args.script, *options]
        own["CHECK_DDP_RANK"] = "1"
        processes.append(subprocess.Popen(command, env=settings | own, start_new_session=True))
    try:
        return wait_for(processes, folder, args.patience)
    finally:
        for process in processes:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2)


def wait_for(processes, folder, patience):
    """Waits until all have ended, one fails, or a rank waits too long in a collective."""
    failed = None
    while None in (statuses := [process.poll() for process in processes]):
        time.sleep(0.2)
        if any(statuses) and failed is None:
            failed = time.monotonic()
        if failed and time.monotonic() - failed > 10:
            break
        notes = who_hangs.read_notes(folder)
        sound = [
            rank
            for rank, n in notes.items()
            if not who_hangs.describe_problem(n, time.time(), False)
        ]
        _, number = who_hangs.find_hang(notes, sound)
        if number is None:
            waiting_since = time.monotonic()
        elif time.monotonic() - waiting_since > patience - who_hangs.PATIENCE:
            return f"a rank waited for {patience:.0f} s, and was ended:\n{who_hangs.report(notes)}"
    return next((abs(status) for status in statuses if status), 0)


def report_all(status, ranks, more):
    """Prints the report, and why the run was ended; returns the exit status."""
    found = print_report(ranks, more)
    if isinstance(status, str):
        print(f"\ncheck_ddp: {status}")
        return 1
    return status or int(found)


def main():
    if "CHECK_DDP_RANK" in os.environ or "RANK" in os.environ:
        return run_script(sys.argv[1], sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--nproc-per-node", type=int, default=2, help="default: 2")
    add("--against-one", metavar="OPTIONS", type=shlex.split, help="options of one process")
    add("--report", metavar="FOLDER", help="reads notes, and runs nothing")
    add("--patience", type=float, default=60, help="seconds in a collective call; default: 60")
    add("--cpu", action="store_true", help="without GPUs, do not pretend that there are some")
    add("script", nargs="?")
    add("options", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.report:
        return print_report(read_facts(args.report))
    if not args.script:
        parser.error("which script?")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        status = start_ranks(args, args.nproc_per_node, f"{folder}/notes")
        ranks, more = read_facts(f"{folder}/notes"), []
        if args.against_one is not None and not status:
            status = start_ranks(args, 1, f"{folder}/one", args.against_one)
            more = compare_with_one(ranks, read_facts(f"{folder}/one"))
        return report_all(status, ranks, more)


if __name__ == "__main__":
    import check_ddp

    sys.exit(check_ddp.main())
