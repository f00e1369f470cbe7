"""CIFAR-10: 50,000 training and 10,000 test photographs of ten classes, in colour, 32x32.

VGG11* is a narrower VGG11 (Simonyan & Zisserman 2015) without BatchNorm or dropout. VGG11* is from Sattler, Wiedemann, Müller, Samek,
"Robust and communication-efficient federated learning from non-i.i.d. data", IEEE TNNLS 2019.

ResNet-18 is from He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016. Since the images are small, one 3x3
convolution replaces the first convolution (7x7) and the pooling after it. GroupNorm (Wu & He, ECCV 2018) replaces BatchNorm, because the
running statistics of BatchNorm differ between clients with different data (Hsieh, Phanishayee, Mutlu, Gibbons, ICML 2020). Each GroupNorm
has 2 groups, as in Reddi et al., ICLR 2021.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from .augment import CROP_AND_FLIP
from .base import Task, builtin_task, splits
from .parquet import ImageDataset

GROUPS = 2
# For each stage: its number of channels as a multiple of `width`, and the stride of its first block.
STAGES = ((1, 1), (2, 2), (4, 2), (8, 2))


class Block(nn.Module):
    """A residual block of two convolutions and a shortcut. The block divides height and width by `stride`.

    y = ReLU(x' + N(conv3(ReLU(N(conv3(x))))))    x' = x, or N(conv1(x)) if the shape changes

    N is GroupNorm, and conv3 and conv1 are 3x3 and 1x1 convolutions.
    """

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = _normalised(inputs, outputs, 3, stride)
        self.second = _normalised(outputs, outputs, 3)
        same = (inputs, stride) == (outputs, 1)
        self.past = nn.Identity() if same else _normalised(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.past(x) + self.second(torch.relu(self.first(x))))


class ResNet18(nn.Module):
    """ResNet-18, which maps images [batch, 3, height, width] to scores [batch, classes].

    `width` is the number of channels of the first stage, and must be even. With width 64 and 10 classes, ResNet-18 has 11,173,962
    parameters.
    """

    def __init__(self, width: int = 64, classes: int = 10):
        super().__init__()
        blocks, channels = [], width
        for multiple, stride in STAGES:
            outputs = multiple * width
            blocks += [Block(channels, outputs, stride), Block(outputs, outputs, 1)]
            channels = outputs
        self.stem = _normalised(3, width, 3)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))


def _normalised(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution followed by GroupNorm. The initial weights scale with the fan-out (He et al. 2015)."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.GroupNorm(GROUPS, outputs))


WIDTHS = (32, "pool", 64, "pool", 128, 128, "pool", 128, 128, "pool", 128, 128, "pool")


def images(data: Path | None) -> ImageDataset:
    """Return the CIFAR-10 images in a data folder, read on first use."""
    return ImageDataset(data, "cifar10", "img", (3, 32, 32))


def network() -> nn.Module:
    """Return VGG11* with 865,482 parameters, for inputs [batch, 3, 32, 32].

    The initial weights of convolutions scale with the fan-out (He et al. 2015), as in Sattler et al.'s code.
    """
    layers: list[nn.Module] = []
    channels = 3
    for width in WIDTHS:
        if isinstance(width, str):  # "pool"
            layers.append(nn.MaxPool2d(2))
            continue
        convolution = nn.Conv2d(channels, width, 3, padding=1)
        nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
        assert convolution.bias is not None
        nn.init.zeros_(convolution.bias)
        layers += [convolution, nn.ReLU()]
        channels = width
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@builtin_task("cifar10-vgg11s")
def vgg11s(data: Path | None) -> Task:
    """Return the task to train VGG11*, a narrower VGG11, on CIFAR-10. Each colour channel is standardised."""
    return Task(
        "cifar10-vgg11s", network, *splits(images(data).standardised), augment=CROP_AND_FLIP
    )


@builtin_task("cifar10-resnet18")
def resnet18(data: Path | None) -> Task:
    """Return the task to train ResNet-18 with GroupNorm on CIFAR-10. Each colour channel is standardised."""
    return Task(
        "cifar10-resnet18", ResNet18, *splits(images(data).standardised), augment=CROP_AND_FLIP
    )
