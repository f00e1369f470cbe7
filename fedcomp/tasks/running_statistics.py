"""Recalibration of running statistics such as those of BatchNorm, for the evaluation of averaged weights.

The running mean and variance of a layer describe its activations for one set of weights. Clients keep their running statistics and do not
send them. The server therefore computes running statistics for the averaged weights by forward passes over a sample of examples, as in
Izmailov, Podoprikhin, Garipov, Vetrov, Wilson, "Averaging weights leads to wider optima and better generalization", UAI 2018, section 3.2.
Recalibration needs no messages between server and clients. If clients sent their own statistics, messages would be longer, and Byzantine
clients could send false statistics.
"""

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from .base import Task
from .data import Examples
from .user_errors import describe

CALIBRATION_EXAMPLES = 2000  # maximum number of examples from which running statistics are computed
BATCH_SIZE = 250  # examples in a forward pass

NORMALIZATION = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def recalibrated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers whose running statistics change during training, by name. The model is left in eval mode.

    Layers that the model keeps in eval mode during training, such as a frozen BatchNorm, are excluded, since their statistics are
    constants.
    """
    model.train()
    layers: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, NORMALIZATION) and module.running_mean is not None and module.training
    }
    model.eval()
    return layers


def recalibrate_on(
    task: Task, model: nn.Module, data: Examples, rows: np.ndarray, device: torch.device
) -> None:
    """Set the running statistics of a model to their averages over batches of the examples with the indices `rows`.

    The model must be on `device`, and is left in eval mode. During the forward passes, only the recalibrated layers are in training mode,
    so that dropout is off and other buffers do not change. Raises ValueError if a BatchNorm layer receives a batch with only one value per
    channel.
    """
    layers: list[Any] = [*recalibrated_layers(model).values()]
    index = torch.from_numpy(rows).to(data.device)
    with ExitStack() as restored, torch.inference_mode():
        restored.callback(model.eval)
        for layer in layers:
            restored.callback(setattr, layer, "momentum", layer.momentum)
            layer.momentum = None  # the running statistics become averages over all forward passes
            layer.reset_running_stats()
            layer.train()
        for piece in index.tensor_split(-(-len(rows) // BATCH_SIZE)):
            task.outputs(model, data.batch(piece).to(device))


def recalibration_error(task: Task, model: nn.Module, data: Examples, device: torch.device) -> str:
    """Try the forward pass that recalibration needs. Return a description of the error, or an empty string if there is none. The model is
    left in eval mode.

    The forward pass fails, for example, for a model that has no `forward` and is evaluated by its task's `evaluate_fn`.
    """
    try:
        rows = torch.arange(min(2, len(data)), device=data.device)
        with torch.inference_mode():
            task.outputs(model.eval(), data.batch(rows).to(device))
    except Exception as error:
        return describe(error)
    return ""
