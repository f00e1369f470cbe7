"""The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn: what runs without a download.

1,437 to learn from and 360 to test on, by a fixed draw. Pixels are scaled to 0..1, then standardised by the mean and
deviation of the training set: left in 0..1, a short run reaches a tenth less accuracy.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from .. import seeds
from ..errors import MissingExtraError
from .base import Task, named
from .data import Data

TEST = 360  # examples, a fifth


def network() -> nn.Module:
    """Inputs [B, 64], 9,610 parameters."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def read(split: str) -> Data:
    """Inputs float32 [N, 64] of "train" or "test". Raises MissingExtraError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "sim", "the task digits") from error
    pixels, labels = load_digits(return_X_y=True)
    order = seeds.generator(0, "digits split").permutation(len(labels))
    chosen = {"train": order[:-TEST], "test": order[-TEST:]}
    learned = pixels[chosen["train"]]
    values = (pixels[chosen[split]] - learned.mean()) / learned.std()
    return Data(
        torch.tensor(values, dtype=torch.float32),
        torch.tensor(labels[chosen[split]].astype(np.int64)),
    )


@named("digits")
def digits(data: Path | None = None) -> Task:
    """A small network on scikit-learn's digits; a data folder is not needed and not read."""
    return Task("digits", network, partial(read, "train"), partial(read, "test"))
