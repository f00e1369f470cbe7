"""A model that is one linear layer under the cross-entropy: softmax regression, whose steps have kernels of their own on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels import regression
from ...layout import Layout
from ...tasks.base import Data, Task
from ...training.local_sgd import LocalSGD
from .traced import hooked


@dataclass(frozen=True)
class Regression:
    """The shape of the weights, and where in a client's vector they are, and the biases if there are some."""

    outputs: int
    width: int
    weights: int
    biases: int | None
    flat: bool  # examples are flattened first

    @classmethod
    def of(cls, task: Task, model: nn.Module, layout: Layout) -> "Regression | None":
        """None for other models and losses, and where something of the layer is frozen."""
        layers = list(model) if type(model) is nn.Sequential else [model]
        layers = [layer for layer in layers if type(layer) is not nn.Identity]
        ends_linear = [type(layer) for layer in layers[-1:]] == [nn.Linear]
        if task.loss is not F.cross_entropy or not ends_linear or hooked(model):
            return None
        flattens = [
            type(m) is nn.Flatten and (m.start_dim, m.end_dim) == (1, -1) for m in layers[:-1]
        ]
        layer = layers[-1]
        shape = layer.weight.shape  # of a layer whose weight was replaced, out_features is another
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
        """Whether `descend` does what is asked, with batches of these sizes."""
        plain = (
            not (sgd.momentum or sgd.weight_decay or sgd.clip or sgd.proximal or sgd.augment)
            and sgd.precision == "float32"
        )
        if not plain or not min(sizes) or not (self.flat or data.inputs.dim() == 2):
            return False
        return regression.suits(data.inputs, data.targets, self.outputs, self.width, max(sizes))

    def descend(self, stack: Tensor, data: Data, positions: Sequence[Tensor], lr: float) -> Tensor:
        """A step on each of the batches, positions [m, b], in place for stack [m, n]. Returns the mean of the losses before them [m]."""
        sizes, together = [batch.shape[1] for batch in positions], torch.cat(list(positions), 1)
        where = self.weights, self.biases, self.outputs
        return regression.descend(
            stack, *where, data.inputs, data.targets, together, sizes, lr
        ).mean(1)
