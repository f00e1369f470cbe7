"""Recalibration of running statistics such as those of BatchNorm, for the evaluation of averaged weights.

Running statistics describe the activations of a layer for one set of weights. Clients do not send their running statistics, because they
would make messages longer, and Byzantine clients could send false values. Running statistics for the averaged weights are computed before
an evaluation, on the server or a client, by forward passes over a sample of training examples. This is the method of
Izmailov, Podoprikhin, Garipov, Vetrov, Wilson, "Averaging weights leads to wider optima and better generalization", UAI 2018, section 3.2.
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
BATCH_SIZE = 250  # maximum number of examples in a forward pass

NORMALIZATION = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def recalibrated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers whose running statistics change during training, by name. The model is left in eval mode.

    The result omits layers that `model.train()` leaves in eval mode, such as a frozen BatchNorm, since their statistics are constants.
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

    The model must be on `device`, and is left in eval mode. During the forward passes, only the recalibrated layers are in training mode;
    dropout is off, and other buffers do not change. Raises ValueError if a layer receives a batch with only one value per channel.
    """
    layers: list[Any] = [*recalibrated_layers(model).values()]
    index = torch.from_numpy(rows).to(data.device)
    with ExitStack() as restored, torch.inference_mode():
        restored.callback(model.eval)
        for layer in layers:
            restored.callback(setattr, layer, "momentum", layer.momentum)
            layer.momentum = None  # None: running statistics are averages over all forward passes
            layer.reset_running_stats()
            layer.train()
        for piece in index.tensor_split(-(-len(rows) // BATCH_SIZE)):
            task.outputs(model, data.batch(piece).to(device))


def recalibration_error(task: Task, model: nn.Module, data: Examples, device: torch.device) -> str:
    """Try the forward pass that recalibration needs. Return a description of the error, or "" if there is none.

    An error occurs, for example, if the model has no `forward`, because the task's `evaluate_fn` calls other methods. The model is left in
    eval mode.
    """
    try:
        rows = torch.arange(min(2, len(data)), device=data.device)
        with torch.inference_mode():
            task.outputs(model.eval(), data.batch(rows).to(device))
    except Exception as error:
        return describe(error)
    return ""
