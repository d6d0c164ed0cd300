"""Regression from a CSV file with a small MLP: mnmc_ddp_env.py in short, for another task.

    torchrun --standalone --nproc-per-node 2 docs/examples/regression_csv.py [FILE]

FILE has a line of names, and below it rows of numbers. The last column is predicted. Without FILE,
each rank makes the same rows. What changed for the task is how the data are loaded, the model, the
loss, and evaluate with the line that is printed.
"""

import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group, or Python can abort at exit with gloo
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load_splits(path):
    """Returns the training set and the test set, and the unit of the target.

    Every fifth row is for the test. An example is its inputs, float32 (C,), and its target (1,).
    """
    rows = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32))
    is_test = torch.arange(len(rows)) % 5 == 0
    mean, std = rows[~is_test].mean(0), rows[~is_test].std(0)  # of the training rows, for both
    rows = (rows - mean) / std
    splits = [TensorDataset(r[:, :-1], r[:, -1:]) for r in (rows[~is_test], rows[is_test])]
    return *splits, std[-1].item()


def build_model(columns):
    """Returns an untrained model: float inputs (N, columns) to float targets (N, 1)."""
    return nn.Sequential(nn.Linear(columns, 64), nn.ReLU(), nn.Linear(64, 1))


@torch.inference_mode()
def evaluate(model, loader, device):
    """Tests the bare model; returns (sum of squared errors, examples) of all ranks."""
    totals = torch.zeros(2, device=device)  # float, where the scripts count whole images
    for inputs, targets in loader:
        totals[0] += (model(inputs.to(device)) - targets.to(device)).square().sum()
        totals[1] += len(targets)
    dist.all_reduce(totals)
    return totals.tolist()


def train(path, device, epochs=5, batch_size=32):
    """Trains, and returns the root of the mean squared error of the test rows, in their unit."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set, unit = load_splits(path)
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size, sampler=train_sampler, num_workers=2)
    test_loader = DataLoader(test_set, 1000, sampler=range(rank, len(test_set), world_size))
    torch.manual_seed(0)
    model = build_model(len(train_set[0][0])).to(device)
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * world_size, momentum=0.9)
    for epoch in range(epochs):
        train_sampler.set_epoch(epoch)
        for inputs, targets in train_loader:
            loss = F.mse_loss(ddp_model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        squares, count = evaluate(model, test_loader, device)
        rmse = unit * (squares / count) ** 0.5
        if rank == 0:
            print(f"epoch {epoch + 1}/{epochs} | test rmse {rmse:.3f}")
    return rmse


def main():
    dist.init_process_group("gloo")  # on GPUs "nccl", and device_id as in mnmc_ddp_env.py
    device = torch.device("cpu")
    if len(sys.argv) > 1:
        train(sys.argv[1], device)
    else:
        inputs = np.random.default_rng(0).uniform(-1, 1, (2000, 3))
        targets = 10 * inputs[:, 0] * inputs[:, 1] + 5 * inputs[:, 2]
        with tempfile.NamedTemporaryFile() as file:
            table = np.column_stack([inputs, targets])
            np.savetxt(file.name, table, delimiter=",", header="a,b,c,target", comments="")
            assert train(file.name, device) < 1  # The target has a standard deviation of 4.4.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
