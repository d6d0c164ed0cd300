"""DDP written by hand in three versions, each of which trains to the weights of DDP.

torchrun --standalone --nproc-per-node 2 docs/examples/by_hand.py
OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 docs/examples/by_hand.py --time
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # not used: troubleshooting.md says why it is here
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class AverageAfterBackward(nn.Module):
    """Averages one gradient after the other, when all of them are there."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in module.state_dict().values():  # All ranks begin with rank 0's weights.
            dist.broadcast(tensor, src=0)

    def forward(self, *inputs):
        for buffer in self.module.buffers():  # such as BatchNorm's running statistics
            dist.broadcast(buffer, src=0)
        return self.module(*inputs)

    def finish(self):
        """Call it after backward() and before step()."""
        for parameter in self.module.parameters():
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


class AverageDuringBackward(AverageAfterBackward):
    """Averages a gradient while backward computes the next ones."""

    def __init__(self, module):
        super().__init__(module)
        self.requests = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.start)

    def start(self, parameter):
        """Backward calls this when the gradient of the parameter is complete."""
        parameter.grad /= dist.get_world_size()
        self.requests.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        while self.requests:
            self.requests.pop().wait()


class AverageInBuckets(AverageAfterBackward):
    """Averages many gradients with one all_reduce, while backward computes the next ones."""

    def __init__(self, module, limit=2**20):
        super().__init__(module)
        self.buckets = [Bucket()]
        for parameter in reversed(list(module.parameters())):  # Backward begins at the last layer.
            if sum(p.nbytes for p in self.buckets[-1].parameters) >= limit:
                self.buckets.append(Bucket())
                limit = 25 * 2**20
            self.buckets[-1].parameters.append(parameter)
            parameter.register_post_accumulate_grad_hook(self.buckets[-1].count)

    def finish(self):
        for bucket in self.buckets:
            bucket.finish()


class Bucket:
    """Some parameters, whose gradients travel together."""

    def __init__(self):
        self.parameters = []
        self.ready = 0  # how many of the gradients are complete

    def count(self, _):
        """Backward calls this for each gradient; the last one starts the all_reduce."""
        self.ready += 1
        if self.ready == len(self.parameters):
            self.ready = 0
            self.tensor = torch.cat([p.grad.flatten() for p in self.parameters])
            self.tensor /= dist.get_world_size()
            self.request = dist.all_reduce(self.tensor, async_op=True)

    def finish(self):
        self.request.wait()
        averages = self.tensor.split([p.numel() for p in self.parameters])
        for parameter, average in zip(self.parameters, averages, strict=True):
            parameter.grad.copy_(average.view_as(parameter))


VERSIONS = [AverageAfterBackward, AverageDuringBackward, AverageInBuckets, DistributedDataParallel]


def train_step(wrapped, optimizer, images):
    """Makes one step; returns the seconds that it took."""
    dist.barrier()  # All ranks begin at the same time.
    started = time.perf_counter()
    optimizer.zero_grad()
    wrapped(images).square().mean().backward()
    if not isinstance(wrapped, DistributedDataParallel):
        wrapped.finish()
    optimizer.step()
    return time.perf_counter() - started


def train(version, **options):
    """Trains ten steps, with other weights and images on each rank; returns weights and buffers."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 4))
    wrapped = version(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(10):
        train_step(wrapped, optimizer, torch.randn(16, 8))
    return model.state_dict()


def prove():
    """Compares each version with DDP. Two ranks must agree to the bit, more up to rounding."""
    expected = train(DistributedDataParallel)
    tolerance = {"rtol": 0, "atol": 0} if dist.get_world_size() == 2 else {}
    for version in VERSIONS[:3]:
        # With 1000 bytes the small model has a bucket for nearly every parameter.
        options = {"limit": 1000} if version is AverageInBuckets else {}
        torch.testing.assert_close(train(version, **options), expected, **tolerance)
        if dist.get_rank() == 0:
            print(f"{version.__name__} trains to the weights of DDP")


def measure(count, size, steps=20):
    """Prints the milliseconds of a step of each version: median, lowest, highest.

    The versions take turns, so that a machine that slows down slows all of them.
    """
    pairs = []
    for version in VERSIONS:
        wrapped = version(nn.Sequential(*(nn.Linear(size, size) for _ in range(count))))
        pairs.append((wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-4)))
    seconds = [[] for _ in pairs]
    for _ in range(steps):
        for row, pair in zip(seconds, pairs, strict=True):
            row.append(train_step(*pair, torch.randn(32, size)))
    if dist.get_rank() == 0:
        print(f"\n{count} layers of {size} x {size}: ms a step, median (lowest to highest)")
        for version, row in zip(VERSIONS, seconds, strict=True):
            row = [1000 * value for value in row[3:]]  # The first ones warm up.
            line = f"{statistics.median(row):6.1f} ({min(row):.1f} to {max(row):.1f})"
            print(f"{version.__name__:24} {line}")


dist.init_process_group("gloo")
if "--time" in sys.argv:
    measure(200, 32)
    measure(4, 1024)
else:
    prove()
dist.destroy_process_group()
