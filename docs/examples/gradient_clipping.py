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


def add_gradients(ddp_model, scaler, inputs):
    """Adds up the gradients of two micro-batches."""
    ddp_model.zero_grad()
    first, last = inputs.chunk(2)
    with ddp_model.no_sync():
        scaler.scale(ddp_model(first).square().mean() / 2).backward()
    scaler.scale(ddp_model(last).square().mean() / 2).backward()


def main():
    torch.manual_seed(0)
    inputs, layer = 5 * torch.randn(8, 4), torch.nn.Linear(4, 1, bias=False)
    layer(inputs).square().mean().backward()
    one_process = clip_grad_norm_(layer.parameters(), max_norm=1.0)
    inputs, ddp_model = inputs.chunk(2)[dist.get_rank()], DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    start = layer.weight.detach().clone()
    for enabled in (False, True):
        scaler = torch.amp.GradScaler(inputs.device.type, enabled=enabled)
        layer.weight.data.copy_(start)
        add_gradients(ddp_model, scaler, inputs)
        norm = clip_and_step(ddp_model, optimizer, scaler, max_norm=1.0)
        torch.testing.assert_close(norm, one_process)
        torch.testing.assert_close((layer.weight - start).norm(), torch.tensor(0.1))

    layer.weight.data.copy_(start)
    add_gradients(ddp_model, scaler, inputs)
    clip_grad_norm_(ddp_model.parameters(), max_norm=1.0)  # A mistake: they are still scaled.
    scaler.step(optimizer)
    moved = (layer.weight - start).norm().item()
    print(f"rank {dist.get_rank()}: norm {norm:.2f}, step 0.1, without unscale_ {moved:.1g}")
    assert 1e-6 < moved < 3e-6


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
