"""A run that stops in the middle of an epoch is resumed with the next batch.

torchrun --standalone --nproc-per-node 2 docs/examples/resume_mid_epoch.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


def resume_epoch(dataset, sampler, batch_size, epoch, batches_done):
    """Yields (step, batch) for the batches of an epoch that are left."""
    sampler.set_epoch(epoch)
    batches = list(BatchSampler(sampler, batch_size, drop_last=False))  # lists of image numbers
    loader = DataLoader(dataset, batch_sampler=batches[batches_done:])
    for step, batch in enumerate(loader, start=batches_done):
        # For dropout and augmentation a seed that no other step and rank has, also on the GPU.
        number = epoch * len(batches) + step
        torch.manual_seed(number * dist.get_world_size() + dist.get_rank())
        yield step, batch


def train(state=None, stop_at=None):
    """Returns the sum of the weights after two epochs, or what a checkpoint would hold."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(24, 4))
    ddp_model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1, momentum=0.9)
    first_epoch, batches_done = 0, 0
    if state:
        ddp_model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, batches_done = state["epoch"], state["batches_done"]
    sampler = DistributedSampler(dataset, seed=0)
    for epoch in range(first_epoch, 2):
        for step, (inputs,) in resume_epoch(dataset, sampler, 3, epoch, batches_done):
            optimizer.zero_grad()
            noisy = inputs + torch.randn(inputs.shape)
            (ddp_model(noisy) - 1).square().mean().backward()
            optimizer.step()
            if (epoch, step) == stop_at:
                model = ddp_model.module.state_dict()
                state = {"model": model, "optimizer": optimizer.state_dict()}
                return state | {"epoch": epoch, "batches_done": step + 1}
        batches_done = 0  # The next epoch begins with its first batch.
    return f"{ddp_model.module.weight.sum().item():.6f}"


dist.init_process_group("gloo")
whole, resumed = train(), train(train(stop_at=(1, 1)))
print(f"rank {dist.get_rank()}: whole {whole}, resumed {resumed}")
assert whole == resumed
dist.destroy_process_group()
