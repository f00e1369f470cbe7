"""CIFAR-10: photographs of ten kinds of things, 32x32 in colour, 50,000 to learn from and 10,000 to test on.

VGG11* is the network of Sattler, Wiedemann, Müller, Samek: Robust and communication-efficient federated learning from
non-i.i.d. data. IEEE TNNLS 2019: VGG11 (Simonyan & Zisserman 2015) narrowed, without BatchNorm or dropout. ResNet-18 is that of resnet.py.
"""

from functools import partial
from pathlib import Path

from torch import nn

from .augment import CROP_AND_FLIP
from .base import Task, named
from .parquet import Images
from .resnet import ResNet18

WIDTHS = (32, "pool", 64, "pool", 128, 128, "pool", 128, 128, "pool", 128, 128, "pool")


def images(data: Path | None) -> Images:
    return Images(data, "cifar10", "img", (3, 32, 32))


def network() -> nn.Module:
    """Inputs [B, 3, 32, 32], 865,482 parameters. Convolutions start as in the authors' code: He et al. 2015, by fan-out."""
    layers: list[nn.Module] = []
    channels = 3
    for width in WIDTHS:
        if width == "pool":
            layers.append(nn.MaxPool2d(2))
            continue
        convolution = nn.Conv2d(channels, width, 3, padding=1)
        nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
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


@named("cifar10-vgg11s")
def vgg11s(data: Path | None) -> Task:
    """VGG11* on images standardised channel by channel."""
    read = images(data).per_channel
    return Task(
        "cifar10-vgg11s",
        network,
        partial(read, "train"),
        partial(read, "test"),
        augment=CROP_AND_FLIP,
    )


@named("cifar10-resnet18")
def resnet18(data: Path | None) -> Task:
    """ResNet-18 with GroupNorm on images standardised channel by channel."""
    read = images(data).per_channel
    return Task(
        "cifar10-resnet18",
        ResNet18,
        partial(read, "train"),
        partial(read, "test"),
        augment=CROP_AND_FLIP,
    )
