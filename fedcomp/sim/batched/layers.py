"""Layers of a stack of clients.

The examples of all clients are one axis, client after client. Most layers process each example separately, so only layers with parameters
need a batched form.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import convolutions, recurrent

LayerParameters = dict[str, Tensor]  # a layer's parameters by name, [m, *shape]
# (parameters, clients m, x [m·b, ...], ...) → outputs of the layer
LayerFunction = Callable[..., object]

# Up to this number of tokens, a product replaces the lookup on CUDA, whose gradients are added in no fixed order.
MAX_PRODUCT_TOKENS = 4096

RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def batched_layer(layer: nn.Module, convolution: str) -> LayerFunction | None:
    """Return the function that runs a layer for a stack; None for a layer without one.

    `convolution`: preferred form of convolutions, a key of CONVOLUTIONS.
    """
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
        return _convolution(layer, convolution)
    if type(layer) is nn.Embedding and not (
        layer.sparse or layer.scale_grad_by_freq or layer.max_norm is not None
    ):
        return lambda own, m, x: _embedded(layer, own["weight"], x)
    if type(layer) is nn.LSTM and recurrent.supports(layer):
        return lambda own, m, x, state=None: recurrent.lstm(layer, own, m, x, state)
    return None


def linear(own: LayerParameters, m: int, x: Tensor) -> Tensor:
    """Run nn.Linear for a stack."""
    rows, weight, bias = convolutions.as_autocast(
        x.reshape(m, -1, x.shape[-1]), own["weight"], own.get("bias")
    )
    out: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    """Rows [m, b, i], weights [m, o, i], biases [m, o] → [m, b, o].

    The gradient of the weights is contiguous, unlike that of autograd, so that the step takes half the time.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        if bias is None:
            return torch.bmm(rows, weight.mT)
        return torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad_out, weight) if needs_rows else None,
            torch.bmm(grad_out.mT, rows) if needs_weight else None,
            grad_out.sum(1) if needs_bias else None,
        )


def _has_no_state(layer: nn.Module) -> bool:
    """Return whether a layer is defined by torch and has no parameters, buffers or inner layers."""
    of_torch = type(layer).__module__.startswith("torch.nn.modules.")
    return of_torch and not layer.state_dict() and not list(layer.children())


def _scaled(x: Tensor, own: LayerParameters, m: int, first: int) -> Tensor:
    """Return x [m·b, ...] times weights [m, ...] plus biases [m, ...], which belong to the axes of x from `first` on."""
    if not own:
        return x
    rest = [1] * (x.dim() - first - own["weight"].dim() + 1)
    shaped = {
        name: value.reshape(m, *[1] * first, *value.shape[1:], *rest) for name, value in own.items()
    }
    stack, weight = x.unflatten(0, (m, -1)), shaped["weight"]
    out = torch.addcmul(shaped["bias"], stack, weight) if "bias" in shaped else stack * weight
    return out.flatten(0, 1)


def _convolution(layer: nn.Conv2d, preferred: str) -> LayerFunction | None:
    name = preferred if convolutions.supports(layer, preferred) else "grouped"
    if not convolutions.supports(layer, name):
        return None
    convolve = convolutions.CONVOLUTIONS[name]
    return lambda own, m, x: convolve(layer, x, own["weight"], own.get("bias"))


def _embedded(layer: nn.Embedding, weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the rows of weights [m, v, d] for tokens [m·b, ...]."""
    m, v, d = weight.shape
    if layer.padding_idx is not None:  # the row of the padding has no gradient
        weight = torch.where(
            torch.arange(v, device=weight.device).view(-1, 1) == layer.padding_idx,
            weight.detach(),
            weight,
        )
    embed = embed_by_product if weight.is_cuda and v <= MAX_PRODUCT_TOKENS else embed_by_lookup
    return embed(weight, tokens.reshape(m, -1)).view(*tokens.shape, d)


def embed_by_lookup(weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the rows [m, t, d] of weights [m, v, d] for tokens [m, t]."""
    m, v, _ = weight.shape
    return F.embedding(
        tokens + v * torch.arange(m, device=weight.device).unsqueeze(1), weight.flatten(0, 1)
    )


def embed_by_product(weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the rows [m, t, d] of weights [m, v, d] for tokens [m, t], by a product with one-hot vectors."""
    return torch.bmm(F.one_hot(tokens, weight.shape[1]).to(weight.dtype), weight)
