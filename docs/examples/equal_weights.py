"""A check that all ranks still have the same weights.

torchrun --standalone --nproc-per-node 2 docs/examples/equal_weights.py
"""

from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def find_unequal(model):
    """Returns the names of weights and buffers that differ between ranks; all ranks call it."""
    names = []
    for name, tensor in model.state_dict().items():
        of_rank_0 = tensor.clone()
        dist.broadcast(of_rank_0, src=0)
        differs = torch.tensor(int(not tensor.equal(of_rank_0)), device=tensor.device)
        dist.all_reduce(differs, op=dist.ReduceOp.MAX)
        if differs:
            names.append(name)
    return names


def main():
    torch.manual_seed(dist.get_rank())
    encoder = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    model = nn.Sequential(OrderedDict(encoder=encoder, decoder=nn.Linear(2, 2)))
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert find_unequal(model) == []
    ddp_model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
    unequal = find_unequal(model)  # BatchNorm's statistics, which each rank updates alone
    assert unequal == ["encoder.1.running_mean", "encoder.1.running_var"]
    # The mistake: the parts of the model inside have forwards that DDP does not see.
    ddp_model.module.decoder(ddp_model.module.encoder(torch.randn(4, 2))).square().mean().backward()
    optimizer.step()
    unequal = find_unequal(model)
    assert "encoder.0.weight" in unequal and "decoder.weight" in unequal
    if dist.get_rank() == 0:
        print("unequal after a step with ddp_model.module:", unequal)


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
