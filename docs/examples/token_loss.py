"""Ranks with other numbers of tokens or images: the mean over those of all ranks, and the batches.

torchrun --standalone --nproc-per-node 2 docs/examples/token_loss.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def compute_token_loss(logits, labels):
    """Loss of logits (N, classes) and labels (N,), where -100 is padding. All ranks call it."""
    tokens = (labels != -100).sum()
    dist.all_reduce(tokens)  # now the tokens of all ranks
    loss_sum = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return loss_sum * dist.get_world_size() / tokens  # DDP will divide by the world size.


def draw_batches(count, batch_sizes, epoch, seed=0):
    """Returns this rank's batches of an epoch, equally many on all ranks; a batch is a list."""
    generator = torch.Generator().manual_seed(seed + epoch)  # the same on all ranks
    total = sum(batch_sizes)  # batch_sizes has the number of images of each rank in a step.
    order = torch.randperm(count, generator=generator)[: count // total * total]
    return order.view(-1, total).split(batch_sizes, dim=1)[dist.get_rank()].tolist()


def main():
    torch.manual_seed(0)
    inputs, labels, layer = torch.randn(200, 4), torch.randint(3, (200,)), torch.nn.Linear(4, 3)
    labels[::3] = -100
    own = draw_batches(len(labels), [12, 4], epoch=0)  # Rank 0 has the faster GPU.
    batches = [None, None]
    dist.all_gather_object(batches, own)
    assert [(len(b), len(b[0])) for b in batches] == [(12, 12), (12, 4)]
    assert len({i for b in batches for batch in b for i in batch}) == 12 * 16

    def compute_gradient(loss):
        layer.zero_grad()
        loss.backward()
        return layer.bias.grad[0].item()

    whole = batches[0][0] + batches[1][0]  # the first global batch
    one_process = compute_gradient(F.cross_entropy(layer(inputs[whole]), labels[whole]))
    ddp_model, inputs, labels = DistributedDataParallel(layer), inputs[own[0]], labels[own[0]]
    mistake = compute_gradient(F.cross_entropy(ddp_model(inputs), labels))
    cure = compute_gradient(compute_token_loss(ddp_model(inputs), labels))
    print(f"rank {dist.get_rank()}: {one_process=:.4f} {mistake=:.4f} {cure=:.4f}")
    assert abs(cure - one_process) < 1e-6 < abs(mistake - one_process)


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
