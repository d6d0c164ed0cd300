"""Where clip_grad_norm_ belongs, with accumulation and with a GradScaler.

torchrun --standalone --nproc-per-node 2 docs/examples/gradient_clipping.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def clip_and_step(ddp_model, optimizer, scaler, max_norm):
    """Clips after the last backward and steps; returns the norm, which is equal on all ranks."""
    scaler.unscale_(optimizer)  # GradScaler(enabled=False) does nothing, for bfloat16 and float32.
    norm = clip_grad_norm_(ddp_model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm


def run(layer, inputs, use_scaler=False, clip_each=False, unscale=True):
    """Makes a step of two micro-batches with DDP; returns the norm and how far a weight moved."""
    ddp_model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(inputs.device.type, enabled=use_scaler)
    optimizer.zero_grad()
    first, last = inputs.chunk(2)
    with ddp_model.no_sync():
        scaler.scale(ddp_model(first).square().mean() / 2).backward()
    if clip_each:  # A mistake: these gradients are not averaged yet.
        clip_grad_norm_(ddp_model.parameters(), max_norm=1.0)
    scaler.scale(ddp_model(last).square().mean() / 2).backward()
    before = layer.weight.detach().clone()
    if unscale:
        norm = clip_and_step(ddp_model, optimizer, scaler, max_norm=1.0)
    else:  # A mistake: scaled gradients are clipped, and then divided by the scale.
        norm = clip_grad_norm_(ddp_model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
    moved = (layer.weight.detach() - before).norm()
    layer.weight.data.copy_(before)
    return f"norm {norm:.2f}, step {moved:.1g}"


def main():
    torch.manual_seed(0)
    rank, inputs = dist.get_rank(), 5 * torch.randn(8, 4)
    layer = torch.nn.Linear(4, 1, bias=False)
    layer(inputs).square().mean().backward()
    part = inputs.chunk(2)[rank]
    lines = [
        f"1 one process: norm {clip_grad_norm_(layer.parameters(), 1.0):.2f}",
        f"2 clip_and_step: {run(layer, part)}",
        f"3 clip_and_step with a scaler: {run(layer, part, use_scaler=True)}",
        f"4 mistake, each micro-batch: {run(layer, part, clip_each=True)}",
        f"5 mistake, no unscale_: {run(layer, part, use_scaler=True, unscale=False)}",
    ]
    one_process, *ways = (line.partition(": ")[2] for line in lines)
    assert [way.startswith(f"{one_process},") for way in ways] == [True, True, False, False]
    assert ways[0] == ways[1] and ways[0].endswith("step 0.1") and ways[3].endswith("step 2e-06")
    if rank == 0:
        print(*lines, sep="\n")


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
