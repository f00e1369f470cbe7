"""Sums over whole vectors that are the same on every device and for any number of threads.

Norms are exact sums, rounded once. Vectors are finite, float32, float16 or bfloat16, on any device; norms are Python floats, since they
may lie outside of float32.

Rump, Ogita, Oishi: Accurate floating-point summation, part I: faithful rounding. SIAM Journal on Scientific Computing 2008.
"""

import math
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from .parallel import map_ranges

UNIT = 149  # a float32 is an integer times 2^-UNIT
ROOT_BITS = 65  # of a root behind the point: more than a float64 holds of the root of 1
PIECE, DEVICE_PIECE = 1 << 16, 1 << 20  # elements that are summed together, on a CPU and elsewhere
STRETCH, LEAST = 1 << 16, 64  # elements, and rows, of a column sum that stands by itself
LANES = 64  # columns that a single one is taken apart into

Array = TypeVar("Array", np.ndarray, Tensor)


def norm1(x: Tensor) -> float:
    """‖x‖₁ of x [n], correctly rounded."""
    return float(norm1_rows(x[None])[0])


def norm2(x: Tensor) -> float:
    """‖x‖₂ of x [n], correctly rounded."""
    return _root(_sums(x[None], 2)[0]) / (1 << UNIT + ROOT_BITS)


def sum_squares(x: Tensor) -> float:
    """‖x‖₂² of x [n], correctly rounded."""
    return _sums(x[None], 2)[0] / (1 << 2 * UNIT)


def norm1_rows(X: Tensor) -> np.ndarray:
    """`norm1` of every row of X [m, n]: float64 [m]."""
    return np.array([total / (1 << UNIT) for total in _sums(X, 1)], np.float64)


def _root(total: int) -> int:
    """Return √total · 2^ROOT_BITS, cut off, with the last bit set if it is not exact: it rounds to float64 as the root does."""
    scaled = total << 2 * ROOT_BITS
    root = math.isqrt(scaled)
    return root | (root * root != scaled)


def _sums(X: Tensor, power: int) -> list[int]:
    """Return Σ|x|^power of every row of X [m, n], in units of 2^(-UNIT·power)."""
    X, on_cpu = X.detach(), X.device.type == "cpu"
    wide = max(1, (PIECE if on_cpu else DEVICE_PIECE) // max(len(X), 1))
    one = 2.0 ** (UNIT * power)

    def work(start: int, stop: int) -> list[int]:
        totals = [0] * len(X)
        for left in range(start, stop, wide):
            piece = X[:, left : min(left + wide, stop)].to(torch.float32)
            v = piece.numpy().astype(np.float64) if on_cpu else piece.to(torch.float64)
            for exact in _exact_sums(abs(v) if power == 1 else v * v):  # both without an error
                totals = [total + int(s * one) for total, s in zip(totals, exact.tolist())]
        return totals

    return [sum(parts) for parts in zip(*map_ranges(X.shape[1], work))]


def _exact_sums(v: Array) -> Iterator[Array]:
    """Yield sums [m] that add up to those of the rows of v [m, n], n ≥ 1, float64, which is overwritten. Each is exact in any order.

    In every step the leading bits of all elements are cut off, as many as leave their sum within 53 bits.
    """
    library = torch if isinstance(v, Tensor) else np
    room = 2.0 ** v.shape[1].bit_length()
    while True:
        ends = (f(v, axis=1, keepdims=True) for f in (library.amax, library.amin))
        largest = library.maximum(next(ends), -next(ends))
        if not largest.any():
            return
        above = room * largest / library.frexp(largest)[0].clip(0.5)  # a power of two
        leading = v + above
        leading -= above
        yield leading.sum(1)
        v -= leading


def column_sides(x: Tensor, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of the entries ≥ 0 and < 0 of each column of a finite, nonempty x [rows · columns], row by row, and their numbers.

    float64 and int64 [2, columns]. Not exact, but summed in one order everywhere: on the host, in float64, from the first row to the
    last of each stretch, and then stretch by stretch. A stretch is as many rows as make STRETCH elements, and at least LEAST. One
    column by itself is summed as LANES columns and what is left, and then these sums one after the other.
    """
    if columns > 1:
        return _column_sides(x, columns)
    whole = x.numel() // LANES * LANES
    lanes = [
        _column_sides(part, min(part.numel(), LANES))
        for part in (x[:whole], x[whole:])
        if part.numel()
    ]
    totals, counts = (np.concatenate(part, axis=1) for part in zip(*lanes, strict=True))
    return totals.cumsum(axis=1)[:, -1:], counts.sum(axis=1, keepdims=True)


def _column_sides(x: Tensor, columns: int) -> tuple[np.ndarray, np.ndarray]:
    grid = x.detach().cpu().to(torch.float32).numpy().reshape(-1, columns)
    totals, below = np.zeros((2, columns)), np.zeros(columns, np.int64)
    high = max(LEAST, STRETCH // columns)
    for start in range(0, len(grid), high):
        part = grid[start : start + high].astype(np.float64)
        # numpy adds along the first axis row after row.
        totals += part.clip(0).sum(axis=0), part.clip(max=0).sum(axis=0)
        below += np.count_nonzero(part < 0, axis=0)
    return totals, np.stack([len(grid) - below, below])
