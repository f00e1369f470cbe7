"""What is trained how: by rules on the model and the device, never by a stopwatch."""

import torch
from torch import nn

from ...errors import ConfigError
from ...tasks.base import Task
from ..processes import possible
from .convolutions import FORMS
from .losses import Gradients
from .mapped import mapped_gradients
from .traced import program, traced_gradients

CPU_BYTES = (
    8 << 20
)  # what the clients trained at once may fill: they should stay in the processor's caches
CUDA_SHARE = 1 / 4  # of the device's memory, for the same
MAP_POSITIONS = 256  # a convolution's outputs are reckoned as maps of 16x16

MAPPED, AUTO = "mapped", "auto"
WAYS = (AUTO, MAPPED, *FORMS)  # to the gradients of a stack


def form(device: torch.device) -> str:
    """In which form convolutions are batched. benchmarks/gpu_sim.py compares them."""
    return "products" if device.type == "cuda" else "grouped"


def gradients_of(
    task: Task, model: nn.Module, device: torch.device, asked: str = AUTO
) -> tuple[Gradients, str]:
    """How the gradients of a stack are found, and which of WAYS that is: the one that is asked for, where the model allows it."""
    chosen = asked if asked in FORMS else form(device)
    if asked != MAPPED and (traced := traced_gradients(task, model, chosen)):
        return traced, chosen
    return mapped_gradients(task, model), MAPPED


def choose_engine(
    model: nn.Module, device: torch.device | str, asked: str = "auto", batch_size: int = 20
) -> tuple[str, int]:
    """("serial" or "batched", clients at once), by what the model is made of and the device's memory.

    Serial where a layer draws, keeps statistics, or recurs in a form of its own. Else batched: on CUDA where two clients fit, on a CPU
    where all weights are those of nn.Linear and nn.Embedding. Raises ConfigError where batched was asked for and cannot be.
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
        at_once = max(
            at_once, 16
        )  # fewer are no faster than serial, even where they fill more than the caches
    suits = not obstacle and (at_once > 1 if device.type == "cuda" else dense)
    return (
        ("batched", max(at_once, 2))
        if asked == "batched" or (asked == "auto" and suits)
        else ("serial", 1)
    )


def unbatched(device: torch.device) -> str:
    """What trains a model that is not batched: worker processes where they can share several cores."""
    return (
        "processes"
        if device.type == "cpu" and torch.get_num_threads() > 1 and not possible()
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
    """What PyTorch says, in short."""
    if ".item()" in why or "data-dependent control flow" in why:
        return "its forward pass or loss decides by the data (.item() or if on a tensor)"
    return why.strip().split("\n")[0].split(". ")[0].removesuffix(".")[:120]


def _obstacle(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return f"{name}, which recurs"
    if isinstance(
        module,
        nn.modules.dropout._DropoutNd | nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d,
    ) or (isinstance(rate := getattr(module, "dropout", 0.0), float) and rate > 0):
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
    budget = (
        torch.cuda.get_device_properties(device).total_memory * CUDA_SHARE
        if device.type == "cuda"
        else CPU_BYTES
    )
    return max(1, int(budget / client))
