"""A model's forward pass, traced by torch.fx and run for a stack of clients layer by layer.

Tracing does not record side effects of a forward pass (blocks under no_grad or autocast, counters, random draws of other libraries), and
an operation may mix the examples of clients. A traced model is therefore used only if its gradients for two clients with different weights
agree with those of the model itself.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ...tasks.base import Task
from ...tasks.data import Data
from ...training.local_sgd import Tensors
from ...training.pooled_convolution import has_hooks
from .layers import LayerFunction, LayerParameters, batched_layer
from .losses import Gradients, Parameters, losses_of

COMPARED_EXAMPLES = 8  # of each of two clients
TOLERANCE = 0.02  # of the gradient's norm; convolutions on CUDA multiply with mantissas of 10 bits


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
        """Return the model's outputs [m·b, ...] for x [m·b, ...], with the weights [m, *shape] of m clients. Frozen weights are shared."""
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

    def _parameters_of(self, layer: str, parameters: Parameters, m: int) -> LayerParameters:
        """Return the parameters of a layer, [m, *shape]. Frozen parameters, which are not in `parameters`, are expanded."""
        return {
            key: parameters[name] if name in parameters else p.detach().expand(m, *p.shape)
            for key, (name, p) in self.layer_parameters[layer].items()
        }


def traced_model(model: nn.Module, convolution: str) -> TracedModel | None:
    """Return the traced model, or None if it cannot be traced or a layer has no batched form.

    `convolution`: preferred form of convolutions, a key of CONVOLUTIONS.
    """
    if has_hooks(model) or any(p.dtype != torch.float32 for p in model.parameters()):
        return None
    graph = _trace(model)
    if graph is None or any(node.op == "get_attr" for node in graph.nodes):
        return None
    layers = dict(model.named_modules())
    functions: dict[str, LayerFunction] = {}
    for name in [node.target for node in graph.nodes if node.op == "call_module"]:
        function = batched_layer(layers[name], convolution)
        if function is None:
            return None
        functions[name] = function
    return TracedModel(model, list(graph.nodes), functions) if functions else None


def traced_gradients(task: Task, model: nn.Module, convolution: str) -> Gradients | None:
    """Return a function that computes gradients by a traced model and torch.autograd; None if the model cannot be traced."""
    traced = traced_model(model, convolution)
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
            return batched_layer(m, "grouped") is not None or super().is_leaf_module(
                m, qualified_name
            )

    try:
        # In a Sequential, a model of one layer becomes a call of that layer.
        graph = Tracer().trace(nn.Sequential(model))
    except Exception:  # from the user's model, such as one that needs the value of a tensor
        return None
    for node in graph.nodes:
        if node.op == "call_module":
            node.target = node.target.partition(".")[2]
    return graph
