"""Recalibration of running statistics, so that a model whose weights were averaged can be evaluated.

Running mean and variance describe the activations under one set of weights. Clients keep theirs and do not send them, so the server
computes its own by forward passes over a sample of examples, as in Izmailov, Podoprikhin, Garipov, Vetrov, Wilson: Averaging weights
leads to wider optima and better generalization. UAI 2018, section 3.2. This costs no bytes, and a Byzantine client cannot falsify the
statistics. The alternative, averaging the clients' statistics, would cost bytes and let it do so.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .base import Task
from .data import Examples
from .user_errors import describe

CALIBRATION, BATCH = 2000, 250  # examples: the most in all, and those of a forward pass

NORMALIZATION = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def recalibrated(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that `recalibrate` covers, by name; empty for a model without running statistics. Leaves the model in eval mode.

    A layer that the model keeps in eval mode during training (a frozen BatchNorm) is not among them: its statistics are constants.
    """
    model.train()
    found: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, NORMALIZATION) and module.running_mean is not None and module.training
    }
    model.eval()
    return found


def recalibrate(
    model: nn.Module, batches: Iterable[Any], forward: Callable[[Any], Any] | None = None
) -> None:
    """Set running statistics to their averages over the batches. Leaves the model in eval mode.

    `forward(batch)` runs a batch; by default it is the model itself.

    Only the recalibrated layers are in training mode meanwhile, so that dropout is off and other buffers stay as they are. A BatchNorm
    layer raises ValueError for a batch with one value per channel.
    """
    layers: list[Any] = [*recalibrated(model).values()]
    with ExitStack() as restored:
        restored.callback(model.eval)
        for layer in layers:
            restored.callback(setattr, layer, "momentum", layer.momentum)
            restored.callback(_average(layer).remove)
            layer.reset_running_stats()
            layer.train()
        for batch in batches:
            (forward or model)(batch)


def recalibrate_on(
    task: Task, model: nn.Module, data: Examples, rows: np.ndarray, device: torch.device
) -> None:
    """Recalibrate a task's model, which is on `device`, on the examples `rows`, in batches of at most 250."""
    index = torch.from_numpy(rows).to(data.device)
    pieces = index.tensor_split(-(-len(rows) // BATCH))
    batches = (data.batch(piece).to(device) for piece in pieces)
    with torch.inference_mode():
        recalibrate(model, batches, lambda batch: task.outputs(model, batch))


def why_not_recalibrated(task: Task, model: nn.Module, data: Examples, device: torch.device) -> str:
    """Return why the forward pass that recalibration needs fails, such as for a task whose `evaluate_fn` calls parts of the model; ""
    if it works. Leaves the model in eval mode.
    """
    try:
        rows = torch.arange(min(2, len(data)), device=data.device)
        with torch.inference_mode():
            task.outputs(model.eval(), data.batch(rows).to(device))
    except Exception as error:
        return describe(error)
    return ""


def _average(layer: nn.Module) -> RemovableHandle:
    """Give each forward pass of the layer the same weight. momentum=None does so for BatchNorm, and freezes InstanceNorm."""
    passes = count(1)
    return layer.register_forward_pre_hook(
        lambda layer, _inputs: setattr(layer, "momentum", 1 / next(passes))
    )
