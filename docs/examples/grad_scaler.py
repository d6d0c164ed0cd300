"""float16 with a GradScaler: small gradients survive, clipping, and all ranks skip the same steps.

torchrun --standalone --nproc-per-node 2 docs/examples/grad_scaler.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def train_step(ddp_model, optimizer, scaler, inputs, compute_loss, max_norm=1.0):
    """Makes a step in float16; scaler is the GradScaler of the whole training."""
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, dtype=torch.float16):
        logits = ddp_model(inputs)
        loss = compute_loss(logits.float())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # This line and the next are for clipping.
    norm = clip_grad_norm_(ddp_model.parameters(), max_norm)  # the same on all ranks
    scaler.step(optimizer)  # skips the step if a gradient is inf or nan
    scaler.update()
    return norm


def main():
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp_model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    weight = ddp_model.module.weight
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=1000)
    inputs = torch.ones(1, 1)

    def step(scaler, size):
        """Makes a step with a gradient of this size; returns its norm, and how far it went."""
        before = weight.item()
        norm = train_step(ddp_model, optimizer, scaler, inputs, lambda logits: logits.sum() * size)
        return norm.item(), abs(weight.item() - before)

    # Without a scaler the small gradient is lost.
    assert step(torch.amp.GradScaler(inputs.device.type, enabled=False), 1e-8) == (0, 0)
    scaler = torch.amp.GradScaler(inputs.device.type)
    sizes = (1e-8, 1000 if rank == 1 else 1e-8, 1e-8)  # Only rank 1 overflows in step 1.
    skipped = [step(scaler, size)[1] == 0 for size in sizes]
    print(f"rank {rank}: skipped {skipped}, scale {scaler.get_scale()}")
    assert skipped == [False, True, False] and scaler.get_scale() == 2**15
    norm, moved = step(scaler, 1.0 + rank / 2)
    assert norm == 1.25 and round(moved) == 1000  # The average was clipped to 1, times lr.


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
