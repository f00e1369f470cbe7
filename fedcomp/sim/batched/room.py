"""How many clients a device has room for: measured on a few, and taken back where it was too many."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError, FedcompError
from ...tasks.base import Data
from ...training.local_sgd import LocalSGD, plan_changes

if TYPE_CHECKING:
    from .engine import BatchedEngine

SHARE = (
    1 / 4
)  # of what is free, for the clients that are trained at once; the rest is for recorded steps, residuals and stacks of updates
STEPS = 2  # from the second one on there is momentum
TRIED = (1, 5)  # clients; the first costs what all cost together
MOST = 1024  # clients: products of so many are large enough, and more only fill the memory


class Meter(Protocol):
    """The memory of a device, in bytes."""

    def free(self) -> int:
        """What could still be had."""

    def peak(self, run: Callable[[], object]) -> int:
        """The most that `run` had at any time, beyond what was there before it."""


class CudaMeter:
    """What torch's allocator of a GPU tells."""

    def __init__(self, device: torch.device):
        self.device = device

    def free(self) -> int:
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused

    def peak(self, run: Callable[[], object]) -> int:
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        return torch.cuda.max_memory_allocated(self.device) - before


def clients_at_once(train: Callable[[int], object], meter: Meter) -> int:
    """How many clients there is room for, a power of 2, so that a little more or less that is free changes no run.

    A pass of `train(m)` trains m of them, and its peak is taken to grow evenly with m. More than one is tried only where they surely fit.
    Raises what `train(1)` raises.
    """
    alone = meter.peak(lambda: train(TRIED[0]))
    if alone * TRIED[1] > meter.free():
        return 1
    several = meter.peak(lambda: train(TRIED[1]))
    each = max(1, (several - alone) // (TRIED[1] - TRIED[0]))
    room = int((meter.free() * SHARE - (alone - each)) / each)
    return min(MOST, 1 << max(1, room).bit_length() - 1)


def fitting(engine: "BatchedEngine", start: Tensor, data: Data, sgd: LocalSGD, meter: Meter) -> int:
    """How many clients the device has room for in this training. Leaves that number with the engine."""
    batch = np.arange(min(sgd.batch_size, len(data)))

    def train(clients: int) -> None:
        engine.at_once, plan = clients, [batch] * STEPS
        changes = (
            [plan_changes(engine.task, sgd, plan, 0, 0, who) for who in range(clients)]
            if sgd.augment
            else ()
        )
        engine.train(start, data, [plan] * clients, sgd, changes=changes)

    try:
        engine.at_once = clients_at_once(train, meter)
    except FedcompError:
        raise
    except Exception:  # of the user's model on these examples: a client's failure, in its round
        engine.at_once = 1
    return engine.at_once


def does_not_fit(device: torch.device) -> ConfigError:
    other = "" if device.type == "cpu" else ", or --device cpu"
    return ConfigError(
        f"the memory of {device} does not hold the training of one client; give a smaller --batch-size{other}"
    )


def release(device: torch.device) -> None:
    """Give back what torch's allocator keeps for later."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
