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
    """Returns the names of weights and buffers that differ between ranks; all ranks call it.

    A name at another place differs, too, because DDP goes by the place, and not by the name.
    """
    state, order = model.state_dict(), [list(model.state_dict())]
    dist.broadcast_object_list(order, src=0)  # the names in the order of rank 0
    names = []
    for name, own_name in zip(order[0], state, strict=True):
        of_rank_0 = state[name].clone()
        dist.broadcast(of_rank_0, src=0)
        equal = name == own_name and state[name].equal(of_rank_0)
        differs = torch.tensor(int(not equal), device=of_rank_0.device)
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
    # Another mistake, as of a loop over a set: each rank registers its buffers in another order.
    model = nn.Linear(2, 2)
    for name in ("mean", "scale") if dist.get_rank() == 0 else ("scale", "mean"):
        model.register_buffer(name, torch.ones(2) if name == "scale" else torch.zeros(2))
    DistributedDataParallel(model)  # The constructor copies rank 0's mean into rank 1's scale.
    assert model.scale.sum() == (2 if dist.get_rank() == 0 else 0)
    assert find_unequal(model) == ["mean", "scale"]
    if dist.get_rank() == 0:
        print("unequal after a step with ddp_model.module:", unequal)


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
