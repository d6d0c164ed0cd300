"""torch.profiler over a few steps: a line for each part, and a file for a trace viewer.

    torchrun --standalone --nproc-per-node 2 docs/examples/profile_step.py

Writes trace/rank0.json and so on. https://ui.perfetto.dev opens them.
"""

import os
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Else the profiler says that there is no GPU.

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group, or Python can abort at exit with gloo
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

WARM_UP, STEPS = 2, 3


def train(profiler):
    """Trains; the steps after the first ones are profiled, and their parts have names."""
    ddp_model = DistributedDataParallel(resnet18(num_classes=10))
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    dataset = TensorDataset(torch.randn(20, 3, 32, 32), torch.randint(10, (20,)))
    batches = iter(DataLoader(dataset, batch_size=4))
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:  # DDP has its final buckets, and all kernels are loaded.
            profiler.start()
        with record_function("next batch"):
            images, labels = next(batches)
        with record_function("forward"):
            loss = F.cross_entropy(ddp_model(images), labels)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
    profiler.stop()


dist.init_process_group("gloo")
profiler = profile()  # of the CPU and, where there is one, of the GPU
train(profiler)
Path("trace").mkdir(exist_ok=True)
profiler.export_chrome_trace(f"trace/rank{dist.get_rank()}.json")
if dist.get_rank() == 0:
    rows = {row.key: row for row in profiler.key_averages()}
    for name in ("next batch", "forward", "backward", "optimizer", "gloo:all_reduce"):
        milliseconds = rows[name].cpu_time_total / 1000 / STEPS
        print(f"{milliseconds:8.2f} ms  {name}, {rows[name].count / STEPS:.0f} a step")
dist.destroy_process_group()
