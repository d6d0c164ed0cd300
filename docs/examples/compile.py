"""torch.compile cuts the graph of a DDP model at the buckets.

torchrun --standalone --nproc-per-node 2 docs/examples/compile.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel


def wrap_compiled(model, backend="inductor", **ddp_options):
    """Compiles the model in place, and then wraps it."""
    model.compile(backend=backend)
    return DistributedDataParallel(model, **ddp_options)


class Net(torch.nn.ModuleList):
    """Layers one after the other."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def main():
    rank, graphs, counts, norms = dist.get_rank(), [], [], []

    def count(graph, example_inputs):  # in place of the compiler inductor
        graphs.append(graph)
        return graph

    for name, parts in (("one process", 1), ("DDP", 2)):
        torch.manual_seed(0)
        inputs, model = torch.randn(8, 512), Net(torch.nn.Linear(512, 512) for _ in range(4))
        if name == "DDP":
            compiled = wrap_compiled(model, backend=count, bucket_cap_mb=1)
        else:
            model.compile(backend=count)
            compiled = model
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
