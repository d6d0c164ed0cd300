"""Join lets a rank without batches take part in the steps of the others; momentum needs more.

torchrun --standalone --nproc-per-node 2 docs/examples/uneven_inputs.py
"""

import io

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.distributed.algorithms.join import Join
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


def train(share_state=False, **options):
    """Returns the weights of both ranks after the steps of two epochs that both make."""
    torch.manual_seed(0)
    ddp_model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    weights = []
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        batches = [torch.ones(2, 1)] * (2 + dist.get_rank())  # two on rank 0, three on rank 1
        with Join([ddp_model], **options):
            for step, inputs in enumerate(batches):
                optimizer.zero_grad()
                (ddp_model(inputs) - 1).square().mean().backward()
                optimizer.step()
                if step < 2:
                    weights.append(round(ddp_model.module.weight.item(), 3))
        if share_state:
            share_optimizer_state(optimizer, len(batches))
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, weights)
    return of_ranks


def main():
    shared, momentum = train(share_state=True), train()
    if dist.get_rank() == 0:
        print(f"{shared=}\n{momentum=}")
    assert shared[0] == shared[1] and momentum[0] != momentum[1]
    assert shared[0][2] == momentum[1][2] != momentum[0][2]  # as with rank 1's momentum
    try:  # With this option all ranks stop with an error when one has no more batches.
        train(throw_on_early_termination=True)
        raise AssertionError("no rank has stopped")
    except RuntimeError as error:
        print(f"rank {dist.get_rank()}: {error}")


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
