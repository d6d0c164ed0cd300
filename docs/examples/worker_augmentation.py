"""Workers that draw equal random numbers, and a generator for each worker, rank and epoch.

python docs/examples/worker_augmentation.py
"""

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Shifts(Dataset):
    """Eight images, of which only the random shift (0 to 99) is shown."""

    def __init__(self):
        self.generator = np.random.default_rng(0)  # Each worker gets a copy of this generator.

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return int(self.generator.integers(100))


def seed_worker(worker_id):
    """Gives the data set of this worker a generator of its own; for worker_init_fn."""
    worker = get_worker_info()
    worker.dataset.generator = np.random.default_rng(worker.seed)


def draw(ranks=2, epochs=2, **options):
    """Returns what each worker draws on each rank in each epoch; seeds as in the scripts."""
    drawn = []
    for rank in range(ranks):
        torch.manual_seed(0)  # The same on all ranks, where the loader begins.
        loader = DataLoader(Shifts(), batch_size=4, num_workers=2, **options)
        for epoch in range(epochs):
            torch.manual_seed(2 * epoch + rank)  # Another in each epoch and on each rank.
            drawn += [tuple(batch.tolist()) for batch in loader]  # A batch is of one worker.
    return drawn


if __name__ == "__main__":
    mistake, cure = draw(), draw(worker_init_fn=seed_worker)
    print(f"copied generator {mistake[:2]}, seed_worker {cure[:2]}")
    assert len(set(mistake)) == 1 and len(set(cure)) == len(cure) == 8
    resumed = draw(ranks=1, worker_init_fn=seed_worker, persistent_workers=True)
    assert resumed[2:] != cure[2:4]  # Persistent workers are not seeded again.
