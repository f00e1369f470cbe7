"""Check this machine: Python and packages, torch, its threads and devices, and free disk space."""

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ...formatting import human_bytes
from .asked import Asked
from .check import FAILED, OK, SKIPPED, Check

LEAST_FREE = 10**9  # bytes where runs go


def checks(asked: Asked) -> Iterator[Check]:
    yield from packages()
    yield from torch_and_cuda()
    yield disk(Path("runs"))


def packages() -> Iterator[Check]:
    """Check the versions of Python, flwr and other packages against fedcomp's requirements."""
    from importlib import metadata

    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        about = metadata.metadata("fedcomp")
    except metadata.PackageNotFoundError:
        yield Check(
            "packages",
            SKIPPED,
            "fedcomp is not installed but run from its sources",
            "install it with: pip install .",
        )
        return
    wanted, here = SpecifierSet(about["Requires-Python"] or ""), platform.python_version()
    fits = wanted.contains(here, prereleases=True)
    yield Check(
        "python",
        OK if fits else FAILED,
        here if fits else f"{here}, and {wanted} is needed",
        "" if fits else f"make an environment with Python {wanted}",
    )
    needed = [Requirement(line) for line in about.get_all("Requires-Dist") or []]
    needed = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = [one for one in needed if not _fits(one.name, one.specifier.contains)]
    for one in needed:
        if one.name == "flwr" and one not in wrong:
            yield Check("flwr", OK, f"{metadata.version('flwr')}, within {one.specifier}")
    for one in wrong:
        yield Check(
            one.name,
            FAILED,
            f"{_version(one.name)}, and {one.specifier} is needed",
            f"pip install '{one.name}{one.specifier}'",
        )
    if not wrong:
        yield Check(
            "packages", OK, f"{len(needed)} as needed: {', '.join(one.name for one in needed)}"
        )


def _version(name: str) -> str:
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return "not installed"


def _fits(name: str, contains: Callable[..., bool]) -> bool:
    return (version := _version(name)) != "not installed" and contains(version, prereleases=True)


def torch_and_cuda() -> Iterator[Check]:
    try:
        import torch
    except (
        Exception
    ) as error:  # a library that is missing is an OSError, a half-installed package anything
        yield Check(
            "torch",
            FAILED,
            f"cannot be imported ({type(error).__name__}: {error})",
            "install it anew with: pip install --force-reinstall torch",
        )
        return
    yield Check("torch", OK, torch.__version__)
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Check("cuda", OK, f"{len(names)} device{'s' * (len(names) > 1)}: {', '.join(names)}")
    elif torch.version.cuda and Path("/dev/nvidia0").exists():
        yield Check(
            "cuda",
            FAILED,
            f"a GPU is here and torch {torch.__version__} cannot use it",
            "update NVIDIA's driver, or run with --device cpu",
        )
    elif Path("/dev/nvidia0").exists():
        yield Check(
            "cuda",
            FAILED,
            f"a GPU is here and torch {torch.__version__} is built without CUDA",
            "install torch's CUDA build, or run with --device cpu",
        )
    else:
        yield Check("cuda", SKIPPED, "no device is here, runs are on the CPU")
    yield threads(torch.get_num_threads(), cores())


def cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process may use: its CPU affinity, limited by its container's CPU quota."""
    bound = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with suppress(OSError, ValueError):
        quota, period = map(int, limit.read_text().split())  # "max" is no number: no limit
        bound = min(bound, max(1, -(-quota // period)))
    return bound


def threads(count: int, usable: int) -> Check:
    said = f"{count} on {usable} core{'s' * (usable > 1)}"
    if count > usable:
        return Check(
            "threads", FAILED, f"{said}, which slows every step", f"set OMP_NUM_THREADS={usable}"
        )
    return Check("threads", OK, said)


def disk(runs: Path) -> Check:
    """Check that the default folder of runs can be written and that its disk has free space."""
    place = runs.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return Check(
            "disk", FAILED, f"{place} cannot be written", "work in another folder, or give --out"
        )
    if free < LEAST_FREE:
        return Check(
            "disk",
            FAILED,
            f"{human_bytes(free)} free in {place}",
            f"free {human_bytes(LEAST_FREE)}, or give --out elsewhere",
        )
    return Check("disk", OK, f"{human_bytes(free)} free in {place}")
