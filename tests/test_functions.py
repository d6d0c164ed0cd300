"""Functions that all six scripts share, called directly."""

import sys

import pytest
from launch import REPO

sys.path.insert(0, str(REPO))


def test_augment_shifts_and_mirrors():
    """Each image comes back shifted by up to 4 pixels, half of them mirrored, black beyond."""
    import torch

    import snsc

    torch.manual_seed(0)
    images = torch.randint(1, 256, (200, 3, 32, 32)).to(torch.uint8)
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    seen = []
    for before, after in zip(padded, snsc.augment(images), strict=True):
        fits = {
            (top, left, mirrored)
            for top in range(9)
            for left in range(9)
            for mirrored in (False, True)
            if torch.equal(
                after.flip(2) if mirrored else after,
                before[:, top : top + 32, left : left + 32],
            )
        }
        assert len(fits) == 1
        seen += fits
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(9))
    assert 60 < sum(mirrored for _, _, mirrored in seen) < 140


def test_synthetic_images_are_the_same_everywhere():
    import torch

    import snsc

    images, labels = snsc.load_split("synthetic", None, train=True)
    assert images.shape == (10_000, 1, 28, 28) and images.dtype == torch.uint8
    assert labels.shape == (10_000,) and labels.dtype == torch.int64
    again, _ = snsc.load_split("synthetic", None, train=True)
    test, _ = snsc.load_split("synthetic", None, train=False)
    assert torch.equal(images, again)
    assert len(test) == 2_000
    assert not torch.equal(images[:2_000], test)


def test_save_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    """The checkpoint is written beside the old one and then renamed."""
    import torch

    import snsc

    path = tmp_path / "last.pt"
    model = snsc.ConvNet()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    snsc.save_checkpoint(path, "mnist", model, optimizer, scaler, 1)

    def half_written(state, where):
        where.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", half_written)
    with pytest.raises(SystemExit, match="no space left"):
        snsc.save_checkpoint(path, "mnist", model, optimizer, scaler, 2)
    assert snsc.load_checkpoint(path, "mnist", model, optimizer, scaler) == 1
    with pytest.raises(SystemExit, match="it was trained on mnist"):
        snsc.load_checkpoint(path, "synthetic", model, optimizer, scaler)
