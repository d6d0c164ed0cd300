"""Five exercises about DDP. Fill in the functions, and then ask the judge:

    python scripts/exercises.py judge FILE

Two processes have joined a gloo process group. Both call each function with the same arguments,
unless its docstring says otherwise.
"""

import torch
import torch.distributed as dist


def shard(count, epoch):
    """Returns a list: the numbers of the images that this rank trains on in this epoch.

    The images have the numbers 0 to count - 1. All ranks get equally many images, and together they
    get every image. If count cannot be divided, a few images occur twice, as few as possible. The
    order is random and another one in each epoch. Asked twice, the function answers the same.
    """
    raise NotImplementedError


def evaluate(model, images, labels):
    """Returns (correct, count) as two integers: of all test images, each tested exactly once.

    Every rank is given all images and labels, tests its part of them, and returns the numbers of
    all ranks together. model(images) gives logits (N, classes). The model comes from the training:
    its parameters are the same on all ranks. Its buffers, such as BatchNorm's statistics, can
    differ. All ranks test with the buffers of rank 0.
    """
    raise NotImplementedError


def average_gradients(model):
    """Makes the .grad of each parameter the average over all ranks; called after backward().

    A parameter that took no part in the loss has the gradient None, on all ranks. It stays None.
    """
    raise NotImplementedError


def resume(path, model, optimizer):
    """Loads the checkpoint of rank 0; returns the number of epochs finished, the same on all ranks.

    Each rank has a disk of its own. The file that counts is the one on the disk of rank 0. On
    another disk there can be none, or one of an older run. The file has been written by
    torch.save({"model": …, "optimizer": …, "epoch": …}, path), with the two state_dict()s. Without
    a file on rank 0, all ranks return 0 and keep what they have. The optimizer can be new: then it
    has no momentum yet, on any rank.
    """
    raise NotImplementedError


def should_stop(losses, patience):
    """Says after an epoch, with True or False, whether to stop; all ranks say the same.

    losses has this rank's loss of each epoch so far, so the ranks have different numbers. What
    counts is the average over the ranks. The answer is True if its lowest value is patience epochs
    old, or older.
    """
    raise NotImplementedError
