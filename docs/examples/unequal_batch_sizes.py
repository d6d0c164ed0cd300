"""Another batch size on each rank: shards in that proportion, and a loss with that weight.

torchrun --standalone --nproc-per-node 2 docs/examples/unequal_batch_sizes.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


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


def main():
    rank, batch_sizes = dist.get_rank(), [None] * dist.get_world_size()
    own = 12 if rank == 0 else 4  # Rank 0 has the faster GPU.
    dist.all_gather_object(batch_sizes, own)
    torch.manual_seed(0)
    inputs, labels = torch.randn(200, 4), torch.randint(3, (200,))
    batches = draw_batches(len(labels), batch_sizes, epoch=0)
    assert len(batches) == 12 and all(len(batch) == own for batch in batches)

    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, batches)
    whole = gathered[0][0] + gathered[1][0]  # the first global batch
    layer = torch.nn.Linear(4, 3)
    F.cross_entropy(layer(inputs[whole]), labels[whole]).backward()
    one_process = layer.bias.grad.clone()
    ddp_model = DistributedDataParallel(layer)
    loader = DataLoader(TensorDataset(inputs, labels), batch_sampler=batches)
    inputs, labels = next(iter(loader))
    ddp_model.zero_grad()
    compute_loss(ddp_model(inputs), labels, batch_sizes).backward()
    print(f"rank {rank}: {len(labels)} images, gradient {layer.bias.grad.tolist()}")
    torch.testing.assert_close(layer.bias.grad, one_process)


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
