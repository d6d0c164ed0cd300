"""Gradient accumulation: which form is right, and which communicates once.

torchrun --standalone --nproc-per-node 2 docs/examples/gradient_accumulation.py
"""

import contextlib

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def accumulate(ddp_model, micro_batches, compute_loss):
    """Adds up the gradients of micro-batches of equal size, and averages over the ranks once."""
    for number, inputs in enumerate(micro_batches, start=1):
        is_last = number == len(micro_batches)
        with contextlib.nullcontext() if is_last else ddp_model.no_sync():
            loss = compute_loss(ddp_model(inputs)) / len(micro_batches)
            loss.backward()


def only_backward_inside(ddp_model, micro_batches, compute_loss):
    """Right, but slow: DDP has decided in forward that backward communicates."""
    for number, inputs in enumerate(micro_batches, start=1):
        loss = compute_loss(ddp_model(inputs)) / len(micro_batches)
        is_last = number == len(micro_batches)
        with contextlib.nullcontext() if is_last else ddp_model.no_sync():
            loss.backward()


def run(way, layer, images):
    """Returns the gradient's norm on each rank, and the all-reduces of three micro-batches."""
    ddp_model, calls = DistributedDataParallel(layer), []

    def count(process_group, bucket):
        calls.append(bucket)
        return allreduce_hook(process_group, bucket)

    ddp_model.register_comm_hook(state=None, hook=count)
    ddp_model.zero_grad()
    way(ddp_model, images.chunk(3), lambda logits: logits.square().mean())
    norms = [None] * dist.get_world_size()
    dist.all_gather_object(norms, f"{layer.weight.grad.norm():.4f}")
    return norms, len(calls)


def main():
    torch.manual_seed(0)
    rank, layer, images = dist.get_rank(), torch.nn.Linear(4, 1), torch.randn(2, 12, 4)
    layer(images.flatten(0, 1)).square().mean().backward()
    expected, found = f"{layer.weight.grad.norm():.4f}", {}
    if rank == 0:
        print(f"one process, all images at once: {expected}")
    for way in (accumulate, only_backward_inside):
        norms, calls = found[way] = run(way, layer, images[rank])
        if rank == 0:
            print(f"{way.__name__}: rank 0 {norms[0]}, rank 1 {norms[1]}, {calls} all-reduces")
    assert found[accumulate] == ([expected, expected], 1)
    assert found[only_backward_inside] == ([expected, expected], 3)


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
