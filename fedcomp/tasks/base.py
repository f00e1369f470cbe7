"""What is learned: a model, its loss, its data, and how well it does."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import TaskError
from .augment import Augmentation
from .data import Data, Examples

Measure = Callable[[Tensor, Tensor], Tensor]  # outputs, targets → a scalar
Make = TypeVar("Make", bound=Callable)


def share_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of rows whose largest output is the target: outputs [B, C], targets [B] → scalar in 0..1."""
    return (outputs.argmax(-1) == targets).float().mean()


@dataclass(frozen=True)
class Task:
    """A model with its data. What is given as functions is made when called, so that a task costs nothing until it runs.

    `model()` may draw from the global generators of torch, numpy and random: fedcomp seeds them. In place of a function, a module starts
    from the weights that it has now, and is itself left as it is. `loss(outputs, targets)` is the mean over the batch, a scalar: the lower,
    the better. `accuracy(outputs, targets)` is a share, 0..1; None where there is none, as in a regression. `metrics` are further
    measures of the test data, by the name that each has in metrics.jsonl and in `run.metrics`. Each function is called once per
    evaluation with the outputs and targets of the whole test set, on the CPU, and returns one number. It need not be a mean: F1, AUC and
    perplexity are exact.
    """

    name: str
    model: Callable[[], nn.Module] | nn.Module
    train: (
        Callable[[], Data] | Any
    )  # a Data, a pair (inputs, targets) of tensors or arrays, a torch Dataset of pairs, or what returns one
    test: Callable[[], Data] | Any  # likewise
    loss: Measure = F.cross_entropy
    accuracy: Measure | None = share_correct
    augment: Augmentation | None = None  # how --augment changes the examples that clients train on
    metrics: Mapping[str, Measure] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TaskError(
                f"a task's name is of type {type(self.name).__name__}; give a text, such as Task('mine', …)"
            )
        if not isinstance(self.metrics, Mapping):
            raise TaskError(
                f"task '{self.name}': metrics is of type {type(self.metrics).__name__}; give a dict, name → function of "
                "(outputs, targets)"
            )
        if isinstance(self.model, nn.Module):
            object.__setattr__(self, "model", partial(copy.deepcopy, copy.deepcopy(self.model)))
        for split in ("train", "test"):
            given = getattr(self, split)
            object.__setattr__(
                self, split, given if isinstance(given, Examples) else Examples(given)
            )


def named(name: str) -> Callable[[Make], Make]:
    """Return a decorator that lets `--task NAME` find a built-in task: a function from the data folder, or None, to the Task."""

    def mark(make: Make) -> Make:
        vars(make)["name"] = name
        return make

    return mark


def initial_model(task: Task, seed: int) -> nn.Module:
    """The task's model with the weights that every party with this seed starts from, on the CPU.

    Leaves the global generators as they were.
    """
    from ..seeds import key

    with fixed_draws(key(seed, "initial weights")):
        return task.model()


@contextmanager
def fixed_draws(seed: int) -> Iterator[None]:
    """The global generators of torch, numpy and random, seeded for a while and then as they were."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)
