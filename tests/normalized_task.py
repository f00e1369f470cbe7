"""A task with BatchNorm. Its data is in files, so that a test can leave the training data to the clients."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedcomp import Data, Task


def write(path: Path, examples: int, seed: int) -> None:
    """Write points of two classes, which are not standardised, to a file. The last column is the class."""
    drawn, classes = np.random.default_rng(seed), np.arange(examples) % 2
    points = 30 + 10 * classes[:, None] + 10 * drawn.normal(size=(examples, 2))
    path.parent.mkdir(exist_ok=True)
    np.save(path, np.column_stack([points, classes]))


def read(path: Path) -> Data:
    table = torch.from_numpy(np.load(path))
    return Data(table[:, :2].float(), table[:, 2].long())


def task(folder: Path) -> Task:
    return Task(
        "points",
        lambda: nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)),
        train=lambda: read(folder / "train.npy"),
        test=lambda: read(folder / "test.npy"),
    )
