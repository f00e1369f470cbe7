"""The placement of clients' vectors, such as error-feedback residuals, between rounds: in GPU memory, in main memory, or on disk.

By default, the placement is chosen by the maximum total size of the vectors and by the free memory at the start of the run. The results of
the run do not depend on the placement.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ConfigError
from ..formatting import human_bytes

DEVICE, HOST, FILE = "device", "host", "file"  # values of --residuals: GPU, main memory, disk
# With --residuals auto, GPU memory is chosen if the vectors of all clients fit into this fraction of the free GPU memory. Otherwise, main
# memory is chosen if the vectors fit into this fraction of the free main memory.
MEMORY_FRACTION = 1 / 2
CACHE_FRACTION = 1 / 8  # with vectors on disk: fraction of the free main memory for cached vectors
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Placement:
    """The place where clients' vectors are stored between rounds."""

    name: str  # DEVICE, HOST or FILE
    budget_bytes: float = math.inf  # limit for the total size of the vectors in main memory
    # GPU to which a client's vectors are moved while the client trains; None: the vectors are not moved.
    training_device: torch.device | None = None
    client_bytes: int = 0  # estimated size of one client's vectors

    def __str__(self) -> str:
        """Return a description of the placement, or "" if the vectors stay on the device on which clients train."""
        if self.name == FILE:
            return f"in the checkpoint on disk, up to {human_bytes(round(self.budget_bytes))} of them in memory"
        if self.training_device is None:
            return ""
        return "in the host's memory, and on the device while their clients train"


IN_MEMORY = Placement(HOST)


def choose_placement(
    residuals: str, device: torch.device, clients: int, client_bytes: int
) -> Placement:
    """Return the placement for `residuals`, a value of --residuals, and for `clients` clients with vectors of `client_bytes` bytes each.

    Raises ConfigError if the vectors of all clients do not fit into the free memory that `residuals` names.
    """
    needed = clients * client_bytes
    host, cuda = free_memory(), device.type == "cuda"
    free = {HOST: host, **({DEVICE: torch.cuda.mem_get_info(device)[0]} if cuda else {})}
    if residuals == DEVICE and not cuda:
        residuals = HOST  # on a CPU, the device's memory is the host's memory
    large_enough = [
        name for name in (DEVICE, HOST) if name in free and needed <= MEMORY_FRACTION * free[name]
    ]
    name = residuals if residuals != "auto" else next(iter(large_enough), FILE)
    if name in free and needed > free[name]:
        where = "the device's memory" if name == DEVICE else "memory"
        raise ConfigError(
            f"--residuals {name}: the states of {clients:,} clients may need {human_bytes(needed)}, but only "
            f"{human_bytes(free[name])} of {where} are free; leave --residuals out, or give --residuals file"
        )
    budget_bytes = CACHE_FRACTION * host if name == FILE else math.inf
    training_device = device if cuda and name != DEVICE else None
    return Placement(name, budget_bytes, training_device, client_bytes)


def free_memory() -> int:
    """Return how many bytes of main memory this process can still use, within the limits of its control groups."""
    return max(0, min([_free_on_machine(), *_free_in_control_groups()]))


def _free_on_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(
            1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration):  # the system is not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _free_in_control_groups() -> Iterator[int]:
    """Yield the free bytes of each control group (cgroup v2) of this process. Inactive file pages count as free."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        path = next(line.removeprefix("0::/") for line in lines if line.startswith("0::"))
        for group in (CGROUP / path, *(CGROUP / path).parents):
            if not (group / "memory.max").exists():
                continue  # the root control group has no such file
            limit = (group / "memory.max").read_text().strip()
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            if limit != "max":
                used = int((group / "memory.current").read_text())
                yield int(limit) - used + int(stat.get("inactive_file", 0))
    except (OSError, StopIteration, ValueError):
        return
