"""The placement of clients' vectors between their rounds: on the device, in the host's memory, or in the run's checkpoint on disk.

It is chosen by the size that the vectors may reach in the run and by the memory that is free at its start. The results of a run do not
depend on it.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ConfigError
from ..formatting import human_bytes

DEVICE, HOST, FILE = "device", "host", "file"  # of --residuals
SHARE = 1 / 2  # of the free memory of device or host, for clients that all stay there
CACHE = 1 / 8  # of the free memory of the host, for recently used clients if all are on disk
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Placement:
    """Where the vectors of clients are between their rounds."""

    name: str  # DEVICE, HOST or FILE
    budget_bytes: float = math.inf  # of clients that stay in memory
    moves_to: torch.device | None = None  # for training; None: vectors do not move
    client_bytes: int = 0  # of one client's vectors, an estimate until one is measured

    def __str__(self) -> str:
        """Return a description, "" if clients stay in the memory in which they train."""
        if self.name == FILE:
            return f"in the checkpoint on the disk, up to {human_bytes(round(self.budget_bytes))} of them in memory"
        return (
            ""
            if self.moves_to is None
            else "in the host's memory, on the device while their cohort is training"
        )


IN_MEMORY = Placement(HOST)


def choose_placement(
    asked: str, device: torch.device, clients: int, client_bytes: int
) -> Placement:
    """Return the placement for the value `asked` of --residuals.

    `clients`: upper bound of the clients that take part at least once. `client_bytes`: of the vectors of one client. Raises ConfigError if
    the chosen memory cannot hold all clients.
    """
    needed = clients * client_bytes
    host, cuda = free_memory(), device.type == "cuda"
    free = {HOST: host, **({DEVICE: torch.cuda.mem_get_info(device)[0]} if cuda else {})}
    if asked == DEVICE and not cuda:
        asked = HOST  # the same on a CPU
    fitting = [name for name in (DEVICE, HOST) if name in free and needed <= SHARE * free[name]]
    name = asked if asked != "auto" else next(iter(fitting), FILE)
    if name in free and needed > free[name]:
        where = "the device" if name == DEVICE else "memory"
        raise ConfigError(
            f"--residuals {name}: the vectors of {clients:,} clients may take {human_bytes(needed)}, and "
            f"{human_bytes(free[name])} of {where} are free; leave it out, or give --residuals file"
        )
    return Placement(
        name,
        CACHE * host if name == FILE else math.inf,
        device if cuda and name != DEVICE else None,
        client_bytes,
    )


def free_memory() -> int:
    """Return the bytes of main memory that this process may still use, by the machine and by its control groups."""
    return max(0, min([_machine(), *_groups()]))


def _machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(
            1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration):  # another system than Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _groups() -> Iterator[int]:
    """Yield the free bytes of the control groups (version 2) of this process. Inactive file pages count as free."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.removeprefix("0::/") for line in lines if line.startswith("0::"))
        for group in (CGROUP / own, *(CGROUP / own).parents):
            if not (group / "memory.max").exists():
                continue  # the root has none
            limit = (group / "memory.max").read_text().strip()
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            if limit != "max":
                used = int((group / "memory.current").read_text())
                yield int(limit) - used + int(stat.get("inactive_file", 0))
    except (OSError, StopIteration, ValueError):
        return
