"""FSDP2: each rank keeps a slice of the weights, the gradients and the momentum.

torchrun --standalone --nproc-per-node 2 docs/examples/fsdp2.py
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def shard(model, blocks, device_type):
    """Makes each rank keep a slice of each parameter. Create the optimizer after this call.

    blocks: modules of the model whose weights are gathered together, such as its layers.
    """
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    for module in [*blocks, model]:  # The model comes last, with what is in no block.
        fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)  # torch 2.8: gloo's average is a sum


def gather_checkpoint(model, optimizer):
    """Returns the states of model and optimizer, on rank 0 the whole of them. All ranks call it."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=whole)
    return {"model": model_state, "optimizer": optimizer_state}


def step(model, optimizer, inputs):
    model(inputs).square().mean().backward()
    optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on all ranks: fully_shard sends none
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    plain = copy.deepcopy(model)  # one process with all images, to compare with
    inputs = torch.randn(6, 8)
    shard(model, [model[0], model[2]], "cpu")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    step(model, optimizers[0], inputs[rank::world_size])
    step(plain, optimizers[1], inputs)
    kept = sum(parameter.to_local().numel() for parameter in model.parameters())
    print(f"rank {rank}: keeps {kept} of {sum(p.numel() for p in plain.parameters())} weights")
    state = gather_checkpoint(model, optimizers[0])
    if rank == 0:
        torch.testing.assert_close(state["model"], dict(plain.state_dict()))
        print(f"rank {rank}: the checkpoint has the weights of one process with all images")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
