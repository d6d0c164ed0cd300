"""A contrastive loss whose negatives are those of all ranks, with the right gradient.

torchrun --standalone --nproc-per-node 2 docs/examples/contrastive_loss.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def gather_embeddings(own):
    """Returns the embeddings (N, D) of all ranks as (W * N, D); N must be equal on all ranks."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach())  # These copies have no gradient.
    live = own.clone()  # This rank's own rows have one.
    if live.requires_grad:  # not under torch.no_grad()
        live.register_hook(lambda gradient: gradient * len(parts))  # DDP will divide by W.
    parts[dist.get_rank()] = live
    return torch.cat(parts)


class TwoTowers(nn.Module):
    """Returns the embeddings of images and texts, both float (N, 8), and the temperature."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Linear(8, 4)
        self.temperature = nn.Parameter(torch.tensor(0.1))

    def forward(self, images, texts):
        both = self.tower(torch.cat([images, texts]))
        return *F.normalize(both).chunk(2), self.temperature


def compute_loss(images, texts, temperature):
    """Loss of embeddings (N, D), where row i of images belongs to row i of texts."""
    logits = images @ texts.T / temperature
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def run(model, pairs, gather):
    """Returns the gradients' norms after a backward: of the tower and of the temperature."""
    model.zero_grad()
    images, texts, temperature = model(*pairs)
    compute_loss(gather(images), gather(texts), temperature).backward()
    return [f"{name} {p.grad.norm():.3f}" for name, p in model.named_parameters()]


def main():
    torch.manual_seed(0)
    model, pairs = TwoTowers(), torch.randn(2, 2, 16, 8)  # rank, image or text, pair
    one_process = run(model, pairs.transpose(0, 1).flatten(1, 2), lambda own: own)
    ddp_model = DistributedDataParallel(model)
    found = run(ddp_model, pairs[dist.get_rank()], gather_embeddings)
    print(f"rank {dist.get_rank()}: {found}")
    assert found == [f"module.{line}" for line in one_process]
    assert gather_embeddings(torch.ones(1, 4)).tolist() == [[1] * 4] * 2  # without a gradient


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
