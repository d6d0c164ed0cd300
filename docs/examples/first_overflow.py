"""Which rank, and which module of it, was the first with a number that is not finite.

torchrun --standalone --nproc-per-node 2 docs/examples/first_overflow.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def report_overflows(model, rank):
    """Prints the name of each module of the bare model whose output is inf or nan."""

    def add_hook(module, name):
        def check(module, inputs, output):
            if torch.is_tensor(output) and not output.isfinite().all():  # waits for the GPU
                print(f"rank {rank}: {name} gives {output.dtype} that is not finite", flush=True)

        module.register_forward_hook(check)

    for name, module in model.named_modules():
        if not list(module.children()):
            add_hook(module, name)


def main():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    ddp_model = DistributedDataParallel(model)
    report_overflows(model, rank)
    inputs = torch.full((2, 4), 1e6 if rank == 1 else 1.0)  # float16 ends at 65504.
    with torch.autocast(inputs.device.type, dtype=torch.float16):
        loss = ddp_model(inputs).float().square().mean()
    loss.backward()
    finite = bool(model[0].weight.grad.isfinite().all())
    print(f"rank {rank}: loss finite {bool(loss.isfinite())}, gradient finite {finite}")


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
