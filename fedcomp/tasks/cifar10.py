"""CIFAR-10: 50,000 training and 10,000 test photographs of ten classes, 32x32 in colour.

VGG11* is the network of Sattler, Wiedemann, Müller, Samek: Robust and communication-efficient federated learning from
non-i.i.d. data. IEEE TNNLS 2019: VGG11 (Simonyan & Zisserman 2015) narrowed, without BatchNorm or dropout. ResNet-18 is in
resnet.py.
"""

from functools import partial
from pathlib import Path

from torch import nn

from .augment import CROP_AND_FLIP
from .base import Task, builtin_task
from .parquet import ImageDataset
from .resnet import ResNet18

WIDTHS = (32, "pool", 64, "pool", 128, 128, "pool", 128, 128, "pool", 128, 128, "pool")


def images(data: Path | None) -> ImageDataset:
    """Return the images in a data folder."""
    return ImageDataset(data, "cifar10", "img", (3, 32, 32))


def network() -> nn.Module:
    """Return VGG11* with 865,482 parameters, for inputs [B, 3, 32, 32].

    Convolutions are initialised as in the authors' code: as in He et al. 2015, by fan-out.
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
    """VGG11*. Each channel is standardised by its mean and standard deviation."""
    read = images(data).per_channel
    return Task(
        "cifar10-vgg11s",
        network,
        partial(read, "train"),
        partial(read, "test"),
        augment=CROP_AND_FLIP,
    )


@builtin_task("cifar10-resnet18")
def resnet18(data: Path | None) -> Task:
    """ResNet-18 with GroupNorm. Each channel is standardised by its mean and standard deviation."""
    read = images(data).per_channel
    return Task(
        "cifar10-resnet18",
        ResNet18,
        partial(read, "train"),
        partial(read, "test"),
        augment=CROP_AND_FLIP,
    )
