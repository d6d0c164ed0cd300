"""Accuracy and mIoU from the counts of all ranks; AUC from the predictions of all ranks, in order.

torchrun --standalone --nproc-per-node 3 docs/examples/exact_metrics.py
"""

import torch
import torch.distributed as dist

CLASSES = 5


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


def gather_predictions(local, count):
    """Returns the predictions of all ranks, (count, ...), in the order of the data set.

    local has those of this rank, (n, ...). Sample i is on rank i % W at place i // W.
    """
    world_size = dist.get_world_size()
    longest = -(-count // world_size)  # rounded up
    padded = local.new_zeros(longest, *local.shape[1:])
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded)
    return torch.stack(parts, dim=1).flatten(0, 1)[:count]  # place by place, rank by rank


dist.init_process_group("gloo")
torch.manual_seed(0)
labels = torch.randint(CLASSES - 1, (10, 8, 8))  # ten images; class 4 does not occur
predicted = torch.where(torch.rand(labels.shape) < 0.2, (labels + 1) % 4, labels)
labels[:, 0, 0] = 255
own = list(range(dist.get_rank(), len(labels), dist.get_world_size()))  # each image on one rank
matrix = count_pixels(labels[own], predicted[own], CLASSES)
averaged = mean_iou(matrix)
dist.all_reduce(matrix)  # Counts, and only then the ratio.
dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
if dist.get_rank() == 0:
    accuracy = matrix.diag().sum() / matrix.sum()
    print(f"mIoU {mean_iou(matrix):.4f}, F1 {macro_f1(matrix):.4f}, accuracy {accuracy:.4f}")
    print(f"wrong: the mean of the ranks' mIoU, {averaged:.4f}")
    assert matrix.sum() == 10 * 63  # A pixel of each image is ignored.
    assert matrix.equal(count_pixels(labels, predicted, CLASSES))  # as in one process
    assert averaged != mean_iou(matrix) and not mean_iou(matrix).isnan()
gathered = gather_predictions(predicted[own], len(predicted))
assert gathered.equal(predicted)  # the predictions of one process, in their order
dist.destroy_process_group()
