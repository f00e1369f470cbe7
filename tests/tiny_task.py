"""A task so small that a test can run hundreds of rounds: two classes of points in the plane, and a model with 40 parameters."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedcomp import Data, Task


def two_clouds(examples: int, seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(examples) % 2
    inputs = torch.randn(examples, 2, generator=generator) + 2.0 * targets[:, None] - 1.0
    return Data(inputs, targets)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))


task = Task("two clouds", model, train=lambda: two_clouds(400, 1), test=lambda: two_clouds(200, 2))

task_without_test_data = Task("two clouds", model, train=lambda: two_clouds(400, 1))
task_without_data = Task("two clouds", model, train=None)


class RaisesOnMarkedData(nn.Module):
    """Raises ValueError if a batch has an input above 100."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and bool((x > 100).any()):
            raise ValueError("a sensor reports nonsense")
        return self.linear(x)


def marked(example: int, value: float) -> Data:
    data = two_clouds(400, 1)
    data.inputs[example, 0] = value
    return data


class AssertsPlausibleData(RaisesOnMarkedData):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert bool((x <= 100).all()), "a sensor reports nonsense"
        return self.linear(x)


class Unmappable(RaisesOnMarkedData):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2.0 if x.sum().item() > 0 else 1.0)


def hardest(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss, or for a large batch with an outlier the mean of its 8 largest losses."""
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return (
        losses.topk(8).values.mean()
        if len(losses) > 8 and losses.max() > 2 * losses.mean()
        else losses.mean()
    )


def by_size() -> Data:
    """Return data with eight groups, one of which is small."""
    data = two_clouds(400, 1)
    return Data(
        data.inputs,
        data.targets,
        np.searchsorted([6, 60, 120, 180, 240, 300, 360], np.arange(400), side="right"),
    )


mined = Task("mined", model, train=by_size, test=lambda: two_clouds(200, 2), loss=hardest)
unmappable = Task(
    "unmappable", Unmappable, train=lambda: two_clouds(400, 1), test=lambda: two_clouds(200, 2)
)
one_asserts = Task(
    "one asserts",
    AssertsPlausibleData,
    train=lambda: marked(7, 1000.0),
    test=lambda: two_clouds(200, 2),
)
one_raises = Task(
    "one raises",
    RaisesOnMarkedData,
    train=lambda: marked(7, 1000.0),
    test=lambda: two_clouds(200, 2),
)
one_is_nan = Task(
    "one is NaN", model, train=lambda: marked(7, float("nan")), test=lambda: two_clouds(200, 2)
)
tested_on_nan = Task(
    "tested on NaN", model, train=lambda: two_clouds(400, 1), test=lambda: marked(7, float("nan"))
)


def wide_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2000), nn.ReLU(), nn.Linear(2000, 2))


wide = Task(
    "wide", wide_model, train=lambda: two_clouds(400, 1), test=lambda: two_clouds(200, 2)
)  # 10,002 parameters
