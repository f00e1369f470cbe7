"""Check this machine: Python and packages, torch, its threads and devices, free disk space, a port, and a folder of data."""

import errno
import os
import platform
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ...errors import FedcompError, MissingExtraError, UserError
from ...formatting import human_bytes
from .check import Check, failed, ok, refused, skipped

MIN_FREE_BYTES = 10**9  # on the disk of the run folders


def checks() -> Iterator[Check]:
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
        found = "fedcomp runs from its sources and is not installed"
        yield skipped("packages", found, "install it with: pip install .")
        return
    required, version = SpecifierSet(about["Requires-Python"] or ""), platform.python_version()
    if required.contains(version, prereleases=True):
        yield ok("python", version)
    else:
        fix = f"make an environment with Python {required}"
        yield failed("python", f"{version}, but {required} is required", fix)
    requirements = [Requirement(line) for line in about.get_all("Requires-Dist") or []]
    requirements = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    n_failed = 0
    for one in sorted(requirements, key=lambda one: one.name != "flwr"):
        try:
            version = metadata.version(one.name)
            fits = one.specifier.contains(version, prereleases=True)
        except metadata.PackageNotFoundError:
            version, fits = "not installed", False
        if not fits:
            n_failed += 1
            fix = f"pip install '{one.name}{one.specifier}'"
            yield failed(one.name, f"{version}, but {one.specifier} is required", fix)
        elif one.name == "flwr":
            yield ok("flwr", f"{version}, within {one.specifier}")
    if not n_failed:
        names = ", ".join(one.name for one in requirements)
        yield ok("packages", f"{len(requirements)} as required: {names}")


def torch_and_cuda() -> Iterator[Check]:
    try:
        import torch
    except Exception as error:  # an OSError for a missing library, anything for a broken package
        found = f"cannot be imported ({type(error).__name__}: {error})"
        yield failed("torch", found, "install it again with: pip install --force-reinstall torch")
        return
    yield ok("torch", torch.__version__)
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield ok("cuda", f"{len(names)} device{'s' * (len(names) > 1)}: {', '.join(names)}")
    elif not Path("/dev/nvidia0").exists():
        yield skipped("cuda", "this machine has no GPU; runs use the CPU")
    elif torch.version.cuda:
        found = f"this machine has a GPU, but torch {torch.__version__} cannot use it"
        yield failed("cuda", found, "update NVIDIA's driver, or run with --device cpu")
    else:
        found = f"this machine has a GPU, but torch {torch.__version__} is built without CUDA"
        yield failed("cuda", found, "install torch's CUDA build, or run with --device cpu")
    yield threads(torch.get_num_threads(), cores())


def cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process may use: its CPU affinity, limited by its container's CPU quota."""
    bound = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with suppress(OSError, ValueError):
        quota, period = map(int, limit.read_text().split())  # "max" is not a number: no limit
        bound = min(bound, max(1, -(-quota // period)))
    return bound


def threads(count: int, usable: int) -> Check:
    found = f"{count} on {usable} core{'s' * (usable > 1)}"
    if count > usable:
        fix = f"set OMP_NUM_THREADS={usable}"
        return failed("threads", f"{found}, which slows every step", fix)
    return ok("threads", found)


def disk(runs: Path) -> Check:
    """Check that the default folder of runs can be written and that its disk has free space."""
    place = runs.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return failed("disk", f"{place} cannot be written", "work in another folder, or give --out")
    found = f"{human_bytes(free)} free in {place}"
    if free < MIN_FREE_BYTES:
        fix = f"free {human_bytes(MIN_FREE_BYTES)}, or give --out elsewhere"
        return failed("disk", found, fix)
    return ok("disk", found)


def listening(port: int) -> Check:
    """Check that a server can listen on a port on every address of this machine."""
    what = f"port {port}"
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                # As servers do: a port that was closed just now is free.
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                trial.bind((everywhere, port))
                trial.listen(1)
        except PermissionError:
            fix = "give --port with a number from 1024"
            return failed(what, "this user may not listen there", fix)
        except OSError as error:
            if family == socket.AF_INET6 and error.errno != errno.EADDRINUSE:
                continue  # a machine without IPv6
            found = f"another process listens there ({error.strerror})"
            fix = f"stop what ss -ltnp 'sport = :{port}' shows, or give --port with another number"
            return failed(what, found, fix)
    return ok(what, "free")


def data_folder(folder: Path) -> Iterator[Check]:
    """Load each built-in task with its data in a folder. A missing set is skipped if the folder has another one."""
    from ...tasks import available_tasks, load

    results: dict[str, tuple[int, int] | FedcompError] = {}
    for name in available_tasks():
        if name != "digits":
            try:
                task = load(name, folder)
                results[name] = len(task.train()), len(task.test())
            except (UserError, MissingExtraError) as error:
                results[name] = error
    any_loaded = any(not isinstance(result, FedcompError) for result in results.values())
    for name, result in results.items():
        if not isinstance(result, FedcompError):
            train, test = result
            yield ok("data", f"{name}: {train:,} training and {test:,} test examples")
        elif (folder / name.partition("-")[0]).exists() or not any_loaded:
            yield refused("data", f"{name}: {result}")
        else:
            yield skipped("data", f"{name}: not in {folder}")
