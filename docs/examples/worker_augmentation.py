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
    """Returns the shifts of each rank in each epoch; the seeds are those of the scripts."""
    drawn = []
    for rank in range(ranks):
        torch.manual_seed(0)  # The same on all ranks, where the loader begins.
        loader = DataLoader(Shifts(), batch_size=4, num_workers=2, **options)
        for epoch in range(epochs):
            torch.manual_seed(2 * epoch + rank)  # Another in each epoch and on each rank.
            drawn.append(torch.cat(list(loader)).tolist())
    return drawn


def main():
    mistake, cure = draw(), draw(worker_init_fn=seed_worker)
    print(f"copied generator {mistake[0]}, seed_worker {cure[0]}")
    # A worker draws four shifts. Four rows, of two ranks and two epochs, have those of two workers.
    workers = [
        [tuple(row[:4]) for row in rows] + [tuple(row[4:]) for row in rows]
        for rows in (mistake, cure)
    ]
    assert len(set(workers[0])) == 1 and len(set(workers[1])) == 8
    resumed = draw(ranks=1, worker_init_fn=seed_worker, persistent_workers=True)
    assert resumed[1] != cure[1]  # Persistent workers are not seeded again in the second epoch.


if __name__ == "__main__":
    main()
