"""The 1,797 handwritten digits of 8x8 pixels that scikit-learn contains. The task needs no download.

They are split at random into 1,437 training and 360 test examples. The split is the same in every run. Pixels are standardised by the mean
and standard deviation of the training set.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from .. import seeds
from ..errors import MissingExtraError
from .base import Task, builtin_task, splits
from .data import Data

TEST_EXAMPLES = 360


def network() -> nn.Module:
    """Return a network with 9,610 parameters, for inputs [batch, 64]."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def read(split: str) -> Data:
    """Return the data of "train" or "test", with inputs float32 [N, 64]. Raises MissingExtraError if scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "sim", "the task digits") from error
    pixels, labels = load_digits(return_X_y=True)
    order = seeds.generator(0, "digits split").permutation(len(labels))
    chosen = {"train": order[:-TEST_EXAMPLES], "test": order[-TEST_EXAMPLES:]}
    training = pixels[chosen["train"]]
    values = (pixels[chosen[split]] - training.mean()) / training.std()
    targets = torch.tensor(labels[chosen[split]].astype(np.int64))
    return Data(torch.tensor(values, dtype=torch.float32), targets)


@builtin_task("digits")
def digits(data: Path | None = None) -> Task:
    """Return the task to train a small network on scikit-learn's digits. `data` is ignored."""
    return Task("digits", network, *splits(read))
