"""Evaluation of a model on the test data of a task."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layout import Layout
from ..tasks.base import Task, predictions
from ..tasks.data import Examples
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
) -> Evaluation:
    """Evaluate `weights` [n] on `data`, which is on `device`.

    Writes the weights into `model`, moved to `device` and left in eval mode; its buffers are used as they are. A forward pass takes
    `batch` examples, by default 1,000 on a GPU, 250 on a CPU and 50 images with their channels last. The task's metrics are called
    once, with the outputs and targets of all examples on the CPU. A task with an `evaluate_fn` is evaluated by that alone.
    """
    model = model.to(device).eval()
    layout.scatter(weights, model)
    images = torch.device(device).type == "cpu" and channels_may_be_last(model)
    if images:
        model.to(memory_format=torch.channels_last)
    if task.evaluate_fn is not None:
        with torch.no_grad():
            found = task.evaluate_fn(model, data.subset())
        return _named(numbers_of(task, "evaluate_fn", found))
    usual = GPU_BATCH if torch.device(device).type == "cuda" else CPU_BATCH
    try:
        return _measured(task, model, data, batch or (CPU_IMAGES if images else usual))
    except RuntimeError as error:
        if not images or NOT_CONTIGUOUS not in str(error):
            raise
        model.to(memory_format=torch.contiguous_format)  # for a `view` in its forward pass
        return _measured(task, model, data, batch or usual)


@torch.inference_mode()
def _measured(task: Task, model: nn.Module, data: Examples, size: int) -> Evaluation:
    """Evaluate a model as it is, in batches of at most `size` examples."""
    sums: dict[str, float] = {}
    kept: list[tuple[Any, Any]] = []
    for piece in data.batches(size):
        outputs, share = task.outputs(model, piece), len(piece) / len(data)
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
        metrics = {name: float(measure(*whole)) for name, measure in task.metrics.items()}
    return Evaluation(sums["loss"], sums.get("accuracy"), metrics)


def _named(numbers: dict[str, float]) -> Evaluation:
    return Evaluation(numbers.pop("loss"), numbers.pop("accuracy", None), numbers)
