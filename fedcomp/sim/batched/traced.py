"""A model's forward pass, traced by torch.fx and run for a stack of clients layer by layer.

Tracing does not see side effects of a forward pass (blocks under no_grad or autocast, counters, draws of other libraries), nor whether an
operation mixes the examples of clients. A traced pass is therefore used only if its gradients for two clients with different weights agree
with those of the model itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...tasks.base import Task
from ...tasks.data import Data
from .layers import Own, Rule, rule
from .losses import Gradients, Parameters, losses_of

COMPARED = 8  # examples of each of two clients
TOLERANCE = 0.02  # of the gradient's norm; convolutions on CUDA multiply with 10 bits


class Program:
    """The operations of a traced forward pass."""

    def __init__(self, model: nn.Module, nodes: Sequence[fx.Node], rules: dict[str, Rule]):
        self.nodes, self.rules = nodes, rules
        layers = dict(model.named_modules())
        names = {p: name for name, p in model.named_parameters()}
        self.owned = {
            target: {
                key: (names[p], p) for key, p in layers[target].named_parameters(recurse=False)
            }
            for target in rules
        }

    def run(self, parameters: Parameters, m: int, x: Tensor) -> Tensor:
        """Return the model's outputs [m·b, ...] for x [m·b, ...], with the weights [m, *shape] of m clients; frozen ones are shared."""
        values: dict[fx.Node, Any] = {}
        for node in self.nodes:
            args, options = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "placeholder":
                values[node] = x
            elif node.op == "output":
                return args[0]
            elif node.op == "call_module":
                values[node] = self.rules[node.target](
                    self._own(node.target, parameters, m), m, *args, **options
                )
            elif node.op == "call_method":
                values[node] = getattr(args[0], node.target)(*args[1:], **options)
            else:
                values[node] = node.target(*args, **options)
        raise AssertionError("a traced pass ends with its output")

    def _own(self, layer: str, parameters: Parameters, m: int) -> Own:
        def stacked(name: str, p: nn.Parameter) -> Tensor:
            return parameters[name] if name in parameters else p.detach().expand(m, *p.shape)

        return {key: stacked(*found) for key, found in self.owned[layer].items()}


def program(model: nn.Module, form: str) -> Program | None:
    """Return the forward pass for a stack, with convolutions in `form`; None if it cannot be traced or a layer has no rule."""
    if hooked(model) or any(p.dtype != torch.float32 for p in model.parameters()):
        return None
    graph = _traced(model)
    if graph is None or any(node.op == "get_attr" for node in graph.nodes):
        return None
    layers = dict(model.named_modules())
    rules = {
        node.target: rule(layers[node.target], form)
        for node in graph.nodes
        if node.op == "call_module"
    }
    return (
        Program(model, list(graph.nodes), rules) if rules and None not in rules.values() else None
    )


def traced_gradients(task: Task, model: nn.Module, form: str) -> Gradients | None:
    """Return gradients by the traced pass and torch.autograd; None if there is no such pass."""
    passes = program(model, form)
    if passes is None:
        return None

    def gradients(
        parameters: Parameters, inputs: Tensor, targets: Tensor
    ) -> tuple[Sequence[Tensor], Tensor]:
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        with torch.enable_grad():
            outputs = passes.run(leaves, len(inputs), inputs.flatten(0, 1)).unflatten(
                0, (len(inputs), -1)
            )
        losses, slope = losses_of(task, outputs.detach(), targets)
        found = torch.autograd.grad(
            outputs, list(leaves.values()), slope, allow_unused=True, materialize_grads=True
        )
        return found, losses

    return gradients


def agrees(
    gradients: Gradients, task: Task, model: nn.Module, parameters: Parameters, data: Data
) -> bool:
    """Return whether `gradients` are the model's own for two clients.

    One has the first examples and the first client's weights, the other the last examples and perturbed weights. The latter are left in
    the model.
    """
    inputs, targets = (
        torch.stack([values[:COMPARED], values[-COMPARED:]])
        for values in (data.inputs, data.targets)
    )
    pair = {
        name: torch.stack([p[0], p[0] + _near(p[0], seed)])
        for seed, (name, p) in enumerate(parameters.items())
    }
    try:
        found, losses = gradients(pair, inputs, targets)
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
        apart = _norm([a[row] - b for a, b in zip(found, expected, strict=True)])
        length = _norm(expected)
        if not (
            apart <= TOLERANCE * length
            and abs(losses[row] - loss.detach()) <= TOLERANCE * loss.detach().abs()
        ):
            return False
    return True


def _near(weight: Tensor, seed: int) -> Tensor:
    drawn = torch.randn(
        weight.shape, generator=torch.Generator().manual_seed(seed), dtype=weight.dtype
    ).to(weight.device)
    return 0.1 * drawn * weight.std(correction=0) + 0.01 * drawn


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.float().norm() for tensor in tensors]).norm()


def hooked(model: nn.Module) -> bool:
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in model.modules()
    )


def _traced(model: nn.Module) -> fx.Graph | None:
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
            return rule(m, "grouped") is not None or super().is_leaf_module(m, qualified_name)

    try:
        whole = nn.Sequential(model)  # so that a model of one layer is called, not traced
        graph = Tracer().trace(whole)
    except Exception:  # of the user's model, which needs the value of a tensor
        return None
    for node in graph.nodes:
        if node.op == "call_module":
            node.target = node.target.partition(".")[2]
    return graph
