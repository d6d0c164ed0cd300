"""torch.compile cuts the graph of a DDP model at the buckets.

torchrun --standalone --nproc-per-node 2 docs/examples/compile.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel


class Layers(torch.nn.Sequential):
    """Has its own forward: of a bare Sequential, compile() compiles nothing up to torch 2.13."""

    def forward(self, x):
        return super().forward(x)


def main():
    rank, graphs, counts, norms = dist.get_rank(), [], [], []

    def count(graph, example_inputs):  # in place of the compiler inductor
        graphs.append(graph)
        return graph

    for name, parts in (("one process", 1), ("DDP", 2)):
        torch.manual_seed(0)
        inputs = torch.randn(8, 512)
        compiled = model = Layers(*(torch.nn.Linear(512, 512) for _ in range(4)))
        model.compile(backend=count)  # in place, and before it is wrapped
        if name == "DDP":
            compiled = DistributedDataParallel(model, bucket_cap_mb=1)
        compiled(inputs.chunk(parts)[rank % parts]).square().mean().backward()
        norm = model[0].weight.grad.norm()
        print(f"rank {rank}: {name}, {len(graphs)} graphs, norm of the gradient {norm:.4f}")
        counts.append(len(graphs))
        norms.append(norm)
        graphs.clear()
    assert counts == [1, 4]
    torch.testing.assert_close(*norms)


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
