"""A task: a model, its data, its loss and its metrics."""

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..errors import TaskError
from .augment import Augmentation
from .data import TARGET, Batch, Source

Measure = Callable[[Tensor, Tensor], Tensor]  # outputs, targets → a scalar
Make = TypeVar("Make", bound=Callable[..., Any])


def share_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of rows whose largest output is the target: outputs [B, C], targets [B] → scalar in 0..1."""
    return (outputs.argmax(-1) == targets).float().mean()


@dataclass(frozen=True)
class Task:
    """A model with its data. Functions are called when a run needs their result, so a task costs nothing until it runs.

    `model()` may draw from the global generators of torch, numpy and random: fedcomp seeds them. A module in place of a function stands
    for its present weights, and is not changed.

    `train` and `test` are a fedcomp Data, a pair (inputs, targets) of tensors or arrays, a torch Dataset or a Hugging Face Dataset (both
    are read batch by batch), or a list or dict of one of these for each client; or a function that returns one. A batch that is a tuple
    passes its inputs to the model by position, a dict by keyword; `target` is the key of a dict's targets. `collate(items) → batch`
    is that of `torch.utils.data.DataLoader`.

    `loss(outputs, targets)` is the mean over the batch, a scalar. Without a loss of its own, a task takes `.loss` of the model's output
    where the output has one, else the cross-entropy. Where the output has `.logits`, these are the outputs that loss, accuracy and
    metrics get. `accuracy(outputs, targets)` is a share in 0..1; None for a regression. `metrics` are further measures of the test data by
    name. Each metric is called once per evaluation, with the outputs and targets of the whole test set on the CPU, and returns a number;
    loss and accuracy are averaged over batches.

    `optimizer(parameters)` returns a torch optimizer that clients train with, in place of --optimizer. `train_fn(model, data, round)`
    replaces the training loop of a client (see `LocalRound`), and `evaluate_fn(model, data)` the evaluation. Both return a dict of
    numbers with at least "loss"; of `train_fn`, "examples" is the weight of the update where updates are weighted by examples. Other
    numbers are metrics, at most 64, with names of at most 64 bytes. With --evaluate clients, `evaluate_fn` is called on clients.
    """

    name: str
    model: Callable[[], nn.Module] | nn.Module
    train: Callable[[], Any] | Any
    test: Callable[[], Any] | Any
    loss: Measure | None = None
    accuracy: Measure | None = share_correct
    augment: Augmentation | None = None  # how --augment changes the examples that clients train on
    metrics: Mapping[str, Measure] = field(default_factory=dict, hash=False)
    collate: Callable[[list[Any]], Any] | None = None
    target: str = TARGET
    optimizer: Callable[[Any], Optimizer] | None = None
    train_fn: Callable[[nn.Module, Any, Any], Mapping[str, float]] | None = None
    evaluate_fn: Callable[[nn.Module, Any], Mapping[str, float]] | None = None

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
        for name in ("collate", "optimizer", "train_fn", "evaluate_fn"):
            if (given := getattr(self, name)) is not None and not callable(given):
                raise TaskError(
                    f"task '{self.name}': {name} is of type {type(given).__name__}; give a function"
                )
        if isinstance(self.model, nn.Module):
            object.__setattr__(self, "model", partial(copy.deepcopy, copy.deepcopy(self.model)))
        for split in ("train", "test"):
            given = getattr(self, split)
            if not isinstance(given, Source):
                object.__setattr__(self, split, Source(given, self.collate, self.target))

    def outputs(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return what `model` gives for the inputs of a batch: a tensor, or an object with `.logits`.

        A dict's inputs go to the model by keyword. Its targets are among them where the task has no loss of its own and `forward` takes
        an argument of their name, so that the model can compute `.loss`.
        """
        inputs = batch.inputs
        if isinstance(inputs, dict):
            if self.target in inputs and not (self.loss is None and takes(model, self.target)):
                inputs = {name: value for name, value in inputs.items() if name != self.target}
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)

    def loss_of(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of a batch: the task's own, or `.loss` of the outputs, or the cross-entropy."""
        if self.returns_loss(outputs):
            return outputs.loss
        return self.criterion(predictions(outputs), targets)

    def returns_loss(self, outputs: Any) -> bool:
        """Whether the loss is `.loss` of a model's outputs."""
        return self.loss is None and getattr(outputs, "loss", None) is not None

    @property
    def criterion(self) -> Measure:
        """The loss of outputs and targets: the task's own, or the cross-entropy."""
        return self.loss or F.cross_entropy


def predictions(outputs: Any) -> Any:
    """Return `.logits` of a model's outputs where they have one, else the outputs."""
    return getattr(outputs, "logits", outputs)


def takes(model: Any, name: str) -> bool:
    """Whether the `forward` of a model takes a keyword argument of this name."""
    cls: type = type(model)
    signature = _signature(cls)
    return name in signature or any(p.kind is p.VAR_KEYWORD for p in signature.values())


@cache
def _signature(cls: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls.forward).parameters if hasattr(cls, "forward") else {}


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

    with seeded_globals(key(seed, "initial weights")):
        return task.model()


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
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
