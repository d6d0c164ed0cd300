"""Accuracy and mIoU over all ranks: each rank counts its own images, and the counts are added.

torchrun --standalone --nproc-per-node 3 docs/examples/exact_metrics.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

CLASSES = 5


def take_own_images(count):
    """The images that this rank tests: rank, rank + W, rank + 2 W and so on, without padding."""
    return range(dist.get_rank(), count, dist.get_world_size())


def count_pixels(labels, predicted, classes, ignored=255):
    """Counts pixels: row is the label, column the prediction; int64 (classes, classes)."""
    counted = labels != ignored  # Many data sets mark pixels without a label so.
    pairs = classes * labels[counted].long() + predicted[counted]
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def mean_iou(matrix):
    """The mean over the classes that occur. A class without a pixel is 0 / 0, and left out."""
    hit = matrix.diag()
    return (hit / (matrix.sum(0) + matrix.sum(1) - hit)).nanmean()


def macro_f1(matrix):
    """The mean of the classes' F1; without .nanmean() one F1 a class."""
    return (2 * matrix.diag() / (matrix.sum(0) + matrix.sum(1))).nanmean()


def make_images():
    """Ten label maps of 8 x 8 pixels, and predictions. Class 4 does not occur."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES - 1, (10, 8, 8), generator=generator)
    guesses = torch.randint(CLASSES - 1, labels.shape, generator=generator)
    wrong = torch.rand(labels.shape, generator=generator) < 0.3
    predicted = torch.where(wrong, guesses, labels)
    labels[:, 0, 0] = 255
    return labels, predicted


def main():
    dist.init_process_group("gloo")
    labels, predicted = make_images()
    own = list(take_own_images(len(labels)))
    matrix = count_pixels(labels[own], predicted[own], CLASSES)
    averaged = mean_iou(matrix)
    dist.all_reduce(matrix)  # Counts, and only then the ratio.
    dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        whole = count_pixels(labels, predicted, CLASSES)
        padded = dist.get_world_size() * len(DistributedSampler(labels))
        accuracy = matrix.diag().sum() / matrix.sum()
        print(f"mIoU {mean_iou(matrix):.4f}, F1 {macro_f1(matrix):.4f}, accuracy {accuracy:.4f}")
        print(f"wrong: the mean of the ranks' mIoU, {averaged:.4f}")
        print(f"wrong: the {padded} images that DistributedSampler takes of {len(labels)}")
        assert matrix.equal(whole) and matrix.sum() == 10 * 63  # a pixel of each image is ignored
        assert averaged != mean_iou(matrix) and not mean_iou(matrix).isnan()
        assert padded == 12 and len(labels) == 10
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
