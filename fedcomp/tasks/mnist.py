"""MNIST: handwritten digits, 28x28, 60,000 to learn from and 10,000 to test on.

The linear model is that of the setting of Sattler et al. 2019; the network is the one of McMahan, Moore, Ramage,
Hampson, Agüera y Arcas: Communication-efficient learning of deep networks from decentralized data. AISTATS 2017
(1,663,370 parameters, which its two convolutions of 5x5 have only with padding).
"""

from functools import partial
from pathlib import Path

from torch import nn

from .base import Task, named
from .parquet import Images


def images(data: Path | None) -> Images:
    return Images(data, "mnist", "image", (1, 28, 28))


def linear() -> nn.Module:
    """Inputs [B, 784], 7,850 parameters. From zero: few coordinates are sent, and noise in the others would stay."""
    model = nn.Linear(784, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def network() -> nn.Module:
    """Inputs [B, 1, 28, 28], 1,663,370 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


@named("mnist-logreg")
def logreg(data: Path | None) -> Task:
    """Logistic regression on pixels, each standardised by its own mean and deviation."""
    read = images(data).per_pixel
    return Task("mnist-logreg", linear, partial(read, "train"), partial(read, "test"))


@named("mnist-logreg-global")
def logreg_global(data: Path | None) -> Task:
    """Logistic regression on pixels standardised by one mean and deviation for all of them."""
    read = images(data).per_dataset
    return Task("mnist-logreg-global", linear, partial(read, "train"), partial(read, "test"))


@named("mnist-cnn")
def cnn(data: Path | None) -> Task:
    """McMahan et al.'s network on images standardised as a whole."""
    read = images(data).per_channel
    return Task("mnist-cnn", network, partial(read, "train"), partial(read, "test"))
