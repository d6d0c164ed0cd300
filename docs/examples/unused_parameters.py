"""Parameters that the loss does not use: the error, and two options.

torchrun --standalone --nproc-per-node 2 docs/examples/unused_parameters.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(torch.nn.Module):
    """Uses one of its two heads, so the other gets no gradient."""

    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])

    def forward(self, x, head):
        return self.heads[head](x)


def wrap_with_changing_parts(model):
    """Returns a DDP model for a model that uses other parameters in each step."""
    return DistributedDataParallel(model, find_unused_parameters=True)


def wrap_with_a_fixed_part(model):
    """Returns a DDP model for a model that uses the same parameters in every step."""
    return DistributedDataParallel(model, static_graph=True)


def train(ddp_model, heads):
    """Trains a step with each of the heads; returns what happened."""
    try:
        for head in heads:
            ddp_model(torch.ones(1, 1), head).sum().backward()
        return "trained"
    except RuntimeError as error:
        lines = str(error).splitlines()
        return next((line for line in lines if "Parameters which" in line), lines[0])


def main():
    rank = dist.get_rank()
    default = DistributedDataParallel(TwoHeads())
    print(f"rank {rank}, default: {train(default, (0, 0))}")
    print(f"rank {rank}, find unused: {train(wrap_with_changing_parts(TwoHeads()), (0, 1))}")
    print(f"rank {rank}, static graph: {train(wrap_with_a_fixed_part(TwoHeads()), (0, 0))}")


dist.set_debug_level(dist.DebugLevel.INFO)  # as TORCH_DISTRIBUTED_DEBUG=INFO does
dist.init_process_group("gloo")
main()
dist.destroy_process_group()
