"""MNIST: 60,000 training and 10,000 test images of handwritten digits, 28x28.

The linear model is from Sattler, Wiedemann, Müller, Samek, IEEE TNNLS 2019. The convolutional network is from McMahan, Moore, Ramage,
Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017. The paper does not
mention padding, but only with padding does the network have the number of parameters that the paper states, 1,663,370.
"""

from pathlib import Path

from torch import nn

from .base import Task, builtin_task, splits
from .parquet import PER_CHANNEL, PER_DATASET, PER_PIXEL, ImageDataset


def images(data: Path | None, axes: tuple[int, ...] = PER_CHANNEL) -> ImageDataset:
    """Return the MNIST images in a data folder, which are read on first use and standardised over `axes`."""
    return ImageDataset(data, "mnist", "image", (1, 28, 28), axes)


def linear() -> nn.Module:
    """Return a linear model with 7,850 parameters, for inputs [batch, 784].

    The initial weights are zero. Sparse updates may never change some weights, and random initial values would stay in these.
    """
    model = nn.Linear(784, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def network() -> nn.Module:
    """Return a network with 1,663,370 parameters, for inputs [batch, 1, 28, 28]."""
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


@builtin_task("mnist-logreg")
def logreg(data: Path | None) -> Task:
    """Return the task to train logistic regression on MNIST. Each pixel is standardised by its own mean and standard deviation."""
    return Task("mnist-logreg", linear, *splits(images(data, PER_PIXEL).flat))


@builtin_task("mnist-logreg-global")
def logreg_global(data: Path | None) -> Task:
    """Return the task to train logistic regression on MNIST. All pixels are standardised by one mean and standard deviation."""
    return Task("mnist-logreg-global", linear, *splits(images(data, PER_DATASET).flat))


@builtin_task("mnist-cnn")
def cnn(data: Path | None) -> Task:
    """Return the task to train McMahan et al.'s network on MNIST. All pixels are standardised by one mean and standard deviation."""
    return Task("mnist-cnn", network, *splits(images(data).standardised))
