"""Functions that all six scripts share, called directly."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import snmc_dp
import snsc


def test_augment_mirrors_about_half_of_the_images():
    torch.manual_seed(0)
    images = torch.randint(256, (200, 3, 32, 32)).to(torch.uint8)
    mirrored = 0
    for before, after in zip(images, snsc.augment(images), strict=True):
        assert torch.equal(after, before) or torch.equal(after, before.flip(2))
        mirrored += not torch.equal(after, before)
    assert 60 < mirrored < 140


@pytest.mark.parametrize(("dataset", "calls"), [("cifar10", 2), ("mnist", 0)])
def test_training_augments_cifar10_alone(monkeypatch, dataset, calls):
    """Each of its batches, and none of a test. Training begins in training mode, after any test."""
    seen = []
    monkeypatch.setattr(snsc, "augment", lambda images: seen.append(images) or images)
    data = TensorDataset(torch.zeros(4, 1, 28, 28, dtype=torch.uint8), torch.zeros(4).long())
    loader, model = DataLoader(data, 2), snsc.ConvNet().eval()
    args = SimpleNamespace(dataset=dataset, epochs=1, amp=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snsc.train_one_epoch(model, loader, optimizer, 0.1, 0, args, torch.device("cpu"))
    assert model.training
    snsc.evaluate(model, loader, torch.device("cpu"))
    assert len(seen) == calls


def test_data_parallel_trains_the_wrapped_model(monkeypatch):
    """On a CPU the wrapper changes no number, so nothing that is printed shows it."""
    args = SimpleNamespace(dataset="synthetic", data_root=None, batch_size=64, lr=0.1, seed=0)
    args.epochs, args.checkpoint, args.workers, trained = 1, None, 0, []
    monkeypatch.setattr(
        snmc_dp, "train_one_epoch", lambda model, *_: trained.append(model) or (0, 0)
    )
    snmc_dp.train(args, torch.device("cpu"))
    assert isinstance(trained[0], torch.nn.DataParallel)
    weights = [weight for weight in trained[0].parameters() if weight.dim() == 4]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


def test_synthetic_images_are_the_same_everywhere():
    images, labels = snsc.load_split("synthetic", None, train=True).tensors
    assert images.shape == (10_000, 1, 28, 28) and images.dtype == torch.uint8
    assert labels.shape == (10_000,) and labels.dtype == torch.int64
    again, _ = snsc.load_split("synthetic", None, train=True).tensors
    test, _ = snsc.load_split("synthetic", None, train=False).tensors
    assert torch.equal(images, again)
    assert len(test) == 2_000
    assert not torch.equal(images[:2_000], test)
