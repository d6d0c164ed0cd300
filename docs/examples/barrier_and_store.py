"""A barrier, and the store: a table of keys and values that all ranks share.

torchrun --standalone --nproc-per-node 2 docs/examples/barrier_and_store.py
"""

import torch.distributed as dist

store, rank, world_size = next(dist.rendezvous("env://"))
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

if rank == 0:
    store.set("greeting", "hello from rank 0")
print(f"rank {rank}: 1. {store.get('greeting').decode()}")  # get waits until the key is there

store.add("arrived", 1)  # no addition is lost if two ranks add at the same time
dist.barrier()  # now all ranks have added
print(f"rank {rank}: 2. {store.add('arrived', 0)} arrived")
dist.barrier()  # now all have read, and the rank that serves the store may leave
dist.destroy_process_group()
