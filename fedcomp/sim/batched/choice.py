"""The choice of engine, and of the way to the gradients of a stack, by rules on model and device."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ...errors import ConfigError
from ...tasks.base import Task
from ..processes import is_available as processes_available
from .convolutions import FORMS
from .layers import RANDOM
from .losses import Gradients, Parameters
from .traced import program, traced_gradients

CPU_BYTES = 8 << 20  # for the clients trained at once, which should stay in the processor's caches
CUDA_SHARE = 1 / 4  # of the device's memory, for the same
MAP_POSITIONS = 256  # the outputs of a convolution are estimated as maps of 16x16

MAPPED, AUTO = "mapped", "auto"
WAYS = (AUTO, MAPPED, *FORMS)  # to the gradients of a stack


def form(device: torch.device) -> str:
    """Return the form in which convolutions are batched. benchmarks/gpu_sim.py compares them."""
    return "products" if device.type == "cuda" else "grouped"


def gradients_of(
    task: Task, model: nn.Module, device: torch.device, asked: str = AUTO
) -> tuple[Gradients, str]:
    """Return a function for the gradients of a stack, and its name in WAYS: the one that is asked for, if the model allows it."""
    chosen = asked if asked in FORMS else form(device)
    if asked != MAPPED and (traced := traced_gradients(task, model, chosen)):
        return traced, chosen
    return mapped_gradients(task, model), MAPPED


def mapped_gradients(task: Task, model: nn.Module) -> Gradients:
    """Return gradients of a stack by torch.func: the loss of a client is a function of its weights and its batch."""

    def loss(parameters: Parameters, inputs: Tensor, targets: Tensor) -> Tensor:
        return task.criterion(functional_call(model, parameters, (inputs,)), targets)

    mapped = vmap(grad_and_value(loss))

    def gradients(
        parameters: Parameters, inputs: Tensor, targets: Tensor
    ) -> tuple[Sequence[Tensor], Tensor]:
        gradient, losses = mapped(parameters, inputs, targets)
        return [gradient[name] for name in parameters], losses

    return gradients


def choose_engine(
    model: nn.Module, device: torch.device | str, asked: str = "auto", batch_size: int = 20
) -> tuple[str, int]:
    """Return "serial" or "batched", and the number of clients at once, by the model's layers and the device's memory.

    Serial if a layer draws at random, keeps statistics, or recurs in an unknown form. Else batched: on CUDA if two clients fit, on a CPU if
    all weights belong to nn.Linear and nn.Embedding. Raises ConfigError if batched was asked for and is impossible.
    """
    device, obstacle = torch.device(device), next(filter(None, map(_obstacle, model.modules())), "")
    if obstacle and program(model, form(device)) is not None:
        obstacle = ""
    if asked == "batched" and obstacle:
        raise ConfigError(
            f"--engine batched cannot train a model with {obstacle}; give --engine {unbatched(device)}"
        )
    dense = all(
        isinstance(m, nn.Linear | nn.Embedding)
        for m in model.modules()
        if list(m.parameters(recurse=False))
    )
    at_once = _at_once(model, device, batch_size)
    if device.type != "cuda" and dense:
        # Fewer are no faster than the serial engine, even if 16 exceed the caches.
        at_once = max(at_once, 16)
    suits = not obstacle and (at_once > 1 if device.type == "cuda" else dense)
    return (
        ("batched", max(at_once, 2))
        if asked == "batched" or (asked == "auto" and suits)
        else ("serial", 1)
    )


def unbatched(device: torch.device) -> str:
    """Return the engine for a model that is not batched: worker processes if there are several cores."""
    return (
        "processes"
        if device.type == "cpu" and torch.get_num_threads() > 1 and processes_available()
        else "serial"
    )


class NotMapped(ConfigError):
    """The forward pass or the loss of a task cannot be trained batched."""

    def __init__(self, task: Task, device: torch.device, why: str):
        self.finding = (
            f"the model of task '{task.name}' cannot be trained batched: {_in_a_clause(why)}"
        )
        super().__init__(f"{self.finding}; give --engine {unbatched(device)}")


def _in_a_clause(why: str) -> str:
    """Return the message of PyTorch, shortened."""
    if ".item()" in why or "data-dependent control flow" in why:
        return "its forward pass or loss decides by the data (.item() or if on a tensor)"
    return why.strip().split("\n")[0].split(". ")[0].removesuffix(".")[:120]


def _obstacle(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return f"{name}, which recurs"
    rate = getattr(module, "dropout", 0.0)
    if isinstance(module, RANDOM) or (isinstance(rate, float) and rate > 0):
        return f"{name}, which draws at random"
    if getattr(module, "running_mean", None) is not None:
        return f"{name}, which keeps statistics"
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
        return f"{name} with sparse gradients or max_norm"
    return ""


def _at_once(model: nn.Module, device: torch.device, batch_size: int) -> int:
    """Return how many clients fit into the budget: of each, four vectors of weights and the inputs and outputs of its layers."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    widths = sum(sum(p.shape[:2]) * (MAP_POSITIONS if p.dim() > 2 else 1) for p in weights)
    client = 4 * (4 * sum(p.numel() for p in model.parameters()) + batch_size * widths)
    budget = (
        torch.cuda.get_device_properties(device).total_memory * CUDA_SHARE
        if device.type == "cuda"
        else CPU_BYTES
    )
    return max(1, int(budget / client))
