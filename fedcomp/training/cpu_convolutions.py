"""Faster convolutions on a CPU, by torch's channels_last memory format and by a layer that replaces convolution, ReLU and max-pooling.

The layer computes relu(max(conv(x))), which equals max(relu(conv(x))) bit for bit, but applies the ReLU to fewer elements. Max-pooling
makes most gradients of the convolution's outputs zero. For large convolutions, the backward pass skips these zeros (kernels/pooled.py).
The resulting gradients differ from torch's by rounding, because they are summed in another order.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels import pooled

# Part of torch's error message for a `view` of activations in the channels_last format.
NOT_CONTIGUOUS = "view size is not compatible"


def supports_channels_last(model: nn.Module) -> bool:
    """Return whether a model has convolutions, and all of them are safe in the channels_last format.

    In this format, torch 2.13 writes outside of its buffers if a strided 1×1 convolution has 2 to 5 input channels and the CPU has AVX2.
    """
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return bool(convolutions) and all(
        max(c.kernel_size) > 1 or max(c.stride) == 1 or c.in_channels // c.groups >= 8
        for c in convolutions
    )


def set_memory_format(model: nn.Module, channels_last: bool) -> None:
    """Convert the parameters of a model to the channels_last or to the contiguous format."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    model.to(memory_format=memory_format)  # type: ignore[call-overload]


FUSIBLE = [nn.Conv2d, nn.ReLU, nn.MaxPool2d]  # types of layers that a PooledConvolution replaces


class PooledConvolution(nn.Module):
    """A layer that computes relu(maximum(convolution(x)))."""

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
        disjoint = m.kernel_size == m.stride and not m.padding and m.dilation == 1
        self.is_supported = dense and disjoint and m.kernel_size not in (1, (1, 1))

    def forward(self, x: Tensor) -> Tensor:
        c, m = self.convolution, self.maximum
        if self.is_supported and not torch.is_autocast_enabled("cpu") and x.dim() == 4:
            padding, patch = _pair(c.padding), _pair(m.kernel_size)
            if pooled.is_faster(x, c.weight, padding, patch):
                return _PooledFunction.apply(  # type: ignore[no-untyped-call]
                    x, c.weight, c.bias, padding, patch, m.ceil_mode
                )
        return F.relu(m(c(x)))


class _PooledFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: tuple[int, int],
        patch: tuple[int, int],
        ceil_mode: bool,
    ) -> Tensor:
        outputs = F.conv2d(x, weight, bias, padding=padding)
        maxima, indices = F.max_pool2d(outputs, patch, ceil_mode=ceil_mode, return_indices=True)
        result = F.relu(maxima)
        ctx.save_for_backward(x, weight, indices, result)
        ctx.padding = padding
        return result

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, indices, result = ctx.saved_tensors
        # The gradient of the ReLU. `<=` is false for NaN, so the gradient of a NaN is not set to zero.
        grad_out = grad_out.masked_fill(result <= 0, 0.0)
        grad_x, grad_weight = pooled.gradients(
            x, weight, grad_out, indices, ctx.padding, ctx.needs_input_grad[0]
        )
        grad_bias = grad_out.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None


def fused(model: nn.Module) -> nn.Module:
    """Return an nn.Sequential in which a PooledConvolution replaces each sequence of convolution, ReLU and max-pooling in `model`.

    Return `model` itself if it is not an nn.Sequential, contains no such sequence, or has hooks.
    """
    layers = list(_fused(list(flat_layers(model))))
    if has_hooks(model) or not any(isinstance(layer, PooledConvolution) for layer in layers):
        return model
    return nn.Sequential(*layers)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def has_hooks(model: nn.Module) -> bool:
    """Return whether a layer of the model has forward or backward hooks."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in model.modules()
    )


def flat_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of nested nn.Sequentials in order. A module of another type counts as one layer."""
    if type(model) is nn.Sequential:
        for layer in model:
            yield from flat_layers(layer)
    else:
        yield model


def _fused(layers: Sequence[Any]) -> Iterator[nn.Module]:
    while layers:
        types = [type(layer) for layer in layers[:3]]
        if types == FUSIBLE and not layers[2].return_indices:
            yield PooledConvolution(layers[0], layers[2])
            layers = layers[3:]
        else:
            yield layers[0]
            layers = layers[1:]
