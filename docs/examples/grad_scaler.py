"""float16 with a GradScaler: small gradients survive, and all ranks skip the same steps.

torchrun --standalone --nproc-per-node 2 docs/examples/grad_scaler.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel


def train_step(ddp_model, optimizer, scaler, inputs, compute_loss):
    """Makes a step in float16; scaler is the GradScaler of the whole training."""
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, dtype=torch.float16):
        logits = ddp_model(inputs)
        loss = compute_loss(logits.float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # skips the step if a gradient is inf or nan
    scaler.update()


def main():
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp_model = DistributedDataParallel(torch.nn.Linear(1, 1))
    weight = ddp_model.module.weight
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=1000)
    inputs = torch.ones(1, 1)
    none = torch.amp.GradScaler(inputs.device.type, enabled=False)
    train_step(ddp_model, optimizer, none, inputs, lambda logits: logits.sum() * 1e-8)
    assert weight.grad.item() == 0  # Without a scaler the small gradient is lost.
    scaler = torch.amp.GradScaler(inputs.device.type)
    skipped = []
    for size in (1e-8, 1000 if rank == 1 else 1e-8, 1e-8):  # Only rank 1 overflows in step 1.
        before = weight.item()
        train_step(ddp_model, optimizer, scaler, inputs, lambda logits, s=size: logits.sum() * s)
        skipped.append(weight.item() == before)
    print(f"rank {rank}: skipped {skipped}, scale {scaler.get_scale()}")
    assert skipped == [False, True, False] and scaler.get_scale() == 2**15


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
