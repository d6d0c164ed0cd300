"""Runs a script and writes down what each rank saw: probe.py FOLDER SCRIPT [OPTIONS]

After every epoch, FOLDER/<rank>-<epoch>.pt has the numbers of the images this rank trained on and
tested on, in order, and its model's state. Images carry their numbers: see tiny_data.py.
"""

import importlib
import os
import sys
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[1]


class Recorded:
    """A loader that remembers the numbers of the images it gave out."""

    def __init__(self, loader):
        self.loader, self.numbers = loader, []

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for images, labels in self.loader:
            self.numbers += (256 * images[:, 0, 0, 0].int() + images[:, 0, 0, 1]).tolist()
            yield images, labels


def watch(script, folder):
    """Wraps the script's train_one_epoch and evaluate."""
    train_one_epoch, evaluate = script.train_one_epoch, script.evaluate
    seen = {}

    def train_and_record(model, loader, optimizer, peak_lr, epoch, *rest):
        recorded = Recorded(loader)
        seed = torch.initial_seed()
        result = train_one_epoch(model, recorded, optimizer, peak_lr, epoch, *rest)
        seen.update(train=recorded.numbers, epoch=epoch + 1, seed=seed)
        return result

    def evaluate_and_record(model, loader, device):
        recorded = Recorded(loader)
        result = evaluate(model, recorded, device)
        seen.update(test=recorded.numbers, state=model.state_dict())
        torch.save(seen, folder / f"{os.environ.get('RANK', 0)}-{seen['epoch']}.pt")
        return result

    script.train_one_epoch, script.evaluate = train_and_record, evaluate_and_record


if __name__ == "__main__":
    folder, name, *options = sys.argv[1:]
    sys.path.insert(0, str(REPO))
    script = importlib.import_module(name.removesuffix(".py"))
    watch(script, Path(folder))
    sys.argv = [name, *options]
    script.main()
