"""Local SGD of many clients at once: their models are the rows of one matrix.

The loss of a client is a function of its row and its batch; torch.func maps it and its gradient over the rows, so that a
hundred small products become one batched product. Chains of nn.Linear and activations are written as batched products
outright, which takes less than half the time where the model is small and calling operations is what costs.

The update of a client is that of clients.local_sgd.SerialEngine to rounding, whoever it is trained with.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from ..clients.local_sgd import NO_TRACES, LocalSGD, Traces, descend
from ..errors import ConfigError
from ..layout import Layout
from ..tasks.base import Data, Task

CPU_BYTES = 8 << 20  # what the clients trained at once may fill: they should stay in the processor's caches
CUDA_SHARE = 1 / 4  # of the device's memory, for the same
MAP_POSITIONS = 256  # a convolution's outputs are reckoned as maps of 16x16

Parameters = dict[str, Tensor]  # name → [m, *shape]


class BatchedEngine:
    """Trains a stack of clients, at most `at_once` of them together; 0 = all whose batches have the same sizes.

    Takes `model` over: moves it to `device`. Of its tensors only the frozen ones and the buffers are used.
    """

    def __init__(self, task: Task, model: nn.Module, layout: Layout, device: torch.device | str, at_once: int = 0):
        self.task, self.model, self.layout, self.device, self.at_once = task, model.to(device), layout, torch.device(device), at_once
        parameters = dict(model.named_parameters())
        self.coarse = {e.name: parameters[e.name].dtype for e in layout if parameters[e.name].dtype != torch.float32}
        chain = _chain(model)
        self.gradients = _chain_gradients(task, model, chain) if chain else _mapped_gradients(task, model)

    def train(
        self, start: Tensor, data: Data, plans: Sequence[Sequence[np.ndarray]], sgd: LocalSGD, *, traces: Traces = NO_TRACES
    ) -> tuple[Tensor, Tensor]:
        """Local SGD from `start` (float32 [n]) for every client of `plans`, its batches of `data`; all on the engine's device.

        Returns the updates, float32 [m, n], and each client's mean over its steps of the loss before the step, float32 [m].
        Clients whose batches have the same sizes are trained together. Raises ConfigError for a model that torch.func cannot map.
        """
        self.model.train()
        updates = torch.empty(len(plans), self.layout.numel, dtype=torch.float32, device=self.device)
        losses = torch.empty(len(plans), dtype=torch.float32, device=self.device)
        sizes = [tuple(len(batch) for batch in plan) for plan in plans]
        order = sorted(range(len(plans)), key=sizes.__getitem__)
        done = 0
        for size, group in itertools.groupby(order, key=sizes.__getitem__):
            members = list(group)
            for some in np.array_split(members, math.ceil(len(members) / (self.at_once or len(members)))):
                index = torch.from_numpy(np.stack([np.concatenate(plans[client]) for client in some])).to(self.device)
                rows, place = slice(done, done + len(some)), torch.from_numpy(some).to(self.device)
                mine = traces.rows(place)
                losses[rows] = self._train(start, updates[rows], data, index.split(size, dim=1), sgd, mine)
                traces.put(place, mine)
                done = rows.stop
        if order == sorted(order):
            return updates, losses
        place = torch.from_numpy(np.argsort(order)).to(self.device)
        return updates[place], losses[place]

    def _train(self, start: Tensor, stack: Tensor, data: Data, batches: Sequence[Tensor], sgd: LocalSGD, traces: Traces) -> Tensor:
        """Leaves the updates in `stack` [m, n]; returns the losses [m]. `batches`: for each step, positions [m, b]."""
        base = self._rounded(start)
        stack.copy_(base.expand_as(stack))
        views = self.layout.views(stack)
        parameters = {name: view.to(self.coarse.get(name, torch.float32)) for name, view in views.items()}
        weights, losses = list(parameters.values()), []
        momenta = traces.momenta(self.layout, weights)
        for positions in batches:
            inputs, targets = _gathered(data.inputs, positions), _gathered(data.targets, positions)
            try:
                gradients, loss = self.gradients(parameters, inputs, targets)
            except RuntimeError as error:
                if "vmap" not in str(error) and "atching rule" not in str(error):
                    raise
                raise ConfigError(f"the model of task '{self.task.name}' cannot be trained batched ({str(error).splitlines()[0]}); "
                                  "give --engine serial") from error
            gradients = _clipped(gradients, sgd.clip) if sgd.clip else gradients
            traces.step(self.layout, gradients)
            momenta = descend(weights, gradients, momenta, sgd)
            losses.append(loss)
        traces.end(self.layout, momenta)
        for name in self.coarse:
            views[name].copy_(parameters[name])
        stack -= base
        return torch.stack(losses).mean(0, dtype=torch.float32)

    def _rounded(self, start: Tensor) -> Tensor:
        """`start` as the model can hold it."""
        rounded = start.clone() if self.coarse else start
        for name, view in self.layout.views(rounded).items():
            if name in self.coarse:
                view.copy_(view.to(self.coarse[name]))
        return rounded


def _gathered(examples: Tensor, positions: Tensor) -> Tensor:
    return examples.index_select(0, positions.flatten()).view(*positions.shape, *examples.shape[1:])


def _clipped(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Gradients [m, ...] with the norm of each row over all tensors at most `limit`."""
    norms = torch.stack([gradient.reshape(len(gradient), -1).float().norm(dim=1) for gradient in gradients]).norm(dim=0)
    factor = (limit / (norms + 1e-6)).clamp(max=1.0)
    return [gradient * factor.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1)) for gradient in gradients]


Gradients = Callable[[Parameters, Tensor, Tensor], tuple[Sequence[Tensor], Tensor]]  # parameters, inputs, targets → gradients, losses [m]


def _mapped_gradients(task: Task, model: nn.Module) -> Gradients:
    def loss(parameters: Parameters, inputs: Tensor, targets: Tensor) -> Tensor:
        return task.loss(functional_call(model, parameters, (inputs,)), targets)

    mapped = vmap(grad_and_value(loss))

    def gradients(parameters: Parameters, inputs: Tensor, targets: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        gradient, losses = mapped(parameters, inputs, targets)
        return [gradient[name] for name in parameters], losses

    return gradients


def _chain(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that is a chain of nn.Linear and what leaves the example's axis alone; empty for other models."""
    layers = list(model) if type(model) is nn.Sequential else [model]
    plain = (nn.Linear, nn.Flatten, nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus)
    hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    fits = all(type(m) in plain and (type(m) is not nn.Flatten or (m.start_dim, m.end_dim) == (1, -1)) for m in layers)
    return layers if fits and not hooked else []


def _chain_gradients(task: Task, model: nn.Module, layers: Sequence[nn.Module]) -> Gradients:
    """Backpropagation as batched products; torch.autograd only where a layer is no nn.Linear. Calling it costs more than they do."""
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    first = next((i for i, layer in enumerate(layers) if names.keys() & set(layer.parameters())), len(layers))

    def gradients(parameters: Parameters, inputs: Tensor, targets: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        def stacked(parameter: nn.Parameter) -> Tensor:
            return parameters[names[parameter]] if parameter in names else parameter.detach().expand(len(inputs), *parameter.shape)

        given, outputs = [], inputs  # what each layer was given
        for layer in layers:
            given.append(outputs)
            outputs = _linear(outputs, layer, stacked) if isinstance(layer, nn.Linear) else _activated(layer, outputs)
        losses, slope = _losses(task, outputs, targets)
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
    out = torch.bmm(rows, weight) if layer.bias is None else torch.baddbmm(stacked(layer.bias).unsqueeze(1), rows, weight)
    return out.view(*x.shape[:-1], -1)


def _activated(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, nn.Flatten):
        return x.flatten(2)
    return layer(x.clone() if getattr(layer, "inplace", False) else x)  # x is wanted once more, for the gradient


def _vjp(function: Callable[[Tensor], Tensor], x: Tensor, slope: Tensor) -> Tensor:
    """The gradient for x, of what has the gradient `slope` for function(x)."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        outputs = function(leaf)
    return torch.autograd.grad(outputs, leaf, slope)[0]


def _add(found: Parameters, name: str, gradient: Tensor) -> None:
    found[name] = found[name] + gradient if name in found else gradient


def _losses(task: Task, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each client's loss [m], and its gradient for the outputs."""
    if task.loss is not F.cross_entropy or outputs.dim() != 3 or targets.dim() != 2:
        leaf = outputs.detach().requires_grad_()
        losses = vmap(task.loss)(leaf, targets)
        return losses.detach(), torch.autograd.grad(losses, leaf, torch.ones_like(losses))[0]
    counted = targets != -100  # the target that cross_entropy leaves out
    target, share = targets.where(counted, 0).unsqueeze(-1), (counted / counted.sum(1, keepdim=True)).to(outputs.dtype).unsqueeze(-1)
    logs = outputs.log_softmax(-1)
    losses = -(logs.gather(-1, target) * share).sum((1, 2))
    return losses, logs.exp_().mul_(share).scatter_add_(-1, target, -share)


def choose_engine(model: nn.Module, device: torch.device | str, asked: str = "auto", batch_size: int = 20) -> tuple[str, int]:
    """("serial" or "batched", clients at once), by what the model is made of and the device's memory.

    Serial where a layer draws, keeps statistics or recurs in training. Else batched: on CUDA where two clients fit, on a CPU
    where all weights are those of nn.Linear and nn.Embedding. Raises ConfigError where batched was asked for and cannot be.
    """
    device, obstacle = torch.device(device), next(filter(None, map(_obstacle, model.modules())), "")
    if asked == "batched" and obstacle:
        raise ConfigError(f"--engine batched cannot train a model with {obstacle}; give --engine serial")
    dense = all(isinstance(m, nn.Linear | nn.Embedding) for m in model.modules() if list(m.parameters(recurse=False)))
    at_once = _at_once(model, device, batch_size)
    if device.type != "cuda" and dense:
        at_once = max(at_once, 4 if _chain(model) else 16)  # fewer are no faster than serial, even where they fill more than the caches
    suits = not obstacle and (at_once > 1 if device.type == "cuda" else dense)
    return ("batched", max(at_once, 2)) if asked == "batched" or (asked == "auto" and suits) else ("serial", 1)


def _obstacle(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return f"{name}, which recurs"
    if isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d) \
            or (isinstance(rate := getattr(module, "dropout", 0.0), float) and rate > 0):
        return f"{name}, which draws at random"
    if getattr(module, "running_mean", None) is not None:
        return f"{name}, which keeps statistics"
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
        return f"{name} with sparse gradients or max_norm"
    return ""


def _at_once(model: nn.Module, device: torch.device, batch_size: int) -> int:
    """How many clients the budget holds: of each, four vectors of weights and the inputs and outputs of its layers."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    widths = sum(sum(p.shape[:2]) * (MAP_POSITIONS if p.dim() > 2 else 1) for p in weights)
    client = 4 * (4 * sum(p.numel() for p in model.parameters()) + batch_size * widths)
    budget = torch.cuda.get_device_properties(device).total_memory * CUDA_SHARE if device.type == "cuda" else CPU_BYTES
    return max(1, int(budget / client))
