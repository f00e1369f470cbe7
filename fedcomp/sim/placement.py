"""Where clients at rest keep their vectors: on the device, in the host's memory, or in the run's checkpoint on the disk.

Chosen from what they may come to in the rounds of the run, and from what is free when it starts. What a run computes does not depend on it.
"""

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ConfigError
from ..memories import Memory
from ..server.checkpoint import stored_bytes

DEVICE, HOST, FILE = "device", "host", "file"  # of --residuals
SHARE = 1 / 2  # of what is free on the device or in memory, for clients that all stay there
CACHE = 1 / 8  # of the free memory, for those lately used of clients in a file
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Placement:
    """`budget_bytes` of clients stay in memory; those at work are on `moves_to`, if that is not where they rest.

    `client_bytes`: of one client's vectors, before that is measured.
    """

    name: str
    budget_bytes: float = math.inf
    moves_to: torch.device | None = None
    client_bytes: int = 0

    @property
    def reads_ahead(self) -> bool:
        return self.budget_bytes < math.inf

    def __str__(self) -> str:
        """In words, where it is not the memory in which clients compute."""
        if self.name == FILE:
            return f"in the checkpoint on the disk, up to {gigabytes(self.budget_bytes)} of them in memory"
        return (
            ""
            if self.moves_to is None
            else "in the host's memory, on the device while their cohort is at work"
        )


HERE = Placement(HOST)


@dataclass(frozen=True)
class Need:
    """What clients at rest may come to."""

    clients: int  # that are asked at least once, at most
    vectors: int  # of each
    numel: int

    @property
    def client_bytes(self) -> int:
        return 4 * self.numel * self.vectors

    @property
    def bytes(self) -> int:
        return self.client_bytes * self.clients


def choose_home(asked: str, device: torch.device, need: Need) -> Placement:
    """The home that --residuals means. Raises ConfigError where all clients are to stay in what cannot hold them."""
    host, cuda = free_memory(), device.type == "cuda"
    free = {HOST: host, **({DEVICE: torch.cuda.mem_get_info(device)[0]} if cuda else {})}
    if asked == DEVICE and not cuda:
        asked = HOST  # the same here
    fitting = [name for name in (DEVICE, HOST) if name in free and need.bytes <= SHARE * free[name]]
    name = asked if asked != "auto" else next(iter(fitting), FILE)
    if name in free and need.bytes > free[name]:
        where = "the device" if name == DEVICE else "memory"
        raise ConfigError(
            f"--residuals {name}: what {need.clients:,} clients keep may come to {gigabytes(need.bytes)}, and "
            f"{gigabytes(free[name])} of {where} are free; leave it out, or give --residuals file"
        )
    return Placement(
        name,
        CACHE * host if name == FILE else math.inf,
        device if cuda and name != DEVICE else None,
        need.client_bytes,
    )


def shortage(folder: Path, need: Need, cohort: int) -> str:
    """A sentence where a checkpoint in `folder`, or above it where that is not there yet, may fill the disk; "" where it cannot."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    more = need.bytes + need.client_bytes * cohort - stored_bytes(folder)
    free = shutil.disk_usage(there).free
    if more <= free:
        return ""
    return (
        f"the checkpoint may grow by {gigabytes(more)}, and {gigabytes(free)} are free in {there}: a run that fills the disk ends and "
        "can be resumed; make room, or give --out on a larger disk"
    )


def crowding(memory: Memory, need: Need) -> str:
    """A sentence where what the server keeps of every client, beside what they keep, may not fit into main memory; "" where it does."""
    free = free_memory()
    if memory.counterpart is None or need.bytes <= free:
        return ""
    return (
        f"memory '{memory.name}' has the server keep a vector of every client in main memory: they may come to "
        f"{gigabytes(need.bytes)}, and {gigabytes(free)} are free; use --memory residual, or fewer clients"
    )


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB"


def free_memory() -> int:
    """Bytes of main memory that this process may still take: of the machine, and of the control groups that it is in."""
    return max(0, min([_machine(), *_groups()]))


def _machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(
            1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration):  # another system than Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _groups() -> Sequence[int]:
    """What each control group (version 2) leaves, from the process's own up; file pages that could go count as free."""
    left = []
    try:
        own = next(
            line.split("::", 1)[1]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
        place = CGROUP / own.lstrip("/")
        for group in (place, *place.parents):
            if group == CGROUP.parent:
                break
            if (group / "memory.max").exists() and (
                limit := (group / "memory.max").read_text().strip()
            ) != "max":
                pages = dict(
                    line.split() for line in (group / "memory.stat").read_text().splitlines()
                )
                left.append(
                    int(limit)
                    - int((group / "memory.current").read_text())
                    + int(pages.get("inactive_file", 0))
                )
    except (OSError, StopIteration, ValueError):
        pass
    return left
