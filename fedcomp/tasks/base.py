"""A task: a model, its data, its loss and its metrics."""

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from .. import seeds
from ..errors import DataError, TaskError
from .augment import Augmentation
from .data import TARGET, Batch, DataSource

# A function of outputs and targets that returns a scalar.
MetricFunction = Callable[[Tensor, Tensor], Tensor]
TaskFunction = TypeVar("TaskFunction", bound=Callable[..., Any])


ARGUMENTS = {  # names of the arguments with which fedcomp calls each function of a Task
    "collate": "items",
    "optimizer": "parameters",
    "train_fn": "model, data, local_round",
    "evaluate_fn": "model, data",
}


def share_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the fraction of examples for which the target is the class with the largest output, as a scalar tensor.

    `outputs` has the shape [batch, classes]. `targets` are class indices with the shape [batch].
    """
    return (outputs.argmax(-1) == targets).float().mean()


@dataclass(frozen=True)
class Task:
    """A model with its data, its loss and its metrics. The functions of a task are called during a run, not when the Task is created.

        task = fedcomp.Task(
            "disc",
            model=lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)),
            train=(points[400:], inside[400:]),  # float32 [N, 2], int64 [N]
            test=(points[:400], inside[:400]),
        )

    `model()` returns a module. On every call, its parameters have the same names and shapes, and its buffers and frozen parameters also
    have the same values. `model()` may initialise weights with the global random generators of torch, numpy and random. Before each call,
    fedcomp seeds these generators, so that the server and all clients start with the same weights. If `model` is a module instead of a
    function, the initial model is a copy of the module with its current weights.

    `train` and `test` are data, a list or dict with the data of each client, or a function that returns one of these. Data means a fedcomp
    Data, a pair (inputs, targets) of tensors or arrays, a torch Dataset or a Hugging Face Dataset. Datasets are read batch by batch. If
    `test` is None, the model can only be evaluated on clients (--evaluate clients).

    A batch is a tuple (input, …, targets) or a dict with the targets under the key `target`. The inputs of a tuple are passed to the model
    by position, and those of a dict by keyword. `collate(items)` converts a list of a dataset's items to a batch, like the `collate_fn` of
    `torch.utils.data.DataLoader`.

    `loss(outputs, targets)` returns a scalar tensor, the mean over the batch. If `loss` is None, the loss is the attribute `.loss` of the
    model's output, or the cross-entropy if the output has no such attribute. If the model's output has an attribute `.logits`, loss,
    accuracy and metrics receive these logits as `outputs`. `accuracy(outputs, targets)` returns a fraction from 0 to 1. The default is
    `share_correct`, for classification; for a regression, set `accuracy` to None. An evaluation averages loss and accuracy over all test
    examples. `metrics` maps names to functions that compute further metrics. Each of these functions is called once per evaluation, with
    the outputs and targets of the whole test set on the CPU, and returns a number.

    `optimizer(parameters)` returns the torch optimizer of the clients and replaces --optimizer, --lr, --momentum and --weight-decay.
    `train_fn(model, data, local_round)` replaces the training loop of a client (see `fedcomp.LocalRound`). `evaluate_fn(model, data)`
    replaces the evaluation, also on clients (--evaluate clients). In both, `data` is a torch Dataset or a Hugging Face Dataset. Both
    functions return a dict of numbers with at least the key "loss". If the dict of `train_fn` has the key "examples", this number is the
    weight of the client's update in an average weighted by examples. If the dict of `evaluate_fn` has the key "accuracy", this number is
    the accuracy. All other numbers are metrics: at most 64, with names of at most 64 bytes.

    Raises TaskError if `name` is not a string, if `metrics` is not a dict, or if `collate`, `optimizer`, `train_fn` or `evaluate_fn` cannot
    be called with the arguments shown here.
    """

    name: str
    model: Callable[[], nn.Module] | nn.Module
    train: Callable[[], Any] | Any
    test: Callable[[], Any] | Any = None
    loss: MetricFunction | None = None
    accuracy: MetricFunction | None = share_correct
    augment: Augmentation | None = None  # random changes of training examples, used with --augment
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict, hash=False)
    collate: Callable[[list[Any]], Any] | None = None
    target: str = TARGET
    optimizer: Callable[[Any], Optimizer] | None = None
    train_fn: Callable[[nn.Module, Any, Any], Mapping[str, float]] | None = None
    evaluate_fn: Callable[[nn.Module, Any], Mapping[str, float]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TaskError(
                f"the name of a task must be a string, not {type(self.name).__name__}; give a name, such as Task('mine', …)"
            )
        if not isinstance(self.metrics, Mapping):
            raise TaskError(
                f"task '{self.name}': metrics is of type {type(self.metrics).__name__}; give a dict from names to functions of "
                "(outputs, targets)"
            )
        for name, arguments in ARGUMENTS.items():
            if (value := getattr(self, name)) is not None and not callable(value):
                by_name = ", or name the optimizer with --optimizer" * (name == "optimizer")
                raise TaskError(
                    f"task '{self.name}': {name} is of type {type(value).__name__}; give a function{by_name}"
                )
            if value is not None and not accepts(value, len(arguments.split(", "))):
                raise TaskError(
                    f"task '{self.name}': {name} cannot be called as {name}({arguments}); change its parameters"
                )
        if isinstance(self.model, nn.Module):
            object.__setattr__(self, "model", partial(copy.deepcopy, copy.deepcopy(self.model)))
        for split in ("train", "test"):
            value = getattr(self, split)
            if not isinstance(value, DataSource):
                object.__setattr__(self, split, DataSource(value, self.collate, self.target))

    def outputs(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return the output of `model` for the inputs of a batch: a tensor, or an object with `.logits`.

        If the inputs are a dict, its entries are passed as keyword arguments. The targets are passed only if the task has no `loss` and the
        model's `forward` has an argument for them. Such a model is expected to compute the attribute `.loss` of its output.
        """
        inputs = batch.inputs
        if isinstance(inputs, dict):
            if self.loss is not None or not forward_takes(model, self.target):
                inputs = {name: value for name, value in inputs.items() if name != self.target}
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)

    def loss_of(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of a batch: the task's `loss`, else the attribute `.loss` of the outputs, else the cross-entropy."""
        if self.returns_loss(outputs):
            return outputs.loss
        return self.criterion(predictions(outputs), targets)

    def returns_loss(self, outputs: Any) -> bool:
        """Return whether the loss is the attribute `.loss` of the model's outputs."""
        return self.loss is None and getattr(outputs, "loss", None) is not None

    @property
    def criterion(self) -> MetricFunction:
        """The task's `loss`, or else the cross-entropy, as a function of outputs and targets."""
        return self.loss or F.cross_entropy


def predictions(outputs: Any) -> Any:
    """Return the attribute `.logits` of a model's outputs, or else the outputs themselves."""
    return getattr(outputs, "logits", outputs)


def forward_takes(model: Any, name: str) -> bool:
    """Return whether the `forward` of a model takes a keyword argument of this name."""
    cls: type = type(model)
    signature = _signature(cls)
    return name in signature or any(p.kind is p.VAR_KEYWORD for p in signature.values())


def accepts(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function accepts `count` positional arguments. Return True if the function's signature is unknown."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except ValueError:  # a built-in function without a signature
        return True
    except TypeError:
        return False
    return True


@cache
def _signature(cls: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls.forward).parameters if hasattr(cls, "forward") else {}


def builtin_task(name: str) -> Callable[[TaskFunction], TaskFunction]:
    """Return a decorator that registers a function as `--task NAME`. The function takes the data folder or None and returns the Task."""

    def register(function: TaskFunction) -> TaskFunction:
        vars(function)["name"] = name
        return function

    return register


def splits(read: Callable[[str], Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the arguments `train` and `test` of a Task: two functions that call `read("train")` and `read("test")`."""
    return partial(read, "train"), partial(read, "test")


def initial_model(task: Task, seed: int) -> nn.Module:
    """Return the task's model with its initial weights, which depend only on `seed`. Global random generators keep their states."""
    with seeded_globals(seeds.key(seed, "initial weights")):
        return task.model()


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Seed the global random generators of torch, numpy and random within a `with` block, and restore their states afterwards."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


def find_files(
    folder: Path | None, name: str, missing: str, contents: str, find: Callable[[Path], list[Path]]
) -> list[Path]:
    """Return the files of the data set `name` in `folder`, the folder of --data.

    `find(place)` returns the files in a folder. It is called for the subfolder `name`, and, if it finds no files there, for `folder`.
    Raises DataError if there are no files or the folder cannot be read. In the message, `missing` names the missing files, and `contents`
    describes a complete folder.
    """
    if folder is None:
        raise DataError(
            f"{name} needs its data; give --data DIR, a folder that contains {contents}, or set FEDCOMP_DATA"
        )
    wanted = f"a folder that contains {contents}"
    with read_errors(folder, wanted):
        if not folder.is_dir():
            raise DataError(f"--data {folder} is not a folder; give {wanted}")
        for place in (folder / name, folder):
            if files := find(place):
                return files
    raise DataError(f"--data {folder} does not contain {missing}; give {wanted}")


@contextmanager
def read_errors(path: Path, wanted: str, *malformed: type[Exception]) -> Iterator[None]:
    """Convert OSError, and the exception types in `malformed`, in a `with` block to DataError, whose message names --data.

    `wanted` describes a valid file or folder in the message.
    """
    unreadable: tuple[type[Exception], ...] = (OSError, *malformed)
    try:
        yield
    except PermissionError as error:
        raise DataError(
            f"--data {path}: no permission to read {error.filename or path}; change its permissions"
        ) from error
    except unreadable as error:
        problem = next(iter(str(error).splitlines()), type(error).__name__).removesuffix(".")
        raise DataError(f"--data {path} cannot be read: {problem}; give {wanted}") from error
