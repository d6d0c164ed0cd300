"""The exponential moving average (EMA) of the weights, on every rank.

torchrun --standalone --nproc-per-node 2 docs/examples/ema.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def build_ema(model, decay=0.999):
    """Returns the averaged model; model is the bare one, not the wrapper."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=False)


def train_step(ddp_model, optimizer, ema, inputs, compute_loss):
    """Updates the weights and their average. All ranks call it."""
    optimizer.zero_grad()
    compute_loss(ddp_model(inputs)).backward()
    optimizer.step()
    ema.update_parameters(ddp_model.module)  # after the step; it communicates nothing


def main():
    torch.manual_seed(0)
    ddp_model = DistributedDataParallel(torch.nn.Linear(4, 1))
    bias = ddp_model.module.bias
    ema, expected = build_ema(ddp_model.module, decay=0.9), None
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    for _ in range(20):
        inputs = torch.randn(4, 4) + dist.get_rank()
        train_step(ddp_model, optimizer, ema, inputs, lambda outputs: outputs.square().mean())
        expected = bias.item() if expected is None else 0.9 * expected + 0.1 * bias.item()
    averages = [None, None]
    dist.all_gather_object(averages, ema.module.bias.item())
    print(f"rank {dist.get_rank()}: bias {bias.item():.4f}, averages {averages}")
    assert averages[0] == averages[1] and abs(averages[0] - expected) < 1e-6


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
