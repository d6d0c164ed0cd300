"""Parameters that the loss does not use: the error, two options, and the messages of static_graph.

torchrun --standalone --nproc-per-node 2 docs/examples/unused_parameters.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(torch.nn.Module):
    """Uses the heads with the given numbers, so another gets no gradient."""

    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])

    def forward(self, x, numbers):
        return sum(self.heads[number](x) for number in numbers)


def train(ddp_model, *steps):
    """Trains steps, each with the heads of these numbers; returns the error, if there is one."""
    try:
        for numbers in steps:
            ddp_model(torch.ones(1, 1), numbers).sum().backward()
        return "trained"
    except RuntimeError as error:
        return str(error)


def main():
    error = train(DistributedDataParallel(TwoHeads()), [0], [0])
    assert error.startswith("Expected to have finished reduction in the prior iteration")
    assert "Parameters which did not receive grad for rank" in error
    changing = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    assert train(changing, [0], [1], [0, 1]) == "trained"
    fixed = DistributedDataParallel(TwoHeads(), static_graph=True)
    assert train(fixed, [0], [0], [0]) == "trained"
    newly_used = train(fixed, [0, 1])
    assert newly_used.startswith("Your training graph has changed in this iteration")
    fixed = DistributedDataParallel(TwoHeads(), static_graph=True)
    unused_now = train(fixed, [0, 1], [0], [0])
    assert "not compatible with static_graph set to True" in unused_now
    print(f"rank {dist.get_rank()}: {error.splitlines()[0]}")


dist.set_debug_level(dist.DebugLevel.INFO)  # as TORCH_DISTRIBUTED_DEBUG=INFO does
dist.init_process_group("gloo")
main()
dist.destroy_process_group()
