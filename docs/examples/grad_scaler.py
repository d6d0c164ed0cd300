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
    print(f"rank {rank}, no scaler: gradient {weight.grad.item()}")
    scaler = torch.amp.GradScaler(inputs.device.type)
    for step, size in enumerate((1e-8, 1000 if rank == 1 else 1e-8, 1e-8)):
        scale, before = scaler.get_scale(), weight.item()
        train_step(ddp_model, optimizer, scaler, inputs, lambda logits, s=size: logits.sum() * s)
        gradient, skipped = weight.grad.item(), weight.item() == before
        print(f"rank {rank}, step {step}: scale {scale:.0f}, {gradient:.3g}, skipped: {skipped}")


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
