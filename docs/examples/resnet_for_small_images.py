"""torchvision's ResNet-18 with a stem for small images, such as CIFAR-10's 32 x 32 pixels.

python docs/examples/resnet_for_small_images.py
"""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet18


def use_small_stem(model):
    """Replaces the first two layers, which were made for ImageNet. They no longer shrink images."""
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()


def describe(model):
    """Returns the width of an image after the stem and each stage, and millions of products."""
    widths = []
    for part in (model.maxpool, model.layer1, model.layer2, model.layer3, model.layer4):
        part.register_forward_hook(lambda part, args, out: widths.append(out.shape[-1]))
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, 32, 32))
    return f"widths {widths}, {counter.get_total_flops() / 2e6:.0f} million"


def main():
    with torch.device("meta"):  # Shapes and counts, without computing.
        model = resnet18(num_classes=10).eval()
        print("ImageNet stem:", describe(model))
        model = resnet18(num_classes=10).eval()
        use_small_stem(model)
        print("CIFAR stem:", describe(model))


if __name__ == "__main__":
    main()
