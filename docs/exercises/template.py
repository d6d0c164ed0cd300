"""Twelve exercises about DDP, from easy to hard. Copy the file, fill it in, and ask the judge:

    cp docs/exercises/template.py answers.py
    pytest docs/exercises

Two or three processes have joined a gloo process group on a CPU. All of them call each function
with the same arguments, unless its docstring says otherwise. W is the world size.

The first ten go with the units of the course. The last two are for those who want more, and no page
solves them. They need torch.autograd.Function, whose own documentation shows how to write one.
"""

import torch
import torch.distributed as dist
from torch import nn


def shard(count, epoch):
    """Returns a list of int: the numbers of the images that this rank trains on in this epoch.

    The images have the numbers 0 to count - 1. All ranks get equally many images, and together they
    get every image. If W does not divide count, a few images occur twice, as few as possible. The
    order is random and another one in each epoch. Asked twice, the function answers the same.
    """
    raise NotImplementedError


def evaluate(model, images, labels):
    """Returns (correct, count) as two integers: of all test images, each tested exactly once.

    images: float32 (N, features), labels: int64 (N,), the same on all ranks. Each rank tests its
    part of them, and returns the numbers of all ranks together. model(images) gives logits (N,
    classes). The model comes from the training: its parameters are the same on all ranks. Its
    buffers, such as BatchNorm's statistics, can differ. All ranks test with the buffers of rank 0.
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

    losses: a list of float, this rank's loss of each epoch so far, so the ranks have different
    numbers. What counts is the average over the ranks. The answer is True if its lowest value is
    patience epochs old, or older.
    """
    raise NotImplementedError


def ring_all_reduce(tensor):
    """Makes tensor the sum over all ranks, in place, with no other calls than isend and irecv.

    tensor: float32 (N,) with at least W numbers, and W need not divide N. Each rank sends to the
    next rank alone, and in all at most about 2 (W - 1) / W times the tensor: tensor.tensor_split(W)
    cuts it into W pieces, which are views. isend and irecv return a request, to be waited for.
    dist.batch_isend_irecv is allowed, too.
    """
    raise NotImplementedError


def accumulate(model, batches, loss_function):
    """Leaves in .grad the gradient of a step of several micro-batches; does not step.

    batches: a list of (inputs, targets), equally large, other ones on each rank. The loss of a
    micro-batch is loss_function(model(inputs), targets), an average. What .grad must be is the
    gradient of the average over all micro-batches of all ranks. model is not wrapped, and has no
    gradients yet. Memory holds one micro-batch at a time, so there is a backward for each. Every
    gradient is sent once, however many micro-batches there are.
    """
    raise NotImplementedError


class AverageDuringBackward(nn.Module):
    """Wraps a model as DDP does: while backward computes gradients, it averages those before.

    AverageDuringBackward(model) gives all ranks the parameters and buffers of rank 0. Calling the
    wrapper calls the model. As soon as backward has a gradient, an all_reduce of it starts, and
    backward goes on: Tensor.register_post_accumulate_grad_hook, and async_op=True. After backward
    the training loop calls finish(). When that returns, each .grad is the average over all ranks.
    Some parameters may need no gradient. The wrapper serves many steps.
    """

    def __init__(self, model):
        super().__init__()
        raise NotImplementedError

    def forward(self, *inputs):
        raise NotImplementedError

    def finish(self):
        raise NotImplementedError


class AverageInBuckets(nn.Module):
    """The same as AverageDuringBackward, with one all_reduce for each bucket of gradients.

    From the last of model.parameters() to the first, each parameter that needs a gradient goes into
    the current bucket. A bucket that has bucket_bytes bytes or more is closed, and the next
    parameter begins a new one. The last bucket can be smaller. When all gradients of a bucket are
    ready, one all_reduce of them all starts, while backward goes on.
    """

    def __init__(self, model, bucket_bytes):
        super().__init__()
        raise NotImplementedError

    def forward(self, *inputs):
        raise NotImplementedError

    def finish(self):
        raise NotImplementedError


class ShardedOptimizer:
    """An optimizer that keeps its state, such as the momentum, on one rank for each parameter.

    This is ZeRO-1. parameters: what model.parameters() returns, equal on all ranks.
    self.optimizer is an optimizer_class(…, **options) for the parameters of this rank alone. The
    parameters are shared out fairly by their numbers (numel): each goes to the rank that has the
    fewest so far, and to the lowest of such ranks. When step() is called, the gradients are
    averaged already. After it all ranks have all new weights. zero_grad() clears every gradient.
    """

    def __init__(self, parameters, optimizer_class, **options):
        raise NotImplementedError

    def step(self):
        raise NotImplementedError

    def zero_grad(self):
        raise NotImplementedError


class SyncBatchNorm(torch.autograd.Function):
    """BatchNorm in training, with the mean and the variance over the images of all ranks.

    inputs: float32 (N, features), other ones on each rank, and N differs, too. weight and bias are
    float32 (features,). SyncBatchNorm.apply(inputs, weight, bias, eps) returns what torch's
    nn.functional.batch_norm returns for these images if it gets those of all ranks at once; there
    are no running statistics. backward returns the gradients of the sum of all ranks' losses by
    this rank's inputs, and the gradients of this rank's loss by weight and bias, because DDP
    averages these two later. Each pass makes one collective call.
    """

    @staticmethod
    def forward(context, inputs, weight, bias, eps):
        raise NotImplementedError

    @staticmethod
    def backward(context, gradient):
        raise NotImplementedError


class ShardedLinear(torch.autograd.Function):
    """A linear layer whose weight is split among the ranks, as in FSDP.

    inputs: float32 (N, features), other ones on each rank. The weight is float32 (outputs,
    features), and W divides outputs. shard has this rank's outputs / W rows of it, rank 0 the first
    ones. ShardedLinear.apply(inputs, shard) returns inputs @ weight.T for the whole weight.
    backward returns the gradient of this rank's loss by inputs, and this rank's rows of the
    gradient by the weight, averaged over all ranks' losses. Between the two passes no rank holds
    the whole weight.
    """

    @staticmethod
    def forward(context, inputs, shard):
        raise NotImplementedError

    @staticmethod
    def backward(context, gradient):
        raise NotImplementedError
