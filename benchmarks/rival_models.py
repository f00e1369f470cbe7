"""Models of the workloads in rivals.py and cifar10_pfl.py, without imports of fedcomp, since other simulators use them."""

from torch import nn


def logreg() -> nn.Module:
    """The model of the task mnist-logreg: inputs [B, 784], 7,850 parameters."""
    return nn.Linear(784, 10)


def mnist_cnn() -> nn.Module:
    """The model of the task mnist-cnn: inputs [B, 1, 28, 28], 1,663,370 parameters."""
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


def mnist_small_cnn() -> nn.Module:
    """The model of the task mnist-small-cnn: inputs [B, 1, 28, 28], 28,938 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def cifar10_cnn() -> nn.Module:
    """Return `simple_cnn` of pfl's published CIFAR-10 benchmark: inputs [B, 3, 32, 32], 1,626,442 parameters, two dropout layers.

    The model has two 3x3 convolutions without padding (32 and 64 channels), a pooling layer and a hidden layer of 128 units, with weights
    by Glorot & Bengio 2010.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model


def cifar10_plain_cnn() -> nn.Module:
    """Return cifar10_cnn without dropout; the names of the weights are the same."""
    return nn.Sequential(
        *(nn.Identity() if isinstance(module, nn.Dropout) else module for module in cifar10_cnn())
    )


MODELS = {
    "mnist-logreg": logreg,
    "mnist-cnn": mnist_cnn,
    "mnist-small-cnn": mnist_small_cnn,
    "cifar10-cnn": cifar10_cnn,
    "cifar10-plain-cnn": cifar10_plain_cnn,
}
