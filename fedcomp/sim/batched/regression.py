"""Softmax regression, one linear layer with cross-entropy, whose steps have kernels on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels import regression
from ...layout import Layout
from ...tasks.base import Task
from ...tasks.data import Data
from ...training.local_sgd import LocalSGD
from .traced import hooked


@dataclass(frozen=True)
class Regression:
    """The shape of the weights, and the positions of weights and biases in a client's vector."""

    outputs: int
    width: int
    weights: int
    biases: int | None
    flat: bool  # examples are flattened first

    @classmethod
    def of(cls, task: Task, model: nn.Module, layout: Layout) -> "Regression | None":
        """Return the regression of a model; None for other models and losses, and for frozen parameters."""
        layers = list(model) if type(model) is nn.Sequential else [model]
        layers = [layer for layer in layers if type(layer) is not nn.Identity]
        ends_linear = [type(layer) for layer in layers[-1:]] == [nn.Linear]
        if task.criterion is not F.cross_entropy or not ends_linear or hooked(model):
            return None
        flattens = [
            type(m) is nn.Flatten and (m.start_dim, m.end_dim) == (1, -1) for m in layers[:-1]
        ]
        layer = layers[-1]
        shape = layer.weight.shape  # out_features is not updated when a weight is replaced
        if flattens not in ([], [True]) or any(
            p.dtype != torch.float32 or not p.requires_grad for p in layer.parameters()
        ):
            return None
        if layer.bias is not None and layer.bias.shape != shape[:1]:
            return None
        names = {parameter: name for name, parameter in model.named_parameters()}
        offsets = {entry.name: entry.offset for entry in layout}
        biases = None if layer.bias is None else offsets[names[layer.bias]]
        return cls(*shape, offsets[names[layer.weight]], biases, bool(flattens))

    def suits(self, data: Data, sizes: Sequence[int], sgd: LocalSGD) -> bool:
        """Return whether `descend` can train batches of these sizes with these options."""
        plain = (
            not (sgd.momentum or sgd.weight_decay or sgd.clip or sgd.proximal or sgd.augment)
            and sgd.precision == "float32"
        )
        if not plain or not min(sizes) or not (self.flat or data.inputs.dim() == 2):
            return False
        return regression.suits(data.inputs, data.targets, self.outputs, self.width, max(sizes))

    def descend(self, stack: Tensor, data: Data, positions: Sequence[Tensor], lr: float) -> Tensor:
        """Take a step on each batch, positions [m, b], and change stack [m, n] in place. Return the mean loss before the steps [m]."""
        sizes, together = [batch.shape[1] for batch in positions], torch.cat(list(positions), 1)
        where = self.weights, self.biases, self.outputs
        return regression.descend(
            stack, *where, data.inputs, data.targets, together, sizes, lr
        ).mean(1)
