"""Softmax regression (one linear layer with cross-entropy), trained by compiled kernels on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels import regression
from ...layout import Layout
from ...tasks.base import Task
from ...tasks.data import Data
from ...training.cpu_convolutions import has_hooks
from ...training.local_sgd import LocalSGD


@dataclass(frozen=True)
class Regression:
    """The shape of a softmax regression, and the positions of its parameters in a vector [numel] of all parameters."""

    outputs: int  # number of classes
    inputs: int  # number of features
    weights: int  # position of the first weight
    biases: int | None  # position of the first bias; None: the layer has no bias
    flattens: bool  # whether the model flattens its inputs first

    @classmethod
    def of(cls, task: Task, model: nn.Module, layout: Layout) -> "Regression | None":
        """Return the softmax regression that a task trains, or None for any other model or loss, or with frozen parameters."""
        layers = list(model.children()) if type(model) is nn.Sequential else [model]
        layers = [layer for layer in layers if type(layer) is not nn.Identity]
        layer = layers[-1] if layers else None
        if not isinstance(layer, nn.Linear) or type(layer) is not nn.Linear:
            return None
        if task.criterion is not F.cross_entropy or has_hooks(model):
            return None
        flattens = [
            type(m) is nn.Flatten and (m.start_dim, m.end_dim) == (1, -1) for m in layers[:-1]
        ]
        shape = layer.weight.shape  # layer.out_features may be wrong if the weight was replaced
        if flattens not in ([], [True]) or any(
            p.dtype != torch.float32 or not p.requires_grad for p in layer.parameters()
        ):
            return None
        if layer.bias is not None and layer.bias.shape != shape[:1]:
            return None
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        offsets = {entry.name: entry.offset for entry in layout}
        biases = None if layer.bias is None else offsets[names[layer.bias]]
        weights = offsets[names[layer.weight]]
        return cls(shape[0], shape[1], weights, biases, flattens=bool(flattens))

    def supports(self, data: Data, sizes: Sequence[int], sgd: LocalSGD) -> bool:
        """Return whether `descend` supports the options `sgd` and batches of these sizes, and is faster with them than torch."""
        plain = (
            not (sgd.momentum or sgd.weight_decay or sgd.clip or sgd.proximal or sgd.augment)
            and sgd.precision == "float32"
        )
        if not plain or not min(sizes) or not (self.flattens or data.single_input.dim() == 2):
            return False
        return regression.is_faster(
            data.single_input, data.targets, self.outputs, self.inputs, max(sizes)
        )

    def descend(self, stack: Tensor, data: Data, positions: Sequence[Tensor], lr: float) -> Tensor:
        """Take an SGD step for each batch and client, and update the clients' parameters (rows of `stack`) in place.

        `positions` has a tensor [clients, batch size] for each step: the indices of the examples in `data`. Return each client's loss,
        measured before each step and averaged over the steps.
        """
        losses = regression.descend(
            stack,
            self.weights,
            self.biases,
            self.outputs,
            data.single_input,
            data.targets,
            torch.cat(list(positions), 1),
            [batch.shape[1] for batch in positions],
            lr,
        )
        return losses.mean(1)
