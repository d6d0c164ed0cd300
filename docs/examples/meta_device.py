"""Builds an FSDP2 model that is too large for the memory of one process.

torchrun --standalone --nproc-per-node 2 docs/examples/meta_device.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def allocate(model, device):
    """Gives memory and initial values to a model that was built on the meta device and sharded.

    Raises TypeError for a module with numbers of its own and without reset_parameters().
    """
    model.to_empty(device=device)  # Each rank allocates its own slices, uninitialised.
    torch.manual_seed(dist.get_rank())  # On a CPU each rank draws its slices by itself.
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # knows the shape of the whole weight, and the buffers
        elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            raise TypeError(f"{type(module).__name__} needs a method reset_parameters")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.use_deterministic_algorithms(True)  # Memory that nobody initialises is nan.
    with torch.device("meta"):  # Parameters with a shape and without memory.
        model = nn.Sequential(nn.Linear(100, 300), nn.BatchNorm1d(300), nn.Linear(300, 100))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [*model, model]:
        fully_shard(block, mesh=mesh)
    model.to_empty(device="cpu")
    print(f"rank {rank}: 1. to_empty alone, variance of BatchNorm {model[1].running_var[0]}")
    allocate(model, "cpu")
    print(f"rank {rank}: 2. with allocate, variance of BatchNorm {model[1].running_var[0]}")
    weight = model[0].weight
    slices = weight.full_tensor().chunk(dist.get_world_size())
    assert not torch.equal(slices[0], slices[-1])  # With one seed they would be equal on a CPU.
    nn.init.xavier_normal_(weight)
    print(f"rank {rank}: 3. xavier_normal_, of the weight {weight.full_tensor().std():.3f}")
    nn.init.xavier_normal_(weight.to_local())  # wrong: the slice has fewer rows than the weight
    print(f"rank {rank}: 4. xavier_normal_, of the slice {weight.full_tensor().std():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
