"""Convolutions of a stack of clients, each with its own weights, in two forms.

    grouped    the clients' channels side by side, [b, m·c, h, w], and a convolution of m groups
    products   the windows of the inputs as rows, [m, b·h'·w', k·k·c], and one batched product; channels last throughout

`products` needs k·k times the memory of its inputs temporarily. The windows are not kept, but cut again for the backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Pair = tuple[int, int]
# x [m·b, c, h, w], w [m, o, c, k, k], biases [m, o] → [m·b, o, h', w']
Convolution = Callable[[nn.Conv2d, Tensor, Tensor, Tensor | None], Tensor]


def grouped(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve by one convolution with a group for each client."""
    m = len(weight)
    side_by_side = x.unflatten(0, (m, -1)).transpose(0, 1).flatten(1, 2)
    flat = None if bias is None else bias.flatten()
    out = F.conv2d(
        side_by_side,
        weight.flatten(0, 1),
        flat,
        layer.stride,
        layer.padding,
        layer.dilation,
        m * layer.groups,
    )
    return out.unflatten(1, (m, -1)).transpose(0, 1).flatten(0, 1)


def products(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve by one batched product. The layer has one group. The result has its channels last in memory."""
    x, weight, bias = as_autocast(x, weight, bias)
    geometry = (_pair(layer.stride), _padding(layer), _pair(layer.dilation))
    x = x.permute(0, 2, 3, 1)
    out: Tensor = _Products.apply(x, weight, bias, *geometry)  # type: ignore[no-untyped-call]
    return out.view(len(x), *_size(x, weight, *geometry), -1).permute(0, 3, 1, 2)


def as_autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tensors in the precision of autocast, if it is on. Custom autograd functions need it."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


CONVOLUTIONS: dict[str, Convolution] = {"grouped": grouped, "products": products}


def supports(layer: nn.Conv2d, name: str) -> bool:
    """Return whether a layer has the batched form of this name."""
    symmetric = layer.padding != "same" or all(
        d * (k - 1) % 2 == 0 for d, k in zip(_pair(layer.dilation), layer.kernel_size, strict=True)
    )
    return layer.padding_mode == "zeros" and (
        name != "products" or (layer.groups == 1 and symmetric)
    )


class _Products(torch.autograd.Function):
    """x [m·b, h, w, c], weights [m, o, c, k, k], biases [m, o] → [m, b·h'·w', o]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.biased = (stride, padding, dilation), bias is not None
        rows = _windows(x, len(weight), _pair(weight.shape[-2:]), *ctx.geometry)
        return (
            torch.bmm(rows, _flat(weight))
            if bias is None
            else torch.baddbmm(bias.unsqueeze(1), rows, _flat(weight))
        )

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (m, o, c, kh, kw), grad_out = weight.shape, grad_out.contiguous()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            rows = _windows(x, m, (kh, kw), *ctx.geometry)
            grad_weight = torch.bmm(rows.mT, grad_out).view(m, kh, kw, c, o).permute(0, 4, 3, 1, 2)
        if ctx.biased and ctx.needs_input_grad[2]:
            grad_bias = grad_out.sum(1)
        if ctx.needs_input_grad[0]:
            grad_x = _input_gradient(
                grad_out.view(len(x), *_size(x, weight, *ctx.geometry), o),
                weight,
                x.shape,
                *ctx.geometry,
            )
        return grad_x, grad_weight, grad_bias, None, None, None


def _input_gradient(
    grad_out: Tensor, weight: Tensor, shape: torch.Size, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Return the gradient for x from the gradient [m·b, h', w', o] for the output."""
    m, o, c, kh, kw = weight.shape
    outer = (dilation[0] * (kh - 1) - padding[0], dilation[1] * (kw - 1) - padding[1])
    if stride == (1, 1) and min(outer) >= 0:  # a convolution with reversed weights
        reversed_weight = weight.flip(-1, -2).permute(0, 3, 4, 1, 2).reshape(m, kh * kw * o, c)
        rows = _windows(grad_out, m, (kh, kw), stride, outer, dilation)
        return torch.bmm(rows, reversed_weight).view(shape)
    windows = torch.bmm(grad_out.view(m, -1, o), _flat(weight).mT)
    windows = windows.view(*grad_out.shape[:3], kh, kw, c)
    x = grad_out.new_zeros(shape[0], shape[1] + 2 * padding[0], shape[2] + 2 * padding[1], c)
    for i in range(kh):
        for j in range(kw):
            vertical = _positions(i, grad_out.shape[1], stride[0], dilation[0])
            horizontal = _positions(j, grad_out.shape[2], stride[1], dilation[1])
            x[:, vertical, horizontal] += windows[..., i, j, :]
    return x[:, padding[0] : padding[0] + shape[1], padding[1] : padding[1] + shape[2]]


def _windows(
    x: Tensor, m: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Return the windows of x [m·b, h, w, c] as rows, [m, b·h'·w', k·k·c]."""
    c = x.shape[-1]
    if any(padding):
        x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    if kernel == (1, 1) and stride == (1, 1):
        return x.reshape(m, -1, c)
    x = x.contiguous()
    n, row, column, _ = x.stride()
    height, width = (_out(x.shape[i + 1], kernel[i], stride[i], dilation[i]) for i in range(2))
    strides = (n, row * stride[0], column * stride[1], row * dilation[0], column * dilation[1], 1)
    return x.as_strided((len(x), height, width, *kernel, c), strides).reshape(
        m, -1, kernel[0] * kernel[1] * c
    )


def _flat(weight: Tensor) -> Tensor:
    """[m, o, c, k, k] → [m, k·k·c, o]."""
    return weight.permute(0, 3, 4, 2, 1).flatten(1, 3)


def _size(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Pair:
    """Return height and width of the output for x [m·b, h, w, c]."""
    height, width = (
        _out(x.shape[i + 1] + 2 * padding[i], weight.shape[i + 3], stride[i], dilation[i])
        for i in range(2)
    )
    return height, width


def _out(size: int, kernel: int, stride: int, dilation: int) -> int:
    return (size - dilation * (kernel - 1) - 1) // stride + 1


def _positions(tap: int, count: int, stride: int, dilation: int) -> slice:
    """Return the positions of the input that a tap of the kernel is multiplied with, for `count` outputs."""
    return slice(tap * dilation, tap * dilation + stride * (count - 1) + 1, stride)


def _pair(value: int | tuple[int, ...]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _padding(layer: nn.Conv2d) -> Pair:
    if not isinstance(layer.padding, str):
        return _pair(layer.padding)
    if layer.padding == "valid":
        return 0, 0
    dilation, kernel = _pair(layer.dilation), _pair(layer.kernel_size)
    return dilation[0] * (kernel[0] - 1) // 2, dilation[1] * (kernel[1] - 1) // 2
