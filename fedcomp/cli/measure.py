"""Measuring codecs beside a plain copy of the vector: speed, size, error, memory."""

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..codecs import Codec
from ..layout import Layout
from ..tasks import initial_model, load
from ..tasks.check import check, data_of
from ..training.batches import plan_batches
from ..training.local_sgd import LocalSGD, SerialEngine

LEVELS, REPEATED = 1 << 12, 16  # so many values, each met so often in the mean, are levels
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Vector:
    """What is compressed: a vector [numel] and its layout."""

    what: str
    values: Tensor
    layout: Layout


@dataclass(frozen=True)
class Measured:
    """One codec on one vector. Times are medians, in seconds."""

    codec: str
    encode_s: float
    decode_s: float
    encode_values_per_s: float
    decode_values_per_s: float
    encode_copies: float  # how many plain copies of the vector take as long
    decode_copies: float
    frame_bytes: int
    bits_per_parameter: float
    bound_bits_per_parameter: (
        float | None
    )  # entropy of what was decoded, each coordinate alone; None where all differ or a seed tells some
    error: float  # ‖x − C(x)‖² / ‖x‖²
    peak_bytes: (
        int | None
    )  # that encoding and decoding add to what the process holds; None where it cannot be told


def normal(numel: int, device: torch.device | str = "cpu") -> Vector:
    """Standard normal values, as a square matrix and what is left of one."""
    side = math.isqrt(numel)
    shapes = {"weight": (side, side)} | (
        {"rest": (numel - side * side,)} if numel > side * side else {}
    )
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    return Vector(f"{numel:,} normal values", values.to(device), Layout.from_shapes(shapes))


def update_of(task_name: str, data: Path | None, device: torch.device) -> Vector:
    """The update of one client that trained a task's initial model for five steps of twenty examples."""
    task, sgd = load(task_name, data), LocalSGD()
    examples = data_of(task, "train")
    layout, model = check(task, sgd.batch_size, examples), initial_model(task, 0)
    engine = SerialEngine(task, model, layout, "cpu")
    trained = engine.train(
        layout.gather(model), examples, plan_batches(sgd, np.arange(len(examples)), 0, 1, 0), sgd
    )
    return Vector(
        f"an update of {task.name}, {layout.numel:,} parameters", trained.update.to(device), layout
    )


def measure(vector: Vector, codecs: Iterable[Codec], repeats: int) -> Iterator[Measured]:
    """Encode and decode with each codec, plain copies in between."""
    x, layout = vector.values, vector.layout
    there = torch.empty_like(x)
    for c in codecs:
        frame = c.encode(x, seed=1, layout=layout)
        y = c.decode(frame, numel=x.numel(), device=x.device, layout=layout)
        ways: dict[str, Callable[[], object]] = {
            "copy": lambda: there.copy_(x),
            "encode": lambda c=c: c.encode(x, seed=1, layout=layout),
            "decode": lambda c=c, frame=frame: c.decode(
                frame, numel=x.numel(), device=x.device, layout=layout
            ),
        }
        error, bound = _error(x, y), None if c.seeded else _bound_bits(y)
        del y
        peak = _peak_bytes([ways["encode"], ways["decode"]], x.device)
        taken = _seconds(ways, repeats, x.device)
        size = max(x.numel(), 1)
        yield Measured(
            str(c),
            taken["encode"],
            taken["decode"],
            x.numel() / taken["encode"],
            x.numel() / taken["decode"],
            taken["encode"] / taken["copy"],
            taken["decode"] / taken["copy"],
            len(frame),
            8 * len(frame) / size,
            None if bound is None else bound / size,
            error,
            peak,
        )


def _seconds(
    ways: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Medians of interleaved repeats."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken[name].append(time.perf_counter() - start)
    return {name: max(statistics.median(times), 1e-9) for name, times in taken.items()}


def _error(x: Tensor, y: Tensor) -> float:
    """‖x − y‖² / ‖x‖², in float64 by pieces, so that it needs no second copy of a large vector."""
    lost = total = 0.0
    for a, b in zip(x.split(1 << 22), y.split(1 << 22), strict=True):
        wide = a.double()
        lost = lost + float((wide - b.double()).square().sum())
        total = total + float(wide.square().sum())
    return lost / total if total else 0.0


def _bound_bits(y: Tensor) -> float | None:
    """n·H of the decoded values where they are levels; where few are not zero, the entropy of their places and 32 bits for each."""
    nonzero = int(y.count_nonzero())
    if y[y != 0][: REPEATED * LEVELS].unique().numel() <= LEVELS:
        counts = y.unique(return_counts=True)[1].cpu().numpy()
        if REPEATED * counts.size <= nonzero + REPEATED:
            return float((counts * np.log2(y.numel() / counts)).sum()) if counts.size else 0.0
    if 2 * nonzero > y.numel():
        return None
    p = np.array([nonzero, y.numel() - nonzero]) / y.numel()
    return float(-(p * np.log2(p)).sum() * y.numel() + 32 * nonzero)


def _peak_bytes(ways: Sequence[Callable[[], object]], device: torch.device) -> int | None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for way in ways:
            way()
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR.write_text("5")  # Linux: the peak starts anew
        before = _held("VmRSS")
        for way in ways:
            way()
        return max(0, _held("VmHWM") - before)
    except (OSError, AttributeError, StopIteration, ValueError):
        return None


def _held(what: str) -> int:
    """Bytes, of a line of /proc/self/status."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])
