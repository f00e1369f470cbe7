"""Chains of layers whose forward pass is known, so that a step of SGD can be had for less than autograd's price.

    max(relu(x)) = relu(max(x)):  of a ReLU and a maximum over patches, the maximum first: the ReLU has the fewer elements
    relu(max(conv(x))):            most outputs of the convolution have no gradient, and are left out of the products with it
    W ← W − η·gᵀx:                 the descent of a linear layer is in the product that gives its gradient, which is never written down

The first changes no bit. The others are for large layers; they differ from gradient and descent apart by the rounding of sums.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels import pooled

LARGE = 1 << 16  # elements of a weight
FUNCTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.Linear,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.Flatten,
    nn.Unflatten,
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.Dropout,
    nn.Dropout2d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.GroupNorm,
    nn.LayerNorm,
)


@dataclass
class Product:
    """What a linear layer was given [b, i], and gave [b, o], in a forward pass."""

    layer: nn.Linear
    inputs: Tensor
    outputs: Tensor

    def descend(self, slopes: Tensor, lr: float) -> None:
        """A step along the gradient that follows from that of the outputs [b, o]."""
        slopes = slopes.flatten(0, -2).to(self.layer.weight.dtype)
        self.layer.weight.addmm_(slopes.T, self.inputs.to(slopes.dtype), alpha=-lr)
        if self.layer.bias is not None:
            self.layer.bias.add_(slopes.sum(0), alpha=-lr)


class Pooled(nn.Module):
    """A convolution, a maximum over patches that do not overlap, and a ReLU."""

    def __init__(self, convolution: nn.Conv2d, maximum: nn.MaxPool2d):
        super().__init__()
        self.convolution, self.maximum = convolution, maximum

    @staticmethod
    def of(layers: Sequence[nn.Module]) -> "Pooled | None":
        """None for other layers than these, and where a convolution skips or groups what it is given."""
        if [type(layer) for layer in layers] != [nn.Conv2d, nn.MaxPool2d, nn.ReLU]:
            return None
        c, m, _ = layers
        dense = (
            c.groups == 1
            and set(c.stride) | set(c.dilation) == {1}
            and c.padding_mode == "zeros"
            and not isinstance(c.padding, str)
        )
        apart = (
            m.kernel_size == m.stride and not m.padding and m.dilation == 1 and not m.return_indices
        )
        return Pooled(c, m) if dense and apart and m.kernel_size not in (1, (1, 1)) else None

    def forward(self, x: Tensor) -> Tensor:
        c, m = self.convolution, self.maximum
        patch = (
            (m.kernel_size, m.kernel_size)
            if isinstance(m.kernel_size, int)
            else tuple(m.kernel_size)
        )
        if (
            torch.is_autocast_enabled("cpu")
            or x.dim() != 4
            or not pooled.suits(x, c.weight, c.padding, patch)
        ):
            return F.relu(m(c(x)))
        return _Pooled.apply(x, c.weight, c.bias, c.padding, patch, m.ceil_mode)


class _Pooled(torch.autograd.Function):
    """The ReLU of the maxima of a convolution's outputs, with the gradients of all three."""

    @staticmethod
    def forward(ctx, x, weight, bias, padding, patch, ceil):
        result, places = pooled.outputs(x, weight, bias, padding, patch, ceil)
        ctx.save_for_backward(x, weight, places, result)
        ctx.padding = padding
        return result

    @staticmethod
    def backward(ctx, slopes):
        x, weight, places, result = ctx.saved_tensors
        slopes = slopes.masked_fill(result <= 0, 0.0)  # what is no number has a gradient
        of_x, of_weight = pooled.gradients(
            x, weight, slopes, places, ctx.padding, ctx.needs_input_grad[0]
        )
        return (
            of_x,
            of_weight,
            slopes.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


class Chain:
    """The layers of a model in the order in which they are called."""

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = layers
        uses = Counter(parameter for layer in layers for parameter in layer.parameters())
        alone = [
            layer
            for layer in layers
            if all(uses[p] == 1 and p.requires_grad for p in layer.parameters())
        ]
        self.products = [layer for layer in alone if _is_product(layer)]
        self._theirs = {parameter for layer in self.products for parameter in layer.parameters()}

    @classmethod
    def of(cls, model: nn.Module) -> "Chain | None":
        """None for a model that is something else than a chain of layers that are known here. Its layers write in place no more."""
        layers = list(_flat(model))
        hooked = any(
            m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
            for m in model.modules()
        )
        if hooked or not all(type(layer) in FUNCTIONS for layer in layers):
            return None
        for layer in layers:
            if getattr(layer, "inplace", False):
                layer.inplace = (
                    False  # the outputs of the layer before are wanted, for their gradient
                )
        return cls(_together(_maximum_first(layers)))

    def others(self, parameters: Collection[nn.Parameter]) -> list[nn.Parameter]:
        """Those that no product descends."""
        return [parameter for parameter in parameters if parameter not in self._theirs]

    def forward(self, x: Tensor) -> tuple[Tensor, list[Product]]:
        """The outputs, and the products that descend by themselves."""
        products: list[Product] = []
        for layer in self.layers:
            given, x = x, layer(x)
            if layer in self.products:
                products.append(Product(layer, given.detach().flatten(0, -2), x))
        return x, products


def _flat(model: nn.Module) -> Iterator[nn.Module]:
    if type(model) is nn.Sequential:
        for layer in model:
            yield from _flat(layer)
    else:
        yield model


def _maximum_first(layers: Sequence[nn.Module]) -> list[nn.Module]:
    found = list(layers)
    for i, (layer, after) in enumerate(zip(layers, layers[1:], strict=False)):
        if (
            type(layer) is nn.ReLU
            and type(after) in (nn.MaxPool1d, nn.MaxPool2d)
            and not after.return_indices
        ):
            found[i], found[i + 1] = after, layer
    return found


def _together(layers: Sequence[nn.Module]) -> list[nn.Module]:
    found, left = [], list(layers)
    while left:
        found.append(Pooled.of(left[:3]) or left[0])
        del left[: 3 if isinstance(found[-1], Pooled) else 1]
    return found


def _is_product(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and layer.weight.numel() >= LARGE
        and layer.weight.dtype == torch.float32
    )
