"""A convolution, a ReLU and a maximum over patches as one layer, on a CPU.

    max(relu(x)) = relu(max(x)):  the maximum first, since the ReLU then has fewer elements
    relu(max(conv(x))):           most outputs of the convolution have no gradient, and the products with it leave them out

The first changes no bit. The second is for large convolutions (kernels/pooled.py); its gradients are sums in another order.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels import pooled

LAYERS = [nn.Conv2d, nn.ReLU, nn.MaxPool2d]


class PooledConvolution(nn.Module):
    """relu(maximum(convolution(x))); both layers stay those of the model."""

    def __init__(self, convolution: nn.Conv2d, maximum: nn.MaxPool2d):
        super().__init__()
        self.convolution, self.maximum = convolution, maximum
        c, m = convolution, maximum
        dense = (
            c.groups == 1
            and set(c.stride) | set(c.dilation) == {1}
            and c.padding_mode == "zeros"
            and not isinstance(c.padding, str)
        )
        apart = m.kernel_size == m.stride and not m.padding and m.dilation == 1
        self.suits = dense and apart and m.kernel_size not in (1, (1, 1))

    def forward(self, x: Tensor) -> Tensor:
        c, m = self.convolution, self.maximum
        size = m.kernel_size
        patch = (size, size) if isinstance(size, int) else tuple(size)
        if (
            not self.suits
            or torch.is_autocast_enabled("cpu")
            or x.dim() != 4
            or not pooled.suits(x, c.weight, c.padding, patch)
        ):
            return F.relu(m(c(x)))
        return _Pooled.apply(x, c.weight, c.bias, c.padding, patch, m.ceil_mode)


class _Pooled(torch.autograd.Function):
    """The ReLU of the maxima of a convolution's outputs, with the gradients of all three."""

    @staticmethod
    def forward(ctx, x, weight, bias, padding, patch, ceil):
        outputs = F.conv2d(x, weight, bias, padding=padding)
        maxima, places = F.max_pool2d(outputs, patch, ceil_mode=ceil, return_indices=True)
        result = F.relu(maxima)
        ctx.save_for_backward(x, weight, places, result)
        ctx.padding = padding
        return result

    @staticmethod
    def backward(ctx, slopes):
        x, weight, places, result = ctx.saved_tensors
        slopes = slopes.masked_fill(result <= 0, 0.0)  # NaN is not masked
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


def fused(model: nn.Module) -> nn.Module:
    """Return nn.Sequential with the layers of `model`, its convolutions that pass a ReLU and a maximum as one layer each.

    Return `model` itself if it is no nn.Sequential, if it has no such convolution, or if hooks watch its layers.
    """
    layers = list(_fused(list(_flat(model))))
    hooked = any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in model.modules()
    )
    if hooked or not any(isinstance(layer, PooledConvolution) for layer in layers):
        return model
    return nn.Sequential(*layers)


def _flat(model: nn.Module) -> Iterator[nn.Module]:
    if type(model) is nn.Sequential:
        for layer in model:
            yield from _flat(layer)
    else:
        yield model


def _fused(layers: Sequence[nn.Module]) -> Iterator[nn.Module]:
    while layers:
        first = [type(layer) for layer in layers[:3]] == LAYERS and not layers[2].return_indices
        yield PooledConvolution(layers[0], layers[2]) if first else layers[0]
        layers = layers[3 if first else 1 :]
