"""Another batch size on each rank: shards in that proportion, and a loss with that weight.

torchrun --standalone --nproc-per-node 2 docs/examples/unequal_batch_sizes.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def draw_batches(count, batch_sizes, epoch, seed=0):
    """Returns this rank's batches of an epoch, equally many on all ranks; a batch is a list."""
    generator = torch.Generator().manual_seed(seed + epoch)  # the same on all ranks
    total = sum(batch_sizes)  # batch_sizes has the number of images of each rank in a step.
    order = torch.randperm(count, generator=generator)[: count // total * total]
    return order.view(-1, total).split(batch_sizes, dim=1)[dist.get_rank()].tolist()


def compute_loss(logits, labels, batch_sizes):
    """Mean loss of this rank's images, weighted so that DDP's average is the mean over all."""
    weight = len(labels) * dist.get_world_size() / sum(batch_sizes)
    return F.cross_entropy(logits, labels) * weight


def train_epoch(forward, batches, dataset, loss_function):
    """Trains a new linear model, wrapped by forward, for an epoch; returns one weight as text."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    model = forward(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=5e-4)
    for inputs, labels in DataLoader(dataset, batch_sampler=batches):
        optimizer.zero_grad()
        loss_function(model(inputs), labels).backward()
        optimizer.step()
    return f"{layer.weight[0, 0].item():.4f}"


def main():
    rank, batch_sizes = dist.get_rank(), [None] * dist.get_world_size()
    own = 12 if rank == 0 else 4  # Rank 0 has the faster GPU.
    dist.all_gather_object(batch_sizes, own)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(200, 4, generator=generator)
    dataset = TensorDataset(inputs, inputs[:, :3].argmax(1))

    batches = draw_batches(len(dataset), batch_sizes, epoch=0)
    halves = DataLoader(dataset, own, sampler=DistributedSampler(dataset))
    print(f"rank {rank}: {len(halves)} steps with DistributedSampler, {len(batches)} without")
    assert len(halves) == [9, 25][rank] and len(batches) == 12 and len(batches[0]) == own

    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, batches)
    of_all = [sum(parts, []) for parts in zip(*gathered, strict=True)]  # the global batches
    one_process = train_epoch(lambda layer: layer, of_all, dataset, F.cross_entropy)
    mistake = train_epoch(DistributedDataParallel, batches, dataset, F.cross_entropy)
    cure = train_epoch(
        DistributedDataParallel, batches, dataset, lambda *pair: compute_loss(*pair, batch_sizes)
    )
    print(f"rank {rank}: one process {one_process}, no weight {mistake}, compute_loss {cure}")
    assert cure == one_process != mistake


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
