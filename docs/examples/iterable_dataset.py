"""A stream is split by rank and by worker, and all ranks stop together.

torchrun --standalone --nproc-per-node 2 docs/examples/iterable_dataset.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    """The part of samples (any iterable) that belongs to a rank, divided among its workers."""

    def __init__(self, samples, rank, world_size):
        self.samples, self.rank, self.world_size = samples, rank, world_size

    def __iter__(self):
        worker = get_worker_info()  # None if the loader has no workers.
        workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        part, parts = self.rank * workers + worker_id, self.world_size * workers
        for number, sample in enumerate(self.samples):
            if number % parts == part:
                yield sample


def while_all_have_a_batch(loader, device="cpu"):
    """Yields batches until one rank has no more. All ranks must iterate over it together."""
    batches = iter(loader)
    while True:
        batch = next(batches, None)
        has_batch = torch.tensor(int(batch is not None), device=device)
        dist.all_reduce(has_batch, op=dist.ReduceOp.MIN)  # 0 if a rank has none.
        if has_batch == 0:
            return
        yield batch


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    streams = {"1 mistake": Stream(range(11), 0, 1), "2 split": Stream(range(11), rank, world_size)}
    for name, stream in streams.items():
        loader = DataLoader(stream, batch_size=2, num_workers=2)
        batches = list(loader)
        print(f"rank {rank}: {name}: {len(torch.cat(batches))} samples, {len(batches)} batches")
    print(f"rank {rank}: 3 common: {len(list(while_all_have_a_batch(loader)))} batches")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
