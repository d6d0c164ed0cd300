"""k-fold cross-validation: one plain process for each fold, each with a GPU of its own.

python docs/examples/k_fold.py               # all folds, one after the other
python docs/examples/k_fold.py --fold 0      # one of them
"""

import argparse

import torch


def split_fold(count, fold, folds, seed=0):
    """Returns (training indices, test indices) of a fold; every image is tested in one fold."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    is_test = torch.arange(count) % folds == fold
    return order[~is_test], order[is_test]


def train(inputs, targets, fold, folds):
    """Fits a linear model without the images of a fold; returns its mean square error on them."""
    train_set, test_set = split_fold(len(inputs), fold, folds)
    weight = torch.linalg.lstsq(inputs[train_set], targets[train_set]).solution
    return (inputs[test_set] @ weight - targets[test_set]).square().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fold", type=int, help="0, 1 or 2; default: all")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(99, 3, generator=generator)
    targets = inputs.sum(1, keepdim=True) + 0.1 * torch.randn(99, 1, generator=generator)
    for fold in range(3) if args.fold is None else [args.fold]:
        print(f"fold {fold}: error {train(inputs, targets, fold, folds=3):.4f}", flush=True)


main()
