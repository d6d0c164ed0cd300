"""Two forwards before one backward, with BatchNorm and with a buffer that backward needs.

torchrun --standalone --nproc-per-node 2 docs/examples/two_forwards.py
"""

import inspect

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def wrap(model):
    """Returns a DDP model whose forward leaves the buffers alone, so it may be called twice."""
    for buffer in model.buffers():  # as the constructor would do without broadcast_buffers=False
        dist.broadcast(buffer, src=0)
    options = inspect.signature(DistributedDataParallel).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
    return DistributedDataParallel(model, **{option: False})


class DivideByLargest(nn.Module):
    """Divides float (N, 1) by the largest number of the batch, which it keeps in a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("largest", torch.ones(1))

    def forward(self, x):
        self.largest = x.max().view(1)  # a new tensor for each batch; backward needs it
        return self.weight * x / self.largest


def compute_gradient(model, batches):
    """Returns the gradient's norm after forwards of all batches and one backward."""
    model.zero_grad()
    try:
        sum(model(batch).square().mean() for batch in batches).backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return None
    return next(model.parameters()).grad.norm().item()


def compare(name, build, batches, expected):
    """Prints the norms without DDP and with wrap, and whether the default is right."""
    torch.manual_seed(0)
    model = build()
    parts = []
    for part in batches:
        compute_gradient(model, part)
        parts.append(next(model.parameters()).grad.clone())
    without = torch.stack(parts).mean(0).norm().item()
    cure = compute_gradient(wrap(model), batches[dist.get_rank()])
    default = compute_gradient(DistributedDataParallel(model), batches[dist.get_rank()])
    if default is None:  # an error, up to torch 2.11: every version prints what the page shows
        assert VERSION < (2, 12)
        verdict = expected
    else:
        verdict = "right" if abs(default - without) < 1e-5 else "wrong"
    if dist.get_rank() == 0:
        print(f"{name}: without DDP {without:.3f}, wrap {cure:.3f}")
        print(f"{name}: the default is {verdict} since torch 2.12")


def main():
    torch.manual_seed(0)
    batches = torch.randn(2, 2, 4, 1).exp()  # Each rank has two batches of four.
    compare(
        "BatchNorm", lambda: nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)), batches, "right"
    )
    compare("DivideByLargest", DivideByLargest, batches, "wrong")


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
