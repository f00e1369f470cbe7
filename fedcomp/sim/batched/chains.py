"""Chains of nn.Linear and activations: backpropagation as batched products, written out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...tasks.base import Task
from .losses import Gradients, Parameters, losses_of

ACTIVATIONS = (
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
)


def chain(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that is a chain of nn.Linear and what leaves the example's axis alone; empty for other models."""
    layers = list(model) if type(model) is nn.Sequential else [model]
    plain = (nn.Linear, nn.Flatten, *ACTIVATIONS)
    fits = all(
        type(m) in plain and (type(m) is not nn.Flatten or (m.start_dim, m.end_dim) == (1, -1))
        for m in layers
    )
    return layers if fits and not hooked(model) else []


def hooked(model: nn.Module) -> bool:
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in model.modules()
    )


def chain_gradients(task: Task, model: nn.Module, layers: Sequence[nn.Module]) -> Gradients:
    """Backpropagation as batched products; torch.autograd only where a layer is no nn.Linear. Calling it costs more than they do."""
    names = {
        parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    first = next(
        (i for i, layer in enumerate(layers) if names.keys() & set(layer.parameters())), len(layers)
    )

    def gradients(
        parameters: Parameters, inputs: Tensor, targets: Tensor
    ) -> tuple[Sequence[Tensor], Tensor]:
        def stacked(parameter: nn.Parameter) -> Tensor:
            return (
                parameters[names[parameter]]
                if parameter in names
                else parameter.detach().expand(len(inputs), *parameter.shape)
            )

        given, outputs = [], inputs  # what each layer was given
        for layer in layers:
            given.append(outputs)
            outputs = (
                _linear(outputs, layer, stacked)
                if isinstance(layer, nn.Linear)
                else _activated(layer, outputs)
            )
        losses, slope = losses_of(task, outputs, targets)
        found: Parameters = {}
        for i in reversed(range(first, len(layers))):
            layer, x = layers[i], given[i]
            if not isinstance(layer, nn.Linear):
                slope = _vjp(lambda leaf, layer=layer: _activated(layer, leaf), x, slope)
                continue
            rows, slopes = x.flatten(1, -2), slope.flatten(1, -2)
            if layer.weight in names:
                _add(found, names[layer.weight], torch.bmm(slopes.mT, rows))
            if layer.bias in names:
                _add(found, names[layer.bias], slopes.sum(1))
            if i > first:
                slope = torch.bmm(slopes, stacked(layer.weight)).view(x.shape)
        return [found[name] for name in parameters], losses

    return gradients


def _linear(x: Tensor, layer: nn.Linear, stacked: Callable[[nn.Parameter], Tensor]) -> Tensor:
    """x [m, ..., i] → [m, ..., o], by weights [m, o, i] and biases [m, o]."""
    rows, weight = x.flatten(1, -2), stacked(layer.weight).mT
    out = (
        torch.bmm(rows, weight)
        if layer.bias is None
        else torch.baddbmm(stacked(layer.bias).unsqueeze(1), rows, weight)
    )
    return out.view(*x.shape[:-1], -1)


def _activated(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, nn.Flatten):
        return x.flatten(2)
    return layer(
        x.clone() if getattr(layer, "inplace", False) else x
    )  # x is wanted once more, for the gradient


def _vjp(function: Callable[[Tensor], Tensor], x: Tensor, slope: Tensor) -> Tensor:
    """The gradient for x, of what has the gradient `slope` for function(x)."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        outputs = function(leaf)
    return torch.autograd.grad(outputs, leaf, slope)[0]


def _add(found: Parameters, name: str, gradient: Tensor) -> None:
    found[name] = found[name] + gradient if name in found else gradient
