"""The choice of the engine, and of the method for the gradients of a stack, by model and device."""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ...errors import ConfigError
from ...tasks.base import Task
from ...training.local_sgd import Tensors
from ..processes import is_available as processes_available
from .convolutions import CONVOLUTIONS
from .layers import RANDOM
from .losses import Gradients, Parameters
from .traced import traced_gradients, traced_model

# Memory for the clients that are trained at once. On a CPU they should fit into its caches.
CPU_BYTES = 8 << 20
CPU_WEIGHTS_BYTES = 64 << 20  # of the clients trained at once, even if they exceed the caches
CUDA_MEMORY_FRACTION = 1 / 4
MAP_POSITIONS = 256  # the outputs of a convolution are estimated as maps of 16x16

MAPPED, AUTO = "mapped", "auto"
GRADIENT_METHODS = (AUTO, MAPPED, *CONVOLUTIONS)


def fastest_convolution(device: torch.device) -> str:
    """Return the fastest batched form of convolutions, a key of CONVOLUTIONS. benchmarks/gpu_sim.py compares them."""
    return "products" if device.type == "cuda" else "grouped"


def gradients_of(
    task: Task, model: nn.Module, device: torch.device, method: str = AUTO
) -> tuple[Gradients, str]:
    """Return a function for the gradients of a stack, and its name in GRADIENT_METHODS: `method` if the model allows it, else MAPPED."""
    convolution = method if method in CONVOLUTIONS else fastest_convolution(device)
    if method != MAPPED and (traced := traced_gradients(task, model, convolution)):
        return traced, convolution
    return mapped_gradients(task, model), MAPPED


def mapped_gradients(task: Task, model: nn.Module) -> Gradients:
    """Return a function that computes the gradients of a stack by torch.func.vmap over the clients."""

    def loss(parameters: Parameters, inputs: Tensor, targets: Tensor) -> Tensor:
        return task.criterion(functional_call(model, parameters, (inputs,)), targets)

    mapped = vmap(grad_and_value(loss))

    def gradients(
        parameters: Parameters, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensors, Tensor]:
        gradient, losses = mapped(parameters, inputs, targets)
        return [gradient[name] for name in parameters], losses

    return gradients


def choose_engine(
    model: nn.Module, device: torch.device | str, requested: str = AUTO, batch_size: int = 20
) -> tuple[str, int]:
    """Return "serial" or "batched", and the number of clients at once, by the model's layers and the device's memory.

    With `requested` "auto": serial if a layer draws at random, keeps statistics, or is a recurrent layer without a batched form. Else
    batched, on CUDA if the memory holds two clients, on a CPU if all weights belong to nn.Linear and nn.Embedding. Raises ConfigError if
    "batched" is requested and impossible.
    """
    device = torch.device(device)
    obstacle = _obstacle_of(model, device)
    if requested == "batched" and obstacle:
        raise ConfigError(
            f"--engine batched cannot train a model with {obstacle}; give --engine {unbatched_engine(device)}"
        )
    at_once = _clients_at_once(model, device, batch_size)
    if device.type != "cuda" and _is_dense(model):
        # With fewer clients, batches are no faster than the serial engine, even if 16 clients exceed the caches. Large models are
        # trained as fast one by one.
        weights_bytes = 4 * sum(p.numel() for p in model.parameters())
        at_once = max(at_once, min(16, CPU_WEIGHTS_BYTES // max(1, weights_bytes)))
    if requested == "batched":
        return "batched", max(at_once, 2)
    suits = requested == AUTO and not serial_reason(model, device, batch_size)
    return ("batched", max(at_once, 1)) if suits else ("serial", 1)


def serial_reason(model: nn.Module, device: torch.device, batch_size: int) -> str:
    """Return why `choose_engine` with "auto" does not batch a model; "" if it does."""
    if obstacle := _obstacle_of(model, device):
        return f"the model has {obstacle}"
    if device.type == "cuda":
        several = _clients_at_once(model, device, batch_size) > 1
        return "" if several else "a quarter of the GPU's memory does not hold two clients"
    return "" if _is_dense(model) else "on a CPU, only Linear and Embedding layers are batched"


def _is_dense(model: nn.Module) -> bool:
    """Return whether all weights belong to nn.Linear and nn.Embedding."""
    return all(
        isinstance(m, nn.Linear | nn.Embedding)
        for m in model.modules()
        if list(m.parameters(recurse=False))
    )


def unbatched_engine(device: torch.device) -> str:
    """Return the engine for a model that cannot be batched: worker processes on a CPU with several cores, else serial."""
    return (
        "processes"
        if device.type == "cpu" and torch.get_num_threads() > 1 and processes_available()
        else "serial"
    )


class NotBatchable(ConfigError):
    """The forward pass or the loss of a task cannot be trained batched. `problem`: the error message without its advice."""

    def __init__(self, task: Task, device: torch.device, message: str):
        self.problem = (
            f"the model of task '{task.name}' cannot be trained batched: {_shortened(message)}"
        )
        super().__init__(f"{self.problem}; give --engine {unbatched_engine(device)}")


def _shortened(message: str) -> str:
    """Return an error message of PyTorch as a clause of at most 120 characters."""
    if ".item()" in message or "data-dependent control flow" in message:
        return (
            "its forward pass or loss depends on the values of tensors (.item(), or if on a tensor)"
        )
    if "mutate a captured Tensor" in message:
        return "its forward pass changes a buffer"
    return message.strip().split("\n")[0].split(". ")[0].removesuffix(".")[:120]


def _obstacle_of(model: nn.Module, device: torch.device) -> str:
    """Return the first obstacle of a model's layers; "" if they can be batched."""
    obstacle = next(filter(None, map(_obstacle, model.modules())), "")
    if obstacle and traced_model(model, fastest_convolution(device)) is not None:
        return ""
    return obstacle


def _obstacle(module: nn.Module) -> str:
    """Return why a layer cannot be mapped by torch.func, such as "Dropout, which draws at random"; "" if it can."""
    name = type(module).__name__
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return f"the recurrent layer {name}"
    rate = getattr(module, "dropout", 0.0)
    if isinstance(module, RANDOM) or (isinstance(rate, float) and rate > 0):
        return f"{name}, which draws at random"
    if getattr(module, "running_mean", None) is not None:
        return f"{name}, which keeps statistics"
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
        return f"{name} with sparse gradients or max_norm"
    return ""


def _clients_at_once(model: nn.Module, device: torch.device, batch_size: int) -> int:
    """Return how many clients fit into the memory. Each takes four vectors of weights, and the inputs and outputs of its layers."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    widths = sum(sum(p.shape[:2]) * (MAP_POSITIONS if p.dim() > 2 else 1) for p in weights)
    client = 4 * (4 * sum(p.numel() for p in model.parameters()) + batch_size * widths)
    budget = (
        torch.cuda.get_device_properties(device).total_memory * CUDA_MEMORY_FRACTION
        if device.type == "cuda"
        else CPU_BYTES
    )
    return max(1, int(budget / client))
