"""Layers of a stack of clients.

The examples of all clients are one axis, client after client. Most layers treat each example by itself, so only layers with parameters need
a batched form.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import convolutions, recurrent

Own = dict[str, Tensor]  # a layer's parameters by name, [m, *shape]
Rule = Callable[..., object]  # (parameters, clients m, x [m·b, ...], ...) → outputs of the layer

# With more tokens, CUDA adds the gradients of an embedding in no fixed order.
WIDEST_PRODUCT = 4096

RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def rule(layer: nn.Module, form: str) -> Rule | None:
    """Return how a layer is run for a stack, convolutions in this form if possible; None for a layer without a rule."""
    if _has_no_state(layer) and not isinstance(layer, RANDOM):
        return lambda own, m, x: layer(x)
    if type(layer) is nn.Linear:
        return linear
    if type(layer) is nn.GroupNorm:
        return lambda own, m, x: _scaled(
            F.group_norm(x, layer.num_groups, eps=layer.eps), own, m, 1
        )
    if type(layer) is nn.LayerNorm:
        shape = layer.normalized_shape
        return lambda own, m, x: _scaled(
            F.layer_norm(x, shape, eps=layer.eps), own, m, x.dim() - len(shape)
        )
    if type(layer) is nn.Conv2d:
        return _convolution(layer, form)
    if type(layer) is nn.Embedding and not (
        layer.sparse or layer.scale_grad_by_freq or layer.max_norm is not None
    ):
        return lambda own, m, x: _embedded(layer, own["weight"], x)
    if type(layer) is nn.LSTM and recurrent.fits(layer):
        return lambda own, m, x, state=None: recurrent.lstm(layer, own, m, x, state)
    return None


def linear(own: Own, m: int, x: Tensor) -> Tensor:
    rows, weight, bias = convolutions.as_autocast(
        x.reshape(m, -1, x.shape[-1]), own["weight"], own.get("bias")
    )
    return _Linear.apply(rows, weight, bias).view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    """Rows [m, b, i], weights [m, o, i], biases [m, o] → [m, b, o].

    The gradient of the weights is contiguous, unlike autograd's, and the step on it takes half the time.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        if bias is None:
            return torch.bmm(rows, weight.mT)
        return torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)

    @staticmethod
    def backward(ctx, slopes: Tensor):
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        return (
            torch.bmm(slopes, weight) if of_rows else None,
            torch.bmm(slopes.mT, rows) if of_weight else None,
            slopes.sum(1) if of_bias else None,
        )


def _has_no_state(layer: nn.Module) -> bool:
    """Return whether a layer is one of torch's without parameters, buffers and inner layers."""
    of_torch = type(layer).__module__.startswith("torch.nn.modules.")
    return of_torch and not layer.state_dict() and not list(layer.children())


def _scaled(x: Tensor, own: Own, m: int, first: int) -> Tensor:
    """Return x [m·b, ...] times weights plus biases [m, ...], which belong to its axes from `first` on."""
    if not own:
        return x
    rest = [1] * (x.dim() - first - own["weight"].dim() + 1)
    weight, bias = (
        own[name].reshape(m, *[1] * first, *own[name].shape[1:], *rest) if name in own else None
        for name in ("weight", "bias")
    )
    stack = x.unflatten(0, (m, -1))
    return (stack * weight if bias is None else torch.addcmul(bias, stack, weight)).flatten(0, 1)


def _convolution(layer: nn.Conv2d, form: str) -> Rule | None:
    form = form if convolutions.fits(layer, form) else "grouped"
    if not convolutions.fits(layer, form):
        return None
    return lambda own, m, x: convolutions.FORMS[form](layer, x, own["weight"], own.get("bias"))


def _embedded(layer: nn.Embedding, weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the rows of weights [m, v, d] for tokens [m·b, ...]."""
    m, v, d = weight.shape
    if layer.padding_idx is not None:  # its row is used and does not learn
        weight = torch.where(
            torch.arange(v, device=weight.device).view(-1, 1) == layer.padding_idx,
            weight.detach(),
            weight,
        )
    named = tokens.reshape(m, -1)
    rows = (
        multiplied(weight, named)
        if weight.is_cuda and v <= WIDEST_PRODUCT
        else looked_up(weight, named)
    )
    return rows.view(*tokens.shape, d)


def looked_up(weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the rows [m, t, d] of weights [m, v, d] for tokens [m, t]."""
    m, v, _ = weight.shape
    return F.embedding(
        tokens + v * torch.arange(m, device=weight.device).unsqueeze(1), weight.flatten(0, 1)
    )


def multiplied(weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the same by a product with one-hot vectors."""
    return torch.bmm(F.one_hot(tokens, weight.shape[1]).to(weight.dtype), weight)
