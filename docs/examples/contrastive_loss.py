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


def gather_without_factor(own):
    """A mistake: as above without the hook, so that DDP makes the tower's gradients 1/W."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach())
    parts[dist.get_rank()] = own
    return torch.cat(parts)


def run(model, pairs, gather, factor=1):
    """Returns the gradients' norms after a backward: of the tower and of the temperature."""
    model.zero_grad()
    images, texts, temperature = model(*pairs)
    (factor * compute_loss(gather(images), gather(texts), temperature)).backward()
    norms = {name.split(".")[-1]: p.grad.norm() for name, p in model.named_parameters()}
    return "tower {weight:.3f}, temperature {temperature:.3f}".format(**norms)


def main():
    torch.manual_seed(0)
    model, pairs = TwoTowers(), torch.randn(2, 2, 16, 8)  # rank, image or text, pair
    one_process = run(model, pairs.transpose(0, 1).flatten(1, 2), lambda own: own)
    ddp_model, pairs = DistributedDataParallel(model), pairs[dist.get_rank()]
    assert run(ddp_model, pairs, gather_embeddings) == one_process
    no_factor = run(ddp_model, pairs, gather_without_factor)
    on_the_loss = run(ddp_model, pairs, gather_without_factor, factor=2)
    if dist.get_rank() == 0:
        print(f"one process: {one_process}\nno factor: {no_factor}\nloss times 2: {on_the_loss}")
    tower, temperature = one_process.split(", ")
    assert tower not in no_factor and temperature in no_factor
    assert tower in on_the_loss and temperature not in on_the_loss


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
