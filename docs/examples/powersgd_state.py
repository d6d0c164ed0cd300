"""PowerSGD in a checkpoint: what the compression has left out goes on after a resume.

torchrun --standalone --nproc-per-node 2 docs/examples/powersgd_state.py
"""

import io
import logging
import pickle

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group, or Python can abort at exit with gloo
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

TENSORS = ("error_dict", "p_memory_dict", "q_memory_dict")


def take_state(state):
    """Returns numbers and tensors of a PowerSGDState. Save them on each rank: they differ."""
    return {"iter": state.iter} | {name: getattr(state, name) for name in TENSORS}


def restore_state(saved, matrix_rank, start):
    """Returns a PowerSGDState that goes on from what take_state() returned.

    DDP rebuilds its buckets after the first step. The two steps after a resume are therefore not
    compressed, also where the training was past its start already.
    """
    start = max(start, saved["iter"] + 2)
    state = PowerSGDState(None, matrix_rank, start_powerSGD_iter=start)
    for name, value in saved.items():
        setattr(state, name, value)
    return state


def train(model, state, inputs, steps):
    """Trains with PowerSGD."""
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=1000)
    ddp_model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = ddp_model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_and_resume(rank):
    """Saves after six steps, and resumes; prints what was saved and what goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    train(model, state, inputs, steps=6)
    dist.barrier()  # The hook's callbacks have ended on both ranks.
    file = io.BytesIO()
    try:
        torch.save(state, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except pickle.UnpicklingError:
        print(f"rank {rank}: the whole state does not load with weights_only=True")
    file = io.BytesIO()
    torch.save(take_state(state), file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    before = saved["error_dict"][0].clone()  # The training changes the dictionaries of saved.
    state = restore_state(saved, matrix_rank=1, start=2)
    train(model, state, inputs, steps=2)
    unchanged = torch.equal(state.error_dict[0], before)
    assert state.iter == state.start_powerSGD_iter
    print(f"rank {rank}: resumed at step {saved['iter']}, compresses from {state.iter} on")
    print(f"rank {rank}: until then the rest is as it was: {unchanged}")
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    state = restore_state(saved, matrix_rank=1, start=2)
    state.start_powerSGD_iter = 2  # the mistake, which compresses at once
    train(model, state, inputs, steps=2)
    unchanged = torch.equal(state.error_dict[0], before)
    print(f"rank {rank}: mistake, compresses at once, the rest is as it was: {unchanged}")


def main():
    logging.disable(logging.WARNING)  # torch says that the process group is not saved.
    dist.init_process_group("gloo")
    train_and_resume(dist.get_rank())
    dist.barrier()  # When it returns, the hook's callbacks no longer hold the process group.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
