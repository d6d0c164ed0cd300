"""On a GPU no rank warns of gradients' strides: imitated on a CPU.

cuDNN gives the gradient of a convolution's weight the layout that its input suggests, and DDP warns
where that is not the layout of the weight (pytorch issue 197517). The imitation does the same.
"""

import pytest
from launch import REPO, run_forked_ranks
from tiny_data import write_cifar10, write_mnist

WARNING = "Grad strides do not match bucket view strides"
PROGRAM = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.nn

sys.path.insert(0, {repo!r})
import mnmc_ddp_env
from torchvision.datasets import cifar

cifar.check_integrity = lambda path, md5=None: True  # The images of the test are others.


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(context, images, weight, bias, module):
        context.save_for_backward(images, weight)
        context.options = [module.stride, module.padding, module.dilation, False, (0, 0), 1]
        return torch.nn.functional.conv2d(images, weight, bias, module.stride, module.padding)

    @staticmethod
    def backward(context, gradient):
        images, weight = context.saved_tensors
        mask = context.needs_input_grad[:3]
        grads = torch.ops.aten.convolution_backward(
            gradient, images, weight, [len(weight)], *context.options, mask
        )
        # As cuDNN asks the input for its layout: an image of one channel is contiguous, unless its
        # strides say channels_last.
        (_, c, h, w), (o, i, y, x) = images.shape, weight.shape
        strides = (i * y * x, y * x, x, 1)
        if images.stride() == (h * w * c, 1, w * c, c):
            strides = (i * y * x, 1, x * i, i)
        copied = torch.empty_strided(weight.shape, strides, dtype=weight.dtype).copy_(grads[1])
        return grads[0], copied, grads[2], None


def forward(module, images):
    tensors = [images, module.weight, module.bias]
    if torch.is_autocast_enabled("cpu"):
        tensors = [None if tensor is None else tensor.bfloat16() for tensor in tensors]
    return Convolution.apply(*tensors, module)


torch.nn.Conv2d.forward = forward
sys.argv = ["mnmc_ddp_env.py", *{options!r}]
mnmc_ddp_env.main()
"""


@pytest.mark.parametrize("amp", ((), ("--amp",)), ids=("fp32", "amp"))
@pytest.mark.parametrize("dataset", ("mnist", "cifar10"))
def test_gradients_have_the_strides_that_ddp_expects(tmp_path, dataset, amp):
    write_mnist(tmp_path / "data", train=64, test=8)
    write_cifar10(tmp_path / "data", per_file=8, test=8)
    options = ["--dataset", dataset, "--data-root", str(tmp_path / "data"), "-e", "1", *amp]
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(repo=str(REPO), options=[*options, "-b", "16"]))
    codes, out, err = run_forked_ranks(path, 2, tmp_path / "run", seconds=120)
    assert codes == [0, 0] and "epoch 1/1" in out, err
    assert WARNING not in err
