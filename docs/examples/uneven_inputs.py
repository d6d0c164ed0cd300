"""Join lets a rank without batches take part in the steps of the others; momentum needs more.

torchrun --standalone --nproc-per-node 2 docs/examples/uneven_inputs.py
"""

import io

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def share_optimizer_state(optimizer, steps):
    """Gives all ranks the optimizer state of the rank that made the most steps."""
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, steps)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    content = [file.getvalue()]  # bytes, because a pickled tensor would arrive on the sender's GPU
    dist.broadcast_object_list(content, src=counts.index(max(counts)))
    file = io.BytesIO(content[0])
    optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


def train(share_state=False, zero=False, **options):
    """Returns this rank's weights after each step of two epochs; rank 0 has fewer batches."""
    torch.manual_seed(0)
    ddp_model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    weight, weights = ddp_model.module.weight, []
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1, momentum=0.9)
    joined = [ddp_model]
    if zero:
        sgd = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
        optimizer = ZeroRedundancyOptimizer(ddp_model.parameters(), **sgd)
        joined = [ddp_model, optimizer]
    for _ in range(2):
        batches = [torch.ones(2, 1)] * (2 + dist.get_rank())  # two on rank 0, three on rank 1
        with Join(joined, **options):
            for inputs in batches:
                optimizer.zero_grad()
                (ddp_model(inputs) - 1).square().mean().backward()
                optimizer.step()
                weights.append(round(weight.item(), 3))
        if share_state:
            share_optimizer_state(optimizer, len(batches))
    return weights


def train_by_hand():
    """Returns the weights of one process, where rank 0's gradient is 0 after its last batch."""
    torch.manual_seed(0)
    weight, momentum, weights = torch.nn.Linear(1, 1, bias=False).weight.item(), 0.0, []
    for share in (1, 1, 1 / 2, 1, 1, 1 / 2):
        momentum = 0.9 * momentum + share * 2 * (weight - 1)
        weight -= 0.1 * momentum
        weights.append(round(weight, 3))
    return weights


def main():
    by_hand = train_by_hand()
    if dist.get_rank() == 0:  # It makes no third and no sixth step, but gets the weights of both.
        by_hand = by_hand[:2] + by_hand[3:5]
    shared, momentum, zero = train(share_state=True), train(), train(zero=True)
    print(f"rank {dist.get_rank()}: {by_hand=} {shared=} {momentum=} {zero=}")
    assert shared == by_hand and momentum != by_hand and zero != by_hand
    try:  # With this option all ranks stop with an error when one has no more batches.
        train(throw_on_early_termination=True)
        raise AssertionError("no rank has stopped")
    except RuntimeError as error:
        print(f"rank {dist.get_rank()}: {error}")


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
