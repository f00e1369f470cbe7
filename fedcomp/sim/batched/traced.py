"""A model's forward pass, traced by torch.fx and run for a stack of clients layer by layer.

The examples of all clients are one axis, client after client. Most layers process each example separately, so only layers with parameters
need a batched form.

Tracing does not record side effects of a forward pass (blocks under no_grad or autocast, counters, random draws of other libraries), and
an operation may mix the examples of clients. A traced model is therefore used only if its gradients for two clients with different weights
agree with those of the model itself.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.func import vmap
from torch.nn import functional as F

from ...tasks.base import Task
from ...tasks.data import Data
from ...training.cpu_convolutions import has_hooks
from ...training.local_sgd import Tensors

Parameters = dict[str, Tensor]  # name → [m, *shape]
# parameters, inputs, targets → gradients, losses [m]
Gradients = Callable[[Parameters, Tensor, Tensor], tuple[Tensors, Tensor]]
# (parameters of the layer, clients m, x [m·b, ...]) → outputs of the layer
LayerFunction = Callable[[Parameters, int, Tensor], Tensor]

COMPARED_EXAMPLES = 8  # of each of two clients
TOLERANCE = 0.02  # of the gradient's norm; products on CUDA may have mantissas of 10 bits
IGNORED = -100  # the target that cross_entropy ignores
RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class TracedModel:
    """The operations of a traced forward pass. `functions`: the function of each layer, by its name."""

    def __init__(
        self, model: nn.Module, nodes: Sequence[fx.Node], functions: dict[str, LayerFunction]
    ):
        self.nodes, self.functions = nodes, functions
        layers = dict(model.named_modules())
        names = {p: name for name, p in model.named_parameters()}
        # By layer and name within the layer: the parameter and its name within the model.
        self.layer_parameters = {
            target: {
                key: (names[p], p) for key, p in layers[target].named_parameters(recurse=False)
            }
            for target in functions
        }

    def run(self, parameters: Parameters, m: int, x: Tensor) -> Tensor:
        """Return the model's outputs [m·b, ...] for x [m·b, ...], with the weights [m, *shape] of m clients; frozen ones are shared."""
        values: dict[fx.Node, Any] = {}
        for node in self.nodes:
            mapped: Any = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            (args, options), target = mapped, cast(Any, node.target)
            if node.op == "placeholder":
                values[node] = x
            elif node.op == "output":
                return args[0]
            elif node.op == "call_module":
                own = self._parameters_of(target, parameters, m)
                values[node] = self.functions[target](own, m, *args, **options)
            elif node.op == "call_method":
                values[node] = getattr(args[0], target)(*args[1:], **options)
            else:
                values[node] = target(*args, **options)
        raise AssertionError("a traced graph ends with its output")

    def _parameters_of(self, layer: str, parameters: Parameters, m: int) -> Parameters:
        """Return the parameters of a layer, [m, *shape]. Frozen parameters, which are not in `parameters`, are expanded."""
        return {
            key: parameters[name] if name in parameters else p.detach().expand(m, *p.shape)
            for key, (name, p) in self.layer_parameters[layer].items()
        }


def traced_model(model: nn.Module) -> TracedModel | None:
    """Return the traced model, or None if it cannot be traced or a layer has no batched form."""
    if has_hooks(model) or any(p.dtype != torch.float32 for p in model.parameters()):
        return None
    graph = _trace(model)
    if graph is None or any(node.op == "get_attr" for node in graph.nodes):
        return None
    layers = dict(model.named_modules())
    functions: dict[str, LayerFunction] = {}
    for name in [node.target for node in graph.nodes if node.op == "call_module"]:
        function = batched_layer(layers[name])
        if function is None:
            return None
        functions[name] = function
    return TracedModel(model, list(graph.nodes), functions) if functions else None


def traced_gradients(task: Task, model: nn.Module) -> Gradients | None:
    """Return a function that computes gradients by a traced model and torch.autograd; None if the model cannot be traced."""
    traced = traced_model(model)
    if traced is None:
        return None

    def gradients(
        parameters: Parameters, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensors, Tensor]:
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        with torch.enable_grad():
            outputs = traced.run(leaves, len(inputs), inputs.flatten(0, 1))
            outputs = outputs.unflatten(0, (len(inputs), -1))
        losses, grad_outputs = losses_of(task, outputs.detach(), targets)
        return torch.autograd.grad(
            outputs, list(leaves.values()), grad_outputs, allow_unused=True, materialize_grads=True
        ), losses

    return gradients


def matches_model(
    gradients: Gradients, task: Task, model: nn.Module, parameters: Parameters, data: Data
) -> bool:
    """Return whether `gradients` agree with those of the model itself, for two clients.

    One client has the first examples and the first client's weights, the other the last examples and perturbed weights, which remain in
    the model.
    """
    inputs, targets = (
        torch.stack([values[:COMPARED_EXAMPLES], values[-COMPARED_EXAMPLES:]])
        for values in (data.single_input, data.targets)
    )
    pair = {
        name: torch.stack([p[0], p[0] + _perturbation(p[0], seed)])
        for seed, (name, p) in enumerate(parameters.items())
    }
    try:
        traced, losses = gradients(pair, inputs, targets)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        return False
    own = dict(model.named_parameters())
    for row in range(2):
        with torch.no_grad():
            for name, p in pair.items():
                own[name].copy_(p[row])
        with torch.enable_grad():
            loss = task.criterion(model(inputs[row].clone()), targets[row])
        expected = torch.autograd.grad(
            loss, [own[name] for name in pair], allow_unused=True, materialize_grads=True
        )
        distance = _norm([a[row] - b for a, b in zip(traced, expected, strict=True)])
        if not (
            distance <= TOLERANCE * _norm(expected)
            and abs(losses[row] - loss.detach()) <= TOLERANCE * loss.detach().abs()
        ):
            return False
    return True


def losses_of(task: Task, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each client's loss [m], and its gradient with respect to the outputs [m, ...].

    Losses of bfloat16 and float16 outputs are float32. If cross_entropy ignores every target of a client, the loss is NaN and the
    gradient zero, as in torch.
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
    weight = counted / counted.sum(1, keepdim=True).clamp(min=1)  # of an example in the mean
    weight = weight.to(outputs.dtype).unsqueeze(-1)
    logs = outputs.log_softmax(-1)
    losses = -(logs.gather(-1, target) * weight).sum((1, 2)) / counted.any(1)
    return losses, logs.exp_().mul_(weight).scatter_add_(-1, target, -weight)


def _perturbation(weight: Tensor, seed: int) -> Tensor:
    """Return random numbers of about a tenth of the weights' standard deviation."""
    drawn = torch.randn(
        weight.shape, generator=torch.Generator().manual_seed(seed), dtype=weight.dtype
    ).to(weight.device)
    return 0.1 * drawn * weight.std(correction=0) + 0.01 * drawn


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.float().norm() for tensor in tensors]).norm()


def _trace(model: nn.Module) -> fx.Graph | None:
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
            return batched_layer(m) is not None or super().is_leaf_module(m, qualified_name)

    try:
        # In a Sequential, a model of one layer becomes a call of that layer.
        graph = Tracer().trace(nn.Sequential(model))
    except Exception:  # from the user's model, such as one that needs the value of a tensor
        return None
    for node in graph.nodes:
        if node.op == "call_module":
            node.target = node.target.partition(".")[2]
    return graph


def batched_layer(layer: nn.Module) -> LayerFunction | None:
    """Return the function that runs a layer for a stack; None for a layer without one."""
    if _has_no_state(layer) and not isinstance(layer, RANDOM):
        return lambda own, m, x: layer(x)
    if type(layer) is nn.Linear:
        return linear
    if type(layer) is nn.LayerNorm:
        return lambda own, m, x: _layer_norm(layer, own, m, x)
    if type(layer) is nn.Embedding and not (
        layer.sparse or layer.scale_grad_by_freq or layer.max_norm is not None
    ):
        return lambda own, m, x: _embedded(layer, own["weight"], x)
    return None


def linear(own: Parameters, m: int, x: Tensor) -> Tensor:
    """Run nn.Linear for a stack."""
    rows, weight, bias = x.reshape(m, -1, x.shape[-1]), own["weight"], own.get("bias")
    if torch.is_autocast_enabled(x.device.type):  # which does not reach custom functions
        dtype = torch.get_autocast_dtype(x.device.type)
        rows, weight = rows.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
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


def _layer_norm(layer: nn.LayerNorm, own: Parameters, m: int, x: Tensor) -> Tensor:
    normed = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    if not own:
        return normed
    ones = [1] * (x.dim() - len(layer.normalized_shape))
    scale = {name: value.view(m, *ones, *value.shape[1:]) for name, value in own.items()}
    stack, weight = normed.unflatten(0, (m, -1)), scale["weight"]
    out = torch.addcmul(scale["bias"], stack, weight) if "bias" in scale else stack * weight
    return out.flatten(0, 1)


def _embedded(layer: nn.Embedding, weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the rows of weights [m, v, d] for tokens [m·b, ...]."""
    m, v, d = weight.shape
    if layer.padding_idx is not None:  # the row of the padding has no gradient
        padding = torch.arange(v, device=weight.device).view(-1, 1) == layer.padding_idx
        weight = torch.where(padding, weight.detach(), weight)
    rows = tokens.reshape(m, -1) + v * torch.arange(m, device=weight.device).unsqueeze(1)
    return F.embedding(rows, weight.flatten(0, 1)).view(*tokens.shape, d)
