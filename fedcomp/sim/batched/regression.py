"""A model that is one linear layer under the cross-entropy: softmax regression, whose steps have kernels of their own on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...clients.local_sgd import LocalSGD
from ...kernels import regression
from ...layout import Layout
from ...tasks.base import Data, Task
from .chains import chain


@dataclass
class Regression:
    """Where in a client's vector the weights are, and the biases if there are some."""

    layer: nn.Linear
    weights: int
    biases: int | None
    flat: bool  # examples are flattened first
    _seen: Tensor | None = None  # targets that are known to be those of classes

    @classmethod
    def of(cls, task: Task, model: nn.Module, layout: Layout) -> "Regression | None":
        """None for other models and losses, and where something of the layer is frozen."""
        layers = [layer for layer in chain(model) if type(layer) is not nn.Identity]
        if task.loss is not F.cross_entropy or [type(layer) for layer in layers[-1:]] != [nn.Linear]:
            return None
        flat, layer = [type(layer) for layer in layers[:-1]] == [nn.Flatten], layers[-1]
        if len(layers) > 1 and not flat or any(p.dtype != torch.float32 or not p.requires_grad for p in layer.parameters()):
            return None
        names = {parameter: name for name, parameter in model.named_parameters()}
        offsets = {entry.name: entry.offset for entry in layout}
        return cls(layer, offsets[names[layer.weight]], offsets[names[layer.bias]] if layer.bias is not None else None, flat)

    def suits(self, data: Data, sizes: Sequence[int], sgd: LocalSGD) -> bool:
        """Whether `descend` does what is asked, with batches of these sizes."""
        plain = not (sgd.momentum or sgd.weight_decay or sgd.clip or sgd.proximal or sgd.augment) and sgd.precision == "float32"
        outputs = self.layer.out_features
        if not plain or not (self.flat or data.inputs.dim() == 2) or not regression.suits(data.inputs, data.targets, outputs, max(sizes)):
            return False
        if self._seen is not data.targets:
            if data.targets.min() < 0 or data.targets.max() >= outputs:
                return False
            self._seen = data.targets
        return True

    def descend(self, stack: Tensor, data: Data, positions: Sequence[Tensor], lr: float) -> Tensor:
        """A step on each of the batches, positions [m, b], in place for stack [m, n]. Returns the mean of the losses before them [m]."""
        sizes, outputs = [batch.shape[1] for batch in positions], self.layer.out_features
        together = torch.cat(list(positions), 1)
        losses = regression.descend(stack, self.weights, self.biases, outputs, data.inputs, data.targets, together, sizes, lr)
        return losses.mean(1)
