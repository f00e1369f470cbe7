"""Evaluation of a model on the test data of a task."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..layout import Layout
from ..tasks.base import Task, predictions
from ..tasks.data import Batch, Examples
from .channels import NOT_CONTIGUOUS, channels_may_be_last
from .own_loop import numbers_of

GPU_BATCH, CPU_BATCH, CPU_IMAGES = (
    1000,
    250,
    50,
)  # examples; a CPU's caches then hold the activations


class Evaluation(NamedTuple):
    """Loss, accuracy and metrics of a model on the test data."""

    loss: float | None  # mean over the examples
    accuracy: float | None  # likewise; None: the task has none
    metrics: Mapping[str, float]  # the task's own


def evaluate(
    task: Task,
    model: nn.Module,
    layout: Layout,
    weights: Tensor,
    data: Examples,
    device: torch.device | str,
    batch: int = 0,
    rows: np.ndarray | None = None,
    lenient: bool = False,
) -> Evaluation:
    """Evaluate `weights` [n] on `data`, which is on `device`, or on its examples `rows`.

    Writes the weights into `model`, moved to `device` and left in eval mode; its buffers are used as they are. A forward pass takes
    `batch` examples, by default 1,000 on a GPU, 250 on a CPU and 50 images with their channels last. The task's metrics are called
    once, with the outputs and targets of all examples on the CPU. A task with an `evaluate_fn` is evaluated by that alone. `lenient`: a
    metric that raises an exception is NaN, as one that needs examples of every class.
    """
    model = model.to(device).eval()
    layout.scatter(weights, model)
    images = torch.device(device).type == "cpu" and channels_may_be_last(model)
    if images:
        model.to(memory_format=torch.channels_last)
    if task.evaluate_fn is not None:
        with torch.no_grad():
            found = task.evaluate_fn(model, data.subset(rows))
        return _named(numbers_of(task, "evaluate_fn", found))
    usual = GPU_BATCH if torch.device(device).type == "cuda" else CPU_BATCH
    try:
        return _measured(
            task, model, data, batch or (CPU_IMAGES if images else usual), rows, lenient
        )
    except RuntimeError as error:
        if not images or NOT_CONTIGUOUS not in str(error):
            raise
        model.to(memory_format=torch.contiguous_format)  # for a `view` in its forward pass
        return _measured(task, model, data, batch or usual, rows, lenient)


@torch.inference_mode()
def _measured(
    task: Task,
    model: nn.Module,
    data: Examples,
    size: int,
    rows: np.ndarray | None,
    lenient: bool,
) -> Evaluation:
    """Evaluate a model as it is, in batches of at most `size` examples."""
    count = len(data) if rows is None else len(rows)
    sums: dict[str, float] = {}
    kept: list[tuple[Any, Any]] = []
    for piece in _batches(data, size, rows):
        outputs, share = task.outputs(model, piece), len(piece) / count
        values = {"loss": task.loss_of(outputs, piece.targets)}
        if task.accuracy:
            values["accuracy"] = task.accuracy(predictions(outputs), piece.targets)
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + share * float(value)
        if task.metrics:
            kept.append((predictions(outputs).cpu(), piece.targets.cpu()))
    metrics: dict[str, float] = {}
    if task.metrics:
        whole = [torch.cat(parts) for parts in zip(*kept, strict=True)]
        for name, measure in task.metrics.items():
            try:
                metrics[name] = float(measure(*whole))
            except Exception:
                if not lenient:
                    raise
                metrics[name] = math.nan
    return Evaluation(sums["loss"], sums.get("accuracy"), metrics)


def _batches(data: Examples, size: int, rows: np.ndarray | None) -> Iterable[Batch]:
    if rows is None:
        return data.batches(size)
    index = torch.from_numpy(rows).to(data.device)
    return map(data.batch, index.tensor_split(-(-len(rows) // size)))


def _named(numbers: dict[str, float]) -> Evaluation:
    return Evaluation(numbers.pop("loss"), numbers.pop("accuracy", None), numbers)
