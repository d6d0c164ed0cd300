"""Functions that all six scripts share, called directly."""

import torch

import snsc


def test_augment_shifts_and_mirrors():
    """Each image comes back shifted by up to 4 pixels, half of them mirrored, black beyond."""
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
    images, labels = snsc.load_split("synthetic", None, train=True).tensors
    assert images.shape == (10_000, 1, 28, 28) and images.dtype == torch.uint8
    assert labels.shape == (10_000,) and labels.dtype == torch.int64
    again, _ = snsc.load_split("synthetic", None, train=True).tensors
    test, _ = snsc.load_split("synthetic", None, train=False).tensors
    assert torch.equal(images, again)
    assert len(test) == 2_000
    assert not torch.equal(images[:2_000], test)
