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

This file has four parts: what each rank notes, with the functions note_*; the CPU that stands in
for GPUs; the report, where JUDGES names a function for each mark; and the start of the ranks.
"""

import argparse
import contextlib
import faulthandler
import functools
import glob
import json
import operator
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
import warnings
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import who_hangs

# A process that only starts ranks, or reads their notes, needs no torch.
BY_LAUNCHER = "RANK" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
IS_RANK = "CHECK_DDP_RANK" in os.environ or BY_LAUNCHER
if IS_RANK:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import optimizer as optimizers
    from torch.overrides import TorchFunctionMode
    from torch.utils.data import DataLoader, Subset, dataloader

HERE, START = os.path.dirname(os.path.realpath(__file__)), os.getcwd()
# What a rank remembers of itself.
NOTES = {"pid": None, "early": []}  # its file of notes, and the notes before it has a number
COUNTS, CALLS, REPLACED, DRAWS = Counter(), {}, {}, {}
WRAPPED, OPTIMIZERS = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()
NAMES, FROZEN, TESTED, INSIDE, PASSES, OPENING, TESTS = {}, set(), {}, [], [], [], []
RECENT = {"passes": [], "used": False}  # the loops whose batches the models are called with now


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
    while frame and who_hangs.INSTALLED.search(frame.f_code.co_filename):
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
    COUNTS[name] += 1
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
    if tensor is None or tensor.is_meta:
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


def note_wrapped(original, ddp, *args, **kwargs):
    """DDP is built: the parameters and buffers that it will keep equal."""
    number, module = count("wrapped"), args[0] if args else kwargs["module"]
    names = [name for name, _ in module.named_parameters()]
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    buffers = [name for name, _ in module.named_buffers()]
    device = str(next((p.device for p in module.parameters()), ""))
    batch_norm = any("BatchNorm" in type(part).__name__ for part in module.modules())
    note("wrapped", number, names=names, frozen=frozen, buffers=buffers, device=device,
         batch_norm=batch_norm, init_sync=kwargs.get("init_sync", True))  # fmt: skip
    if "CHECK_DDP_CPU" in os.environ:
        args, kwargs = args[:1], kwargs | {"device_ids": None, "output_device": None}
    original(ddp, *args, **kwargs)
    WRAPPED[module] = number
    prefix = type(module).__name__
    NAMES.update({id(p): f"{prefix}.{name}" for name, p in module.named_parameters()})
    FROZEN.update(f"{prefix}.{name}" for name in frozen)


def note_forward(original, ddp, *inputs, **kwargs):
    """A forward of DDP: its inputs, and whether the backward will average."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        count("forward" if ddp.require_backward_grad_sync else "no_sync")
        number = count(f"inputs {WRAPPED.get(ddp.module)}")
        if is_due(number) and number > 1:
            sums = [(compute_checksum(t) or [0])[0] for t in list_tensors([inputs, kwargs])]
            note("inputs", f"{WRAPPED.get(ddp.module)} {number}", sums=sums)
    INSIDE.append(ddp.module)
    try:
        return original(ddp, *inputs, **kwargs)
    finally:
        INSIDE.pop()


def note_module(module, inputs):
    """A forward of any module: past DDP, or the first of a model that is tested."""
    if torch.compiler.is_compiling() or isinstance(module, DistributedDataParallel):
        return
    trains = torch.is_grad_enabled()
    if next(module.parameters(recurse=False), None) is not None:  # A loss has none.
        RECENT["used"] = True
        for pass_ in RECENT["passes"]:
            pass_["calls"][trains] += 1
    if trains and module in WRAPPED and module not in INSIDE:
        count("past DDP")
        lines = CALLS.setdefault("past DDP", [])
        if len(lines) < 5 and (line := find_line()) not in lines:
            lines.append(line)
    if trains or module.training or not COUNTS["steps"]:
        return
    if TESTED.get("steps") != COUNTS["steps"]:
        TESTED.update(steps=COUNTS["steps"], parts=set())
    name = type(module).__name__
    if id(module) not in TESTED["parts"]:  # else it is a part of a model that was noted
        TESTED["parts"].update(map(id, module.modules()))
        if is_due(count(f"tested {name}")):
            weights = compute_checksums(dict(module.named_parameters()))
            buffers = compute_checksums(dict(module.named_buffers()))
            note("tested", f"{name} {COUNTS['steps']}", weights=weights, buffers=buffers)


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


def name_optimizer(optimizer):
    """Returns a name that is the same on all ranks, also where one has an optimizer more."""
    if optimizer not in OPTIMIZERS:
        first, *others = name_parameters(optimizer) or ["nothing"]
        name = f"{type(optimizer).__name__} of {first} and {len(others)} more"
        OPTIMIZERS[optimizer] = f"{name}, {count(name)}"
    return OPTIMIZERS[optimizer]


def note_step(optimizer, *_):
    """An optimizer is about to step: its weights and gradients, and random draws."""
    name = name_optimizer(optimizer)
    end_tests()
    count("steps")
    if DRAWS and DRAWS["passes"] == COUNTS["passes"]:  # no epoch began meanwhile
        note("draws", DRAWS["key"], before=DRAWS["state"], after=read_generators())
    DRAWS.clear()
    if is_due(step := count(name)):
        named = name_parameters(optimizer)
        gradients = compute_checksums({name: p.grad for name, p in named.items()})
        thawed = sorted(name for name in FROZEN if gradients.get(name))
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        rows = [row for pass_ in PASSES for row in list_delivered(pass_)] if step == 1 else []
        note_weights(name, step, "before", named, gradients=gradients, thawed=thawed, rates=rates,
                     rows=rows, calls=CALLS)  # fmt: skip


def note_stepped(optimizer, *_):
    """An optimizer has stepped: its weights."""
    name = name_optimizer(optimizer)
    if is_due(COUNTS[name]):
        note_weights(name, COUNTS[name], "after", name_parameters(optimizer))
        DRAWS.update(key=COUNTS["steps"], passes=COUNTS["passes"], state=read_generators())


def note_weights(optimizer, step, when, named, **facts):
    """The weights of an optimizer at a step."""
    weights = compute_checksums(named)
    facts = {"gradients": {}, "counts": COUNTS, "optimizer": optimizer} | facts
    note("step", f"{optimizer} {step} {when}", step=step, when=when, weights=weights, **facts)


def begin_pass(original, loader):
    """A loop over a DataLoader begins."""
    for pass_ in [p for p in PASSES if p["loader"]() is loader]:
        end_pass(pass_)
    where, (base, indices) = find_line(), find_base(loader.dataset)
    pass_ = {"where": where, "number": count(f"pass {where}"), "loader": weakref.ref(loader)}
    pass_ |= {"drawn": [], "delivered": 0, "rows": {}, "stream": [], "complete": False}
    pass_ |= {"size": measure_size(loader.dataset), "base": measure_size(base)}
    pass_ |= {"indices": indices, "before": COUNTS.copy(), "calls": Counter()}
    count("passes")
    PASSES.append(pass_)
    OPENING.append(pass_)
    try:
        iterator = original(loader)
    finally:
        OPENING.pop()
    iterator.check_ddp = pass_
    # Private since long before torch 2.8: from this number all workers have their seeds.
    pass_["workers"] = getattr(iterator, "_base_seed", None) if loader.num_workers else None
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
    pass_ = OPENING[-1] if OPENING else getattr(iterator, "check_ddp", None)
    if pass_ is None:  # a loader that makes its iterators itself
        return original(iterator)
    try:
        drawn = original(iterator)
    except StopIteration:
        pass_["complete"] = True
        raise
    rows = drawn.tolist() if hasattr(drawn, "tolist") else drawn
    rows = rows if isinstance(rows, (list, tuple)) else [rows]
    if pass_["indices"] is not None:
        rows = [pass_["indices"][int(row)] for row in rows]
    pass_["drawn"].append([int(row) if hasattr(row, "__index__") else None for row in rows])
    return drawn


def note_batch(original, iterator):
    """A DataLoader delivers a batch: what is in some of its rows, or in all of a stream."""
    pass_ = getattr(iterator, "check_ddp", None)
    if pass_ is None:
        return original(iterator)
    try:
        batch = original(iterator)
    except StopIteration:
        end_pass(pass_)
        raise
    pass_["delivered"] += 1
    RECENT.update(passes=[pass_] if RECENT["used"] else [*RECENT["passes"], pass_], used=False)
    if not pass_["drawn"] or pass_["number"] > 2:
        return batch
    rows = pass_["drawn"][min(pass_["delivered"], len(pass_["drawn"])) - 1]
    tensors = [t for t in list_tensors(batch) if t.ndim and not t.is_sparse]
    if None in rows:  # a stream
        if pass_["delivered"] <= 16:
            for parts in zip(*tensors, strict=False):
                pass_["stream"].append([compute_checksum(part)[0] for part in parts])
        return batch
    tensors = [t for t in tensors if len(t) == len(rows)]
    for i, row in enumerate(rows):
        if tensors and row % ((pass_["base"] or 1) // 64 + 1) == 0:
            pass_["rows"][row] = [compute_checksum(t[i])[0] for t in tensors]
    return batch


def list_delivered(pass_):
    """Returns the rows that a pass has delivered to the script. Workers draw more in advance."""
    return sum(pass_["drawn"][: pass_["delivered"]], [])


def name_use(pass_):
    """Returns what a pass was for: train, test, or "" where one cannot tell."""
    if pass_["calls"][True]:
        return "train" if COUNTS["steps"] > pass_["before"]["steps"] else ""
    return "test" if pass_["calls"][False] else ""


def end_pass(pass_):
    """A loop over a DataLoader has ended, or the script has."""
    if pass_ not in PASSES:
        return
    PASSES.remove(pass_)
    loader, where, number = pass_["loader"](), pass_["where"], pass_["number"]
    use = name_use(pass_)
    if use == "test":
        TESTS.append(pass_)
    if use and (number <= 4 or is_due(number)):
        sampler = "" if loader is None else type(loader.sampler).__name__
        rows = pass_["stream"] or list_delivered(pass_)
        note("pass", f"{where} {number}", use=use, line=where, rows=rows, size=pass_["size"],
             base=pass_["base"], content=pass_["rows"], stream=bool(pass_["stream"]),
             complete=pass_["complete"], sampler=sampler, workers=pass_["workers"],
             subset=pass_["indices"] is not None)  # fmt: skip


def end_tests():
    """Training goes on after a test, or the script ends: were the ranks' counts added up?"""
    for pass_ in [p for p in PASSES if name_use(p) == "test"]:
        end_pass(pass_)
    while TESTS:
        pass_ = TESTS.pop()
        added = COUNTS["sent"] > pass_["before"]["sent"]
        note("added", f"{pass_['where']} {pass_['number']}", added=added)


def note_collective(original, *args, **kwargs):
    """A collective call: who calls it where with which dtype, and is it in the loss?"""
    name, where = original.__name__, find_line()
    if name not in ("barrier", "broadcast"):
        count("sent")
    number = count(f"call {where}")
    tensors = list_tensors([args, kwargs])
    dtype = str(tensors[0].dtype) if tensors else ""
    own = not who_hangs.INSTALLED.search(sys._getframe(2).f_code.co_filename)
    if own and CALLS.get(where) != [name, dtype]:  # A library's calls can be others on each rank.
        CALLS[where] = [name, dtype]
        facts = {"name": name, "dtype": dtype, "line": where, "number": number}
        note("call", f"{where} {number}", **facts)
    if "CHECK_DDP_CPU" in os.environ:
        kwargs.pop("device_ids", None)
        op = kwargs.get("op", args[1] if len(args) > 1 else None)
        if name == "all_reduce" and op == dist.ReduceOp.AVG:  # gloo has no AVG
            tensors[0].detach().div_(dist.get_world_size(kwargs.get("group")))
            args, kwargs = args[:1], kwargs | {"op": dist.ReduceOp.SUM}
    result = original(*args, **kwargs)
    if name == "all_reduce" and torch.is_grad_enabled() and tensors[0].grad_fn:
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
    ignored = path.startswith(("/dev/", "/proc/", "/sys/")) or "/." in path or os.path.isdir(path)
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
    for optimizer, name in OPTIMIZERS.items():
        note_weights(name, COUNTS[name], "end", name_parameters(optimizer))
    threads = 0
    for path in glob.glob("/proc/self/task/*/comm"):
        with contextlib.suppress(OSError):  # A thread can end meanwhile.
            threads += "gloo" in Path(path).read_text()
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
    optimizers.register_optimizer_step_pre_hook(note_step)
    optimizers.register_optimizer_step_post_hook(note_stepped)
    replace(DataLoader, "__iter__", begin_pass)
    # Private since long before torch 2.8: the iterator of a DataLoader, and its next indices.
    for kind in ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
        replace(getattr(dataloader, kind, None), "_next_index", note_indices)
        replace(getattr(dataloader, kind, None), "__next__", note_batch)
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


def answer_by_cpu(function, args, kwargs):
    """Calls a function of torch with the CPU where it was given a GPU."""
    if function is torch.device:
        return function(*args, **kwargs)
    if function is torch.Tensor.cuda:
        device = args[1] if len(args) > 1 else kwargs.get("device")
        device = "cuda" if device is None else device
        answer_device(torch.device("cuda", device) if type(device) is int else device)
        return args[0]
    if function is torch.Tensor.pin_memory:
        return args[0]
    if function is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
        args = (args[0], torch.device("cuda", args[1]), *args[2:])
    if type(kwargs.get("device")) is int:
        kwargs = kwargs | {"device": torch.device("cuda", kwargs["device"])}
    kwargs = {name: answer_device(value) for name, value in kwargs.items()}
    return function(*map(answer_device, args), **kwargs)


def pretend_gpus():
    """Makes torch tell the script, but not itself, that there are GPUs."""
    number = int(os.environ["CHECK_DDP_CPU"])

    class AnswerByCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return answer_by_cpu(function, args, kwargs or {})

    def answer(value, original, *args, **kwargs):
        asks = sys._getframe(2).f_code.co_filename
        return original(*args, **kwargs) if who_hangs.INSTALLED.search(asks) else value

    def set_device(_, device):
        device = torch.device(device) if isinstance(device, str) else device
        CALLS["gpu"] = getattr(device, "index", device) or 0
        note_device(CALLS["gpu"])

    def move(original, module, *args, **kwargs):
        args = [torch.device("cuda", a) if type(a) is int else a for a in args]
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        return original(module, *args, **kwargs)

    def keep_batch_norm(_, module, *__):
        note("batch norm", "")
        return module

    def new_group(original, *args, **kwargs):
        return original(*args[:2], **{k: v for k, v in kwargs.items() if k != "backend"})

    cuda = {"is_available": True, "is_bf16_supported": True, "device_count": number}
    cuda |= dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"))
    cuda |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), 0)
    accelerator = {"is_available": True, "device_count": number, "synchronize": None}
    for owner, answers in (
        (torch.cuda, cuda | {"get_device_name": "no GPU"}),
        (torch.accelerator, accelerator | {"current_accelerator": torch.device("cuda")}),
        (dist, {"is_nccl_available": True}),
    ):
        for name, value in answers.items():
            replace(owner, name, functools.partial(answer, value))
    replace(torch.cuda, "current_device", lambda _: CALLS.get("gpu", 0))
    replace(torch.accelerator, "current_device_index", lambda _: CALLS.get("gpu", 0))
    replace(torch.cuda, "device", lambda _, device: contextlib.nullcontext())
    replace(torch.cuda, "set_device", set_device)
    replace(torch.accelerator, "set_device_index", set_device)
    replace(nn.Module, "to", move)
    replace(nn.SyncBatchNorm, "convert_sync_batchnorm", keep_batch_norm)
    replace(dist, "new_group", new_group)
    for kind in ("Float", "Double", "Half", "Long", "Int", "Byte", "Bool"):
        setattr(torch.cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    AnswerByCpu().__enter__()


# The report. Each judge compares the notes of all ranks and yields lines of it, for the mark that
# it has in JUDGES: a verdict, what was seen and, where a reader wants them, the place and the page.

WEIGHTS = "model.md#equal-weights-on-all-ranks"
SHARDS = "data.md#distributedsampler-shuffle-and-set_epoch"
EXACT = "checkpoints.md#exact-evaluation-and-metrics-over-all-ranks"


def read_facts(folder):
    """Returns the notes of each rank: {kind: {key: fact}}."""
    ranks = {}
    for path in sorted(Path(folder).glob("*.facts"), key=lambda path: int(path.stem)):
        ranks[int(path.stem)] = facts = defaultdict(dict)
        for line in path.read_text().splitlines():
            fact = json.loads(line)
            facts[fact["kind"]][fact["key"]] = fact
    return ranks


def pair_facts(ranks, kind):
    """Returns (key, the ranks' facts) for each key that all ranks have, as rank 0 came to it."""
    facts = [rank[kind] for rank in ranks.values()]
    keys = [key for key in facts[0] if all(key in others for others in facts)]
    return [(key, [others[key] for others in facts]) for key in keys] if len(facts) > 1 else []


def name_some(names):
    """Returns words such as: classifier.weight and 9 more."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def judge_gpus(ranks):
    asked, seen = [rank["gpu"] for rank in ranks.values()], set()  # what we pretended
    for rank, gpus in enumerate(asked):
        for key in sorted(seen.intersection(gpus))[:1]:
            text = f"rank {rank} asks for {key.split()[-1]}, as another rank does"
            yield "NO", text, gpus[key]["where"], "model.md#torchcudaset_device"
            return
        seen.update(gpus)
    if seen:
        devices = [key.split()[-1] for gpus in asked for key in gpus]
        yield "ok", f"the ranks ask for {', '.join(devices)}"
        return
    for _, facts in pair_facts(ranks, "wrapped")[:1]:
        devices = [fact["device"] for fact in facts]
        fine = devices[0] == "cpu" or len(set(devices)) == len(devices)
        verdict = "ok" if fine else "NO" if ranks[0]["start"][""]["gpus"] >= len(devices) else "?"
        text = f"the models are on {' and '.join(dict.fromkeys(devices))}"
        text += ", where nobody needs one" if devices[0] == "cpu" else ""
        yield verdict, text, facts[1]["where"], "model.md#torchcudaset_device"


def judge_joining(ranks):
    backend = next(rank["joined"][""]["backend"] for rank in ranks.values() if rank["joined"])
    yield "ok", f"{len(ranks)} ranks" + (f", backend {backend}" if backend else "")


def judge_files(ranks):
    writers = defaultdict(dict)
    for number, rank in ranks.items():
        for path, fact in rank["wrote"].items():
            writers[path][number] = fact["line"]
    for path, lines in writers.items():
        if len(lines) > 1:
            text = f"{who_hangs.name_ranks(list(lines))} write {path}"
            yield "NO", text, list(lines.values())[-1], "checkpoints.md#checkpoints"
    here = [path for path in writers if not path.startswith("..")]
    if here and all(len(lines) == 1 for lines in writers.values()):
        yield "ok", name_some(here)


def freeze_rows(facts):
    return [[tuple(r) if isinstance(r, list) else r for r in fact["rows"]] for fact in facts]


def are_same_data(facts):
    """Whether rows of equal number have equal content on the ranks: True, False or None."""
    first, *others = (fact["content"] for fact in facts)
    shared = [row for row in first if all(row in other for other in others)]
    if facts[0]["stream"] or not shared:
        return facts[0]["stream"] or None
    pairs = [pair for other in others for row in shared
             for pair in zip(first[row], other[row], strict=False)]  # fmt: skip
    equal = sum(a == b for a, b in pairs)
    return True if equal == len(pairs) else None if equal else False


def judge_shards(ranks):
    """The rows that the ranks draw to train. A data set may be other data on each rank."""
    seen = set()
    for _, facts in pair_facts(ranks, "pass"):
        rows, where, size = freeze_rows(facts), facts[0]["line"], facts[0]["size"]
        if facts[0]["use"] == "train" and where not in seen and all(rows):
            seen.add(where)
            page = "data.md#iterabledataset-by-rank-and-by-worker"
            verdict, text = describe_shards(facts, rows, size)
            yield verdict, text, where, page if facts[0]["stream"] else SHARDS
    if not seen:
        yield from judge_inputs(ranks)


def describe_shards(facts, rows, size):
    """Returns the verdict on the rows of one loop over a loader, and what was seen."""
    same, every, first, second = are_same_data(facts), set().union(*rows), *map(set, rows[:2])
    proof = {True: "NO", None: "?", False: "ok"}[same]
    twice, once = first & second, all(len(set(r)) == len(r) for r in rows)
    many = len(twice) > max(0.05 * len(first), len(rows))  # A sampler repeats a few.
    full = once and all(fact["complete"] for fact in facts)
    sharded = facts[0]["sampler"] == "DistributedSampler"
    total = f"{len(every):,} of {size:,} rows" if size else f"{len(every):,} rows"
    both = f"{len(twice):,} of them by ranks 0 and 1"
    if facts[0]["stream"] and len(first) < 0.6 * len(rows[0]):
        return "NO", "a rank reads its rows several times: does each worker read all of them?"
    if same is False:
        return "ok", "each rank has a data set of its own"
    if rows[0] == rows[1]:
        return proof, f"all ranks draw the same {len(first):,} rows in the same order"
    if full and first == second:
        return proof, f"each rank draws all {len(first):,} rows, instead of a part of its own"
    if full and sharded and many:
        return proof, f"{total} are drawn, {both}"
    if full and size and len(every) < 0.95 * size:
        return "NO" if sharded else "?", f"{total} are drawn" + f", {both}" * many
    if once and many:
        return "?", f"{total} are drawn, {both}"
    return "ok", f"{total}, and each rank has others" if once else "drawn at random"


def judge_inputs(ranks):
    """Where no DataLoader is: what the ranks give to DDP's forward."""
    pairs = [facts for _, facts in pair_facts(ranks, "inputs") if facts[0]["sums"]]
    if not pairs or all(facts[0]["sums"] == pairs[0][0]["sums"] for facts in pairs):
        return  # too few, or inputs that never change
    if all(fact["sums"] == facts[0]["sums"] for facts in pairs for fact in facts):
        yield "NO", "all ranks give the same inputs to the model", pairs[0][0]["where"], SHARDS
    else:
        yield "ok", "the ranks give other inputs to the model"


def judge_epochs(ranks):
    passes = defaultdict(list)
    for fact in ranks[0]["pass"].values():
        if fact["use"] == "train" and not fact["stream"] and len(fact["rows"]) > 8:
            passes[fact["line"], fact["size"]].append(fact["rows"])
    for (where, _), (first, *others) in passes.items():
        second = others[0] if others else []
        length = min(len(first), len(second))
        if length < 8:
            yield "?", "no second epoch was seen", where
        elif first[:length] != second[:length]:
            yield "ok", "the second epoch has another order"
        elif first == sorted(first):
            yield "?", "the rows are not shuffled", where, SHARDS
        else:
            yield "NO", "the second epoch draws the rows in the order of the first", where, SHARDS


def judge_split(ranks):
    """Rows that one rank trains on and another tests, while no rank tests what it trains on."""
    found = {"train": {}, "test": {}}
    for number, rank in ranks.items():
        for fact in rank["pass"].values():
            if fact["subset"]:
                found[fact["use"]].setdefault(number, fact)
    for number, train in found["train"].items():
        for other, test in found["test"].items():
            rows, own = set(train["rows"]), found["test"].get(number, train)["rows"]
            leaked = rows.intersection(test["rows"])
            same = train["base"] == test["base"] and are_same_data([train, test])
            if number != other and leaked and same and rows.isdisjoint(own):
                text = f"rank {other} tests {len(leaked):,} rows that rank {number} trains on"
                yield "NO", text, test["line"], "data.md#random-seeds"
                return


def judge_wrapping(ranks):
    pairs = pair_facts(ranks, "wrapped")
    for _, facts in pairs:
        for key, what in (("names", "parameters"), ("buffers", "buffers"), ("frozen", "frozen")):
            if any(fact[key] != facts[0][key] for fact in facts):
                text = f"the ranks have other {what}, or another order of them"
                yield "NO", text, facts[0]["where"], WEIGHTS
                return
    if pairs:
        yield "ok", f"{len(pairs)} with DDP: equal names in equal order"


def is_close(one, other):
    """Whether two checksums are equal, or their numbers up to rounding."""
    if not one or not other or one[0] == other[0]:
        return one == other
    largest = max(map(abs, one[1]), default=0)
    return all(abs(a - b) <= 1e-5 * largest for a, b in zip(one[1], other[1], strict=True))


def list_different(facts, what):
    """Returns the names of the tensors that differ, and the number of all."""
    first = facts[0][what]
    names = [name for name in first if all(name in fact[what] for fact in facts)]
    return [n for n in names if not all(is_close(first[n], f[what][n]) for f in facts)], len(names)


def judge_weights(ranks):
    """The first difference of weights or gradients tells the cause."""
    pairs, wrapped = pair_facts(ranks, "step"), ranks[0]["wrapped"]
    if not any(list_different(facts, "weights")[1] for _, facts in pairs):
        yield "?", "no optimizer with the same weights stepped on all ranks"
        return
    looks = [(key, facts, what) for key, facts in pairs for what in ("weights", "gradients")]
    different = [look for look in looks if list_different(look[1], look[2])[0]]
    if not different:
        counts = pairs[-1][1][0]["counts"]
        if wrapped and not counts.get("forward") and counts.get("past DDP"):
            text = f"equal, but all {counts['past DDP']} forwards went past DDP"
            yield "?", text, pairs[0][1][0]["where"], WEIGHTS
        else:
            yield "ok", "weights and gradients are equal" + ("" if wrapped else ", without DDP")
        return
    key, facts, what = different[0]
    step, when = facts[0]["step"], facts[0]["when"]
    if step > 1 and list_different(facts, "gradients")[0]:
        what = "gradients"  # The weights differ because of those between two looks.
    names, total = list_different(facts, what)
    text = f"{what} differ {when if what == 'weights' else 'in'} step {step}: "
    text += f"{'all' if len(names) == total else f'{len(names)} of'} {total}, {name_some(names)}"
    cause = explain_weights if what == "weights" else explain_gradients
    more, where, page = cause(ranks, key, facts[0], names)
    ends = {key for key, _ in pairs if key.endswith("end")}
    if ends and ends.isdisjoint(key for key, _, _ in different):
        yield "?", f"{text}{more}. At the end the weights are equal", where, page
    else:
        yield "NO", text + more, where, page


def explain_weights(ranks, key, fact, names):
    """Returns why weights differ that are the first to differ, the place and the page."""
    where = fact["where"]
    if fact["step"] == 1 and fact["when"] == "before":
        alone = [number for number, rank in ranks.items() if rank["loaded"]]
        if not ranks[0]["wrapped"]:
            return ". No DDP was built", where, WEIGHTS
        if 0 < len(alone) < len(ranks):
            path, load = next(iter(ranks[alone[0]]["loaded"].items()))
            text = f". Rank {alone[0]} alone loads {path}"
            return text, load["where"], "checkpoints.md#checkpoints"
        return "", where, WEIGHTS
    before = key.replace("after", "before")
    rates = [rank["step"].get(before, {}).get("rates", [0])[0] for rank in ranks.values()]
    if len(set(rates)) > 1:
        text = f". The learning rates are {' and '.join(f'{rate:.3g}' for rate in rates)}"
        page = "training.md#learning-rate-scheduler-onecyclelr-and-reducelronplateau"
        return f", after equal gradients{text}", where, page
    other = ": the optimizers have other options or another state" * (fact["when"] == "after")
    return f", after equal gradients{other}", where, "checkpoints.md#checkpoints"


def explain_gradients(ranks, key, fact, names):
    """Returns why gradients differ that are the first to differ, the place and the page."""
    counts, where = fact["counts"], fact["where"]
    if not ranks[0]["wrapped"]:
        return ". No DDP was built", where, WEIGHTS
    if fact["thawed"]:
        return ". They were frozen when DDP was built", where, "model.md#frozen-layers"
    if all(name.startswith("no. ") for name in names):
        return ". No DDP has them", where, WEIGHTS
    if counts.get("no_sync"):
        page = "training.md#gradient-accumulation-with-no_sync"
        return f". Forwards under no_sync(): {counts['no_sync']}", where, page
    if counts.get("past DDP"):
        where = ", ".join(fact["calls"]["past DDP"])
        return f". Forwards past DDP: {counts['past DDP']}", where, WEIGHTS
    return "", where, WEIGHTS


def find_call(rank, line, number):
    """Returns what a rank called at a line for that time. It notes only what changes."""
    earlier = [fact for fact in rank["call"].values() if fact["line"] == line]
    return [fact for fact in earlier if fact["number"] <= number][-1:]


def judge_calls(ranks):
    for fact in [fact for rank in ranks.values() for fact in rank["call"].values()]:
        line, number = fact["line"], fact["number"]
        calls = sum((find_call(rank, line, number) for rank in ranks.values()), [])
        kinds = {call["dtype"] for call in calls if call["name"] == fact["name"]}
        if len(kinds) > 1:
            text = f"{fact['name']} has {' and '.join(sorted(kinds))} in call {number}"
            yield "NO", text, line, "troubleshooting.md#which-collective-differs"
            return


def judge_loss(ranks):
    for fact in ranks[0]["loss"].values():
        text = "backward goes through all_reduce, which has no gradient: see --against-one"
        yield "?", text, fact["line"], "training.md#contrastive-loss-over-all-ranks"


def judge_batch(ranks):
    for fact in list(ranks[0]["step"].values())[:1]:
        if fact["rows"] and fact["rates"]:
            rows, rate = len(fact["rows"]), fact["rates"][0]
            text = f"{len(ranks)} x {rows} rows and a learning rate of {rate:.3g} in step 1: "
            text += f"is it meant for {len(ranks) * rows}?"
            yield "?", text, fact["where"], "training.md#learning-rate-and-global-batch-size"


def pair_tests(ranks):
    """Yields (key, facts, the rows of each rank) once for each line that tests."""
    seen = set()
    for key, fact in ranks[0]["pass"].items():
        facts = [rank["pass"][key] for rank in ranks.values() if key in rank["pass"]]
        if all(f["use"] == "test" for f in facts) and (fact["line"], fact["size"]) not in seen:
            seen.add((fact["line"], fact["size"]))
            rows = freeze_rows(facts)
            if any(rows):
                yield key, facts, rows


def judge_sums(ranks):
    """Where each rank tests a part: are the parts added up?"""
    tests, parts = list(pair_tests(ranks)), False
    for key, facts, rows in tests:
        added = [rank["added"].get(key, {"added": True})["added"] for rank in ranks.values()]
        if all(set(r) == set(rows[0]) for r in rows):
            continue
        parts = True
        if not all(added):
            text = "each rank tests a part, and no collective call adds the parts up"
            yield "NO", text, facts[0]["line"], EXACT
            return
    if parts:
        yield "ok", "after a test there is a collective call"
    elif not tests:
        yield "?", "no model was seen to test the rows of a loader: compare the metrics yourself"


def judge_tests(ranks):
    """A loader used without gradients: each row once."""
    for _, facts, rows in pair_tests(ranks):
        every, drawn, fact = set().union(*rows), sum(map(len, rows)), facts[0]
        where, size, sharded = fact["line"], fact["size"], fact["sampler"] == "DistributedSampler"
        total = f"{len(every):,} of {size:,} rows" if size else f"{len(every):,} rows"
        if all(set(r) == every for r in rows):
            who = "rank 0 alone tests" if len(facts) < len(ranks) else "each rank tests"
            part = fact["complete"] and size and len(every) < size
            yield "?" if part else "ok", f"{who} {total}", where, EXACT
        elif drawn > len(every) and (are_same_data(facts) or sharded):
            yield "NO", f"{total} are tested, {drawn:,} with doubles", where, EXACT
        elif sharded and size:
            text = f"{total}, each once. DistributedSampler repeats some with other world sizes"
            yield "?", text, where, EXACT
        else:
            yield "ok", f"{total}, each once"


def judge_draws(ranks):
    pairs, found = pair_facts(ranks, "draws"), defaultdict(list)
    trains = [facts for _, facts in pair_facts(ranks, "pass") if facts[0]["use"] == "train"]
    for _, facts in pairs:
        for name in facts[0]["before"]:
            states = {(fact["before"].get(name), fact["after"].get(name)) for fact in facts}
            if all(before != after for before, after in states):
                found[name].append(facts[0]["where"] if len(states) == 1 else "")
    # Once is enough: later ranks can drift apart, as where rank 0 alone makes a sample.
    for name, places in found.items():
        if any(places):
            text = f"all ranks draw the same random numbers from {name} in a step"
            bad = name.startswith("torch") and trains
            text += "" if bad else ": does each take a part of its own?"
            yield "NO" if bad else "?", text, next(filter(None, places)), "data.md#random-seeds"
            return
    seeds = [{fact["workers"] for fact in facts} for facts in trains]
    for facts in [f for f, s in zip(trains, seeds, strict=True) if len(s) == 1 and None not in s]:
        text = "the workers of all ranks have one seed, and draw the same numbers if they draw any"
        yield "?", text, facts[0]["line"], "data.md#equal-augmentation-in-workers"
        return
    text = "each rank draws its own numbers" if found else "no random numbers in a step"
    text += ", and its workers have a seed of their own" if any(len(s) > 1 for s in seeds) else ""
    yield ("ok", text) if pairs else ("?", "no two steps of an epoch were seen")


def judge_tested_models(ranks):
    pairs = pair_facts(ranks, "tested")
    for key, facts in pairs:
        for what in ("weights", "buffers"):
            if names := list_different(facts, what)[0]:
                text = f"the ranks test with other {what}: {key.split()[0]}.{name_some(names)}"
                page = "checkpoints.md#who-validates-all-ranks-or-rank-0-alone"
                yield "NO", text, facts[0]["where"], page
                return
    if pairs:
        yield "ok", "the ranks test with equal weights and buffers"


def judge_leaving(ranks):
    page = "troubleshooting.md#gloo-aborts-python-at-exit"
    ends = [rank["end"][""] for rank in ranks.values() if rank["end"]]
    if len(ends) < len(ranks):
        yield "?", "a rank did not come to the end of the script"
    elif any(end["initialized"] for end in ends):
        yield "NO", "destroy_process_group() is not called", "", page
    elif any(end["threads"] for end in ends):
        yield "?", "threads of gloo live on: is a DDP model left in the script?", "", page
    else:
        yield "ok", "the process group is closed"


def judge_torch(ranks):
    if "_next_index" in ranks[0]["absent"]:
        yield "?", "this torch hides which rows a loader draws"


JUDGES = {
    "1 own GPU": judge_gpus,
    "2 joined": judge_joining,
    "3 one writes": judge_files,
    "4 own shard": judge_shards,
    "4 set_epoch": judge_epochs,
    "4 split": judge_split,
    "4 a rows": judge_torch,
    "5 wrapped model": judge_wrapping,
    "5 equal weights": judge_weights,
    "5 loss": judge_loss,
    "6 global batch": judge_batch,
    "7 collectives": judge_calls,
    "7 add up": judge_sums,
    "8 leave": judge_leaving,
    "a test rows": judge_tests,
    "c random draws": judge_draws,
    "d tested model": judge_tested_models,
}


def compare_with_one(ranks, one):
    """The gradients of step 1 against those of one process with the same global batch."""
    page = "convert.md#compare-one-process-with-two"
    runs = [*ranks.values(), one.get(0, {"step": {}})]
    steps = [next(iter(rank["step"].values()), None) for rank in runs]
    if not all(steps):
        return "?", "one of the runs has no step"
    *several, single = steps
    where, rows = several[0]["where"], [row for fact in several for row in fact["rows"]]
    if sorted(map(str, rows)) != sorted(map(str, single["rows"])):
        text = f"step 1 has other rows: {len(rows)}, and {len(single['rows'])} in one process"
        return "?", text, "", page
    if list_different([several[0], single], "weights")[0]:
        return "?", "the two runs begin with other weights", "", "data.md#random-seeds"
    a, b = [], []  # the gradients in several processes and in one: some numbers of each tensor
    for name, checksum in several[0]["gradients"].items():
        if checksum and single["gradients"].get(name):
            a, b = a + checksum[1], b + single["gradients"][name][1]
    ab, aa, bb = (sum(map(operator.mul, *pair)) for pair in ((a, b), (a, a), (b, b)))
    if not bb:
        return "?", "there are no gradients to compare", "", page
    text = f"the gradients of step 1 are {ab / bb:.2f} times those of one process"
    if ab < 0.98 * (aa * bb) ** 0.5:
        text += ", in another direction: by draws, BatchNorm or a loss that does not split?"
        return "?", text, where, page
    rates = [f"{rate:.3g}" for step in (several[0], single) for rate in step["rates"][:1]]
    if len(set(rates)) > 1:
        text += f". The learning rate is {rates[0]}, and {rates[1]} in one process"
    equal = abs(ab / bb - 1) < 0.05
    return "NO" if not equal else "?" if len(set(rates)) > 1 else "ok", text, where, page


def print_report(ranks, more=None):
    """Prints the lines; returns whether one is NO."""
    joined = [rank["joined"][""] for rank in ranks.values() if rank["joined"]]
    if not joined:
        print("\ncheck_ddp: no process was seen in init_process_group. Use the script's launcher:")
        print("LAUNCHER check_ddp.py SCRIPT OPTIONS, then check_ddp.py --report who_hangs")
        return False
    if len(ranks) < joined[0]["world_size"] or 0 not in ranks:
        print(f"\ncheck_ddp: notes of {len(ranks)} ranks, out of {joined[0]['world_size']}")
        return False
    steps = ranks[0]["end"].get("", {}).get("counts", {}).get("steps", "?")
    print(f"\ncheck_ddp: {len(ranks)} ranks, {steps} steps of optimizers")
    if any(rank["gpu"] for rank in ranks.values()):
        sync = ", and BatchNorm for SyncBatchNorm" if ranks[0]["batch norm"] else ""
        print(f"  No GPU is here: the CPU stands in for GPUs, and gloo for nccl{sync}.")
        if not all(rank["end"] for rank in ranks.values()):
            print("  Where the script fails because of that, try --cpu.")
    lines = [(mark, *line) for mark, judge in JUDGES.items() for line in judge(ranks)]
    if more:
        lines.append(("6 as one process", *more))
    if more and more[0] == "ok":  # The question is answered.
        lines = [line for line in lines if line[0] != "6 global batch"]
    for mark, verdict, text, *rest in lines:
        print(f"  {mark:<16} {verdict:<2}  {text}")
        if verdict != "ok" and any(rest):
            where, page = (*rest, "")[:2]
            print(f"{'':>23}{where}{'  -> docs/' * bool(page)}{page}")
    return any(verdict == "NO" for _, verdict, *_ in lines)


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
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no acc")
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    sys.path.append(HERE)
    left = None
    try:
        left = runpy.run_path(script, run_name="__main__")  # its variables, such as a DDP model
    except SystemExit as leaving:
        if leaving.code:
            raise
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
    """Waits for the end; returns the exit status, or what hangs."""
    seconds, after, waits, status = 0, 0, 0, 0  # until now, after a failure, in a collective
    while None in (statuses := [process.poll() for process in processes]) and after < 10:
        time.sleep(0.2)
        status = status or next(filter(None, statuses), 0)  # that of the first that failed
        seconds, after = round(seconds + 0.2, 1), after + 0.2 * bool(status)
        if seconds % 5 == 0:  # Ranks write as often where they are.
            notes = who_hangs.read_notes(folder)
            sound = [r for r in notes if not who_hangs.describe_problem(notes[r], time.time(), 0)]
            waits = 0 if who_hangs.find_hang(notes, sound)[1] is None else waits + 5
            if waits > patience - who_hangs.PATIENCE:
                return (
                    f"ended, because a rank waited for {patience:.0f} s\n{who_hangs.report(notes)}"
                )
    return abs(status or next(filter(None, statuses), 0))


def report_all(status, ranks, more):
    """Prints the report, and why the run was ended; returns the exit status."""
    found = print_report(ranks, more)
    if isinstance(status, str):
        print(f"\ncheck_ddp: {status}")
        return 1
    return status or int(found)


def main():
    if IS_RANK:
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
    for number in (signal.SIGINT, signal.SIGTERM):  # start_ranks() then ends all processes.
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        status = start_ranks(args, args.nproc_per_node, f"{folder}/notes")
        ranks, more = read_facts(f"{folder}/notes"), None
        if args.against_one is not None and not status:
            status = start_ranks(args, 1, f"{folder}/one", args.against_one)
            more = compare_with_one(ranks, read_facts(f"{folder}/one"))
        return report_all(status, ranks, more)


if __name__ == "__main__":
    import check_ddp

    sys.exit(check_ddp.main())
