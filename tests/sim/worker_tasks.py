"""Tasks for the tests of worker processes, which load this file."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedcomp import Data, Task

# An example with one of these numbers as its first input triggers a fault of the model.
DEADLY, BAD, EXIT, STOP, DEADLY_ONCE, MODULES = 1000.0, 500.0, 250.0, 125.0, 100.0, 75.0
# Environment variable that names a file, which exists after DEADLY_ONCE has killed a worker.
FIRST_DEATH = "FEDCOMP_TEST_FIRST_DEATH"


def examples() -> Data:
    drawn = torch.Generator().manual_seed(1)
    return Data(
        torch.randn(120, 3, 8, 8, generator=drawn), torch.randint(0, 4, (120,), generator=drawn)
    )


def marked(**values: float) -> Data:
    """Return the examples, with the first input of some of them replaced: marked(_7=BAD) changes example 7."""
    data = examples()
    for example, value in values.items():
        data.inputs[int(example[1:]), 0, 0, 0] = value
    return data


def model() -> nn.Module:
    """Return a model that the batched engine cannot train: it has convolutions, running statistics and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(128, 4),
    )


class Faulty(nn.Module):
    """A model whose fault is selected by the first inputs of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x[:, 0, 0, 0].max()
        if first == BAD:
            raise ValueError("a sensor reports nonsense")
        if first == EXIT:
            raise SystemExit(7)
        if first == STOP:
            raise KeyboardInterrupt
        if first == MODULES:
            found = [name for name in ("flwr", "numba", "torch") if name in sys.modules]
            raise ValueError(f"modules: {' '.join(found)}")
        if first == DEADLY_ONCE and not (once := Path(os.environ[FIRST_DEATH])).exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGSEGV)
        if first == DEADLY:
            os.kill(os.getpid(), signal.SIGSEGV)
        return self.inner(x)


class Slow(nn.Module):
    """A model whose forward pass takes ten minutes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            print(f"trains {os.getpid()}", flush=True)
            time.sleep(600)
        return self.linear(x.flatten(1))


class Viewed(nn.Module):
    """A model that calls `view` on its activations, which must therefore be contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(512, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x).relu()
        return self.linear(x.view(len(x), -1))


class Projected(nn.Module):
    """A model with a constant buffer."""

    def __init__(self, constant: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("constant", constant)
        self.inner = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.constant)


DRAWN = torch.rand(8) * float(np.random.rand()) * random.random()

task = Task("mixed", model, examples, examples)
faulty = Task("faulty", Faulty, examples, examples)
slow = Task("slow", Slow, examples, examples)
viewed = Task("viewed", Viewed, examples, examples)
drawn = Task("drawn", lambda: Projected(DRAWN), examples, examples)


def gone() -> Task:
    """Return a task that cannot be loaded once the file FIRST_DEATH exists."""
    if os.environ.get(FIRST_DEATH) and Path(os.environ[FIRST_DEATH]).exists():
        raise FileNotFoundError("the file is gone")
    return task
