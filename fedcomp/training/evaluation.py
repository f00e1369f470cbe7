"""Evaluation of a model on the test data of a task."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..layout import Layout
from ..tasks.base import Task, predictions
from ..tasks.data import Batch, Examples, concatenate_nested, map_nested
from .cpu_convolutions import NOT_CONTIGUOUS, set_memory_format, supports_channels_last
from .own_loop import numbers_of

# Maximum numbers of examples in a forward pass. On a CPU, fewer examples are used, so that the activations fit into the caches.
GPU_BATCH, CPU_BATCH, CPU_IMAGE_BATCH = 1000, 250, 50


class Evaluation(NamedTuple):
    """Loss, accuracy and metrics of a model on the test data."""

    loss: float | None  # mean loss over the examples; None if the model was not evaluated
    accuracy: float | None  # mean over the examples; None if the task has no accuracy
    metrics: Mapping[str, float]  # results of the task's metric functions, by name


def evaluate(
    task: Task,
    model: nn.Module,
    layout: Layout,
    weights: Tensor,
    data: Examples,
    device: torch.device | str,
    rows: np.ndarray | None = None,
    lenient: bool = False,
) -> Evaluation:
    """Evaluate the weights `weights` [numel] on the examples of `data` with the indices `rows`, by default on all examples.

    `data` must be on `device`. The weights are written into `model`, which is moved to `device` and left in eval mode. The model's buffers
    do not change. Each metric of the task is called once, with the outputs and targets of all examples on the CPU. If the task has an
    `evaluate_fn`, it replaces loss, accuracy and metrics. With `lenient`, a metric that raises an exception is NaN. For example, a
    metric may fail if the examples lack a class.
    """
    model = model.to(device).eval()
    layout.scatter(weights, model)
    images = torch.device(device).type == "cpu" and supports_channels_last(model)
    if images:
        set_memory_format(model, channels_last=True)
    if task.evaluate_fn is not None:
        with torch.no_grad():
            returned = task.evaluate_fn(model, data.subset(rows))
        numbers = numbers_of(task, "evaluate_fn", returned)
        return Evaluation(numbers.pop("loss"), numbers.pop("accuracy", None), numbers)
    size = GPU_BATCH if torch.device(device).type == "cuda" else CPU_BATCH
    try:
        image_size = CPU_IMAGE_BATCH if images else size
        return _evaluate_batches(task, model, data, image_size, rows, lenient)
    except RuntimeError as error:
        if not images or NOT_CONTIGUOUS not in str(error):
            raise
        # The model calls `view`, which does not support the channels_last format.
        set_memory_format(model, channels_last=False)
        return _evaluate_batches(task, model, data, size, rows, lenient)


@torch.inference_mode()
def _evaluate_batches(
    task: Task, model: nn.Module, data: Examples, size: int, rows: np.ndarray | None, lenient: bool
) -> Evaluation:
    count = len(data) if rows is None else len(rows)
    sums: dict[str, float] = {}
    pairs: list[tuple[Any, Any]] = []  # outputs and targets
    for piece in _batches(data, size, rows):
        outputs, fraction = task.outputs(model, piece), len(piece) / count
        values = {"loss": task.loss_of(outputs, piece.targets)}
        if task.accuracy:
            values["accuracy"] = task.accuracy(predictions(outputs), piece.targets)
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + fraction * float(value)
        if task.metrics:
            pair = (predictions(outputs), piece.targets)
            pairs.append(map_nested(pair, lambda t: t.cpu()))
    metrics: dict[str, float] = {}
    if task.metrics:
        whole = concatenate_nested(pairs)
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
