"""A loss averaged over tokens: the mean over the tokens of all ranks.

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


def main():
    rank = dist.get_rank()
    torch.manual_seed(0)
    inputs, labels, layer = torch.randn(2, 8, 4), torch.randint(3, (2, 8)), torch.nn.Linear(4, 3)
    labels[0, 2:] = -100  # Rank 0 has 2 tokens and padding, rank 1 has 8 tokens.

    def compute_gradient(loss):
        layer.zero_grad()
        loss.backward()
        return layer.bias.grad[0].item()

    one_process = compute_gradient(F.cross_entropy(layer(inputs.flatten(0, 1)), labels.flatten()))
    ddp_model, inputs, labels = DistributedDataParallel(layer), inputs[rank], labels[rank]
    mistake = compute_gradient(F.cross_entropy(ddp_model(inputs), labels))
    cure = compute_gradient(compute_token_loss(ddp_model(inputs), labels))
    print(f"rank {rank}: {one_process=:.4f} {mistake=:.4f} {cure=:.4f}")
    assert abs(cure - one_process) < 1e-6 < abs(mistake - one_process)


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
