"""The gradients of many clients' models at once, computed layer by layer for nn.Sequential and by torch.func.vmap for other models.

For nn.Sequential, the examples of all clients are concatenated in one dimension, client after client. Layers without parameters process
these examples like one batch. Layers with parameters are replaced by functions that use the weights of each client for its own examples. In
shapes, m is the number of clients and b is the batch size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from ...tasks.base import Task
from ...training.cpu_convolutions import flat_layers, has_hooks
from ...training.local_sgd import Tensors

# Maps the name of a parameter to its values for m clients, [m, *shape].
Parameters = dict[str, Tensor]
# Function of (parameters, inputs, targets) that returns the gradients and the losses of all clients.
Gradients = Callable[[Parameters, Tensor, Tensor], tuple[Tensors, Tensor]]
# Function of (parameters of a layer, m, inputs [m·b, ...]) that returns the outputs of the layer.
LayerFunction = Callable[[Parameters, int, Tensor], Tensor]

# Names of the methods of `layered_gradients` and `mapped_gradients`.
LAYERED, MAPPED = "layered", "mapped"
IGNORED = -100  # target value of the examples that cross_entropy ignores
# Layers that draw random numbers. `_DropoutNd` is the base class of all dropout layers.
RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def mapped_gradients(task: Task, model: nn.Module) -> Gradients:
    """Return a function that computes the gradients of many clients' models with torch.func.vmap."""

    def loss(parameters: Parameters, inputs: Tensor, targets: Tensor) -> Tensor:
        return task.criterion(functional_call(model, parameters, (inputs,)), targets)

    mapped = vmap(grad_and_value(loss))

    def gradients(
        parameters: Parameters, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensors, Tensor]:
        gradient, losses = mapped(parameters, inputs, targets)
        return [gradient[name] for name in parameters], losses

    return gradients


def layered_gradients(task: Task, model: nn.Module) -> Gradients | None:
    """Return a function that computes the gradients of many clients' nn.Sequential models layer by layer.

    Return None if `batched_layer` does not support a layer, if a layer has hooks, or if a parameter is not float32.
    """
    layers = list(flat_layers(model))
    functions = [function for layer in layers if (function := batched_layer(layer))]
    if has_hooks(model) or len(functions) < len(layers):
        return None
    if any(p.dtype != torch.float32 for p in model.parameters()):
        return None
    names = {p: name for name, p in model.named_parameters()}
    # For each layer, a dict from a parameter's name in the layer to (name in the model, parameter).
    layer_parameters = [
        {key: (names[p], p) for key, p in layer.named_parameters()} for layer in layers
    ]

    def gradients(
        parameters: Parameters, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensors, Tensor]:
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        m, x = len(inputs), inputs.flatten(0, 1)
        with torch.enable_grad():
            for function, params in zip(functions, layer_parameters, strict=True):
                weights = {  # frozen parameters are the same for all clients
                    key: leaves[name] if name in leaves else p.detach().expand(m, *p.shape)
                    for key, (name, p) in params.items()
                }
                x = function(weights, m, x)
            outputs = x.unflatten(0, (m, -1))
        losses, grad_outputs = losses_of(task, outputs.detach(), targets)
        return torch.autograd.grad(
            outputs, list(leaves.values()), grad_outputs, allow_unused=True, materialize_grads=True
        ), losses

    return gradients


def losses_of(task: Task, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each client's loss, and the gradients of the losses with respect to the models' `outputs`.

    The losses of bfloat16 and float16 outputs are float32. If cross_entropy ignores every target of a client, the client's loss is NaN and
    its gradient is zero, as in torch.
    """
    if outputs.dtype in (torch.bfloat16, torch.float16):
        losses, gradient = losses_of(task, outputs.float(), targets)
        return losses, gradient.to(outputs.dtype)
    if task.criterion is not F.cross_entropy or outputs.dim() != 3 or targets.dim() != 2:
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            losses = vmap(task.criterion)(leaf, targets)
        return losses.detach(), torch.autograd.grad(losses, leaf, torch.ones_like(losses))[0]
    counted = targets != IGNORED
    target = targets.where(counted, 0).unsqueeze(-1)
    # The weight of each target in the client's mean loss: 1 / number of counted targets, or 0 for ignored targets.
    weight = counted / counted.sum(1, keepdim=True).clamp(min=1)
    weight = weight.to(outputs.dtype).unsqueeze(-1)
    logs = outputs.log_softmax(-1)
    losses = -(logs.gather(-1, target) * weight).sum((1, 2)) / counted.any(1)
    return losses, logs.exp_().mul_(weight).scatter_add_(-1, target, -weight)


def batched_layer(layer: nn.Module) -> LayerFunction | None:
    """Return a function that runs a layer for many clients at once, or None if the layer is not supported."""
    is_torch_layer = type(layer).__module__.startswith("torch.nn.modules.")
    is_stateless = is_torch_layer and not layer.state_dict() and not list(layer.children())
    if is_stateless and not isinstance(layer, RANDOM):
        return lambda params, m, x: layer(x)
    if type(layer) is nn.Linear:
        return linear
    if type(layer) is nn.Embedding and not (
        layer.sparse or layer.scale_grad_by_freq or layer.max_norm is not None
    ):
        return lambda params, m, x: _embedded(layer, params["weight"], x)
    return None


def linear(params: Parameters, m: int, x: Tensor) -> Tensor:
    """Return the outputs of nn.Linear for m clients with different weights. `x` [m·b, ...] are the inputs, b examples for each client."""
    rows, weight, bias = x.reshape(m, -1, x.shape[-1]), params["weight"], params.get("bias")
    if torch.is_autocast_enabled(x.device.type):  # autocast does not cast the inputs of _Linear
        dtype = torch.get_autocast_dtype(x.device.type)
        rows, weight = rows.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    out: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    """A linear layer for batches of b examples of m clients: inputs [m, b, in], weights [m, out, in], biases [m, out], outputs [m, b, out].

    Unlike the gradient that autograd computes, the gradient of the weights is contiguous, which halves the time of a training step.
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


def _embedded(layer: nn.Embedding, weight: Tensor, tokens: Tensor) -> Tensor:
    m, v, d = weight.shape
    if (
        layer.padding_idx is not None
    ):  # as in torch, the embedding of the padding token gets no gradient
        padding = torch.arange(v, device=weight.device).view(-1, 1) == layer.padding_idx
        weight = torch.where(padding, weight.detach(), weight)
    rows = tokens.reshape(m, -1) + v * torch.arange(m, device=weight.device).unsqueeze(1)
    return F.embedding(rows, weight.flatten(0, 1)).view(*tokens.shape, d)
