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
    loader = DataLoader(Stream(range(11), rank, world_size), batch_size=2, num_workers=2)
    own = torch.cat(list(loader)).tolist()
    parts = [None] * world_size
    dist.all_gather_object(parts, own)
    assert sorted(sum(parts, [])) == list(range(11))  # each sample on one worker of one rank
    common = len(list(while_all_have_a_batch(loader)))
    print(f"rank {rank}: samples {own}, {len(list(loader))} batches, of which all use {common}")
    assert common == 3 and len(list(loader)) == [4, 3][rank]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
