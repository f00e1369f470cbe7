"""Sums over the elements of vectors. Results are the same on every device and for any number of threads.

Norms are computed exactly and rounded once, by a method of Rump, Ogita and Oishi, "Accurate floating-point summation, part I: faithful
rounding", SIAM Journal on Scientific Computing 2008. Vectors must be finite; tensors can be float32, float16 or bfloat16, on any device.
"""

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .parallel import map_ranges

UNIT = 149  # a float32 is an integer times 2^-UNIT
ROOT_BITS = 65  # number of fractional bits of a square root, more than float64 has
# Number of elements that are summed at a time, on CPUs and on GPUs.
PIECE, DEVICE_PIECE = 1 << 16, 1 << 20
# A block of `column_sides` has about BLOCK elements, and at least MIN_BLOCK_ROWS rows.
BLOCK, MIN_BLOCK_ROWS = 1 << 16, 64
LANES = 64  # number of columns into which `column_sides` divides a single column
TILE = 4096  # number of columns that are sorted at a time, chosen to fit in the cache
LARGEST = float(np.finfo(np.float32).max)

Array = TypeVar("Array", np.ndarray, Tensor)


def norm1(x: Tensor) -> float:
    """Return the L1 norm of x [n], correctly rounded."""
    return float(norm1_rows(x[None])[0])


def norm2(x: Tensor) -> float:
    """Return the L2 norm of x [n], correctly rounded."""
    return _root(_sums(x[None], 2)[0]) / (1 << UNIT + ROOT_BITS)


def sum_squares(x: Tensor) -> float:
    """Return the squared L2 norm of x [n], correctly rounded."""
    return _sums(x[None], 2)[0] / (1 << 2 * UNIT)


def norm1_rows(X: Tensor) -> np.ndarray:
    """Return the L1 norm of every row of X [m, n], correctly rounded, as float64 [m]."""
    return np.array([total / (1 << UNIT) for total in _sums(X, 1)], np.float64)


def _root(total: int) -> int:
    """Return √total · 2^ROOT_BITS, truncated to an integer that rounds to the same float64 as the exact root."""
    scaled = total << 2 * ROOT_BITS
    root = math.isqrt(scaled)
    return root | (root * root != scaled)  # a last bit of 1 shows that bits were truncated


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
            powers: Any = abs(v) if power == 1 else v * v  # exact in float64
            for exact in _exact_sums(powers):
                totals = [total + int(s * one) for total, s in zip(totals, exact.tolist())]
        return totals

    return [sum(parts) for parts in zip(*map_ranges(X.shape[1], work))]


def _exact_sums(v: Array) -> Iterator[Array]:
    """Yield float64 arrays [m] whose exact sum is the row sums of v [m, n], n ≥ 1. v is overwritten.

    Each step subtracts the leading bits from all elements, and yields their sum. The leading bits are so few that the float64 sum has no
    rounding errors in any order of addition.
    """
    library = torch if isinstance(v, Tensor) else np
    room = 2.0 ** v.shape[1].bit_length()
    while True:
        ends = (f(v, axis=1, keepdims=True) for f in (library.amax, library.amin))
        largest = library.maximum(next(ends), -next(ends))
        if not largest.any():
            return
        # A power of two, so that leading bits are split off without rounding errors.
        above = room * largest / library.frexp(largest)[0].clip(0.5)
        leading = v + above
        leading -= above
        yield leading.sum(1)
        v -= leading


def column_sides(x: Tensor, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums (float64) and the counts (int64) of the entries ≥ 0 and < 0 in each column of x, both [2, columns].

    x [rows · columns] must be finite, nonempty and row-major. The sums are not exact, but every machine computes them in the same order, on
    the CPU and in float64: first the rows of each block are added, and then the sums of the blocks. A single column is divided into LANES
    columns and a remainder, whose sums are added in order.
    """
    if columns > 1:
        return _column_sides(x, columns)
    whole = x.numel() // LANES * LANES
    filled = [part for part in (x[:whole], x[whole:]) if part.numel()]
    lanes = [_column_sides(part, min(part.numel(), LANES)) for part in filled]
    totals, counts = (np.concatenate(part, axis=1) for part in zip(*lanes, strict=True))
    return totals.cumsum(axis=1)[:, -1:], counts.sum(axis=1, keepdims=True)


def _column_sides(x: Tensor, columns: int) -> tuple[np.ndarray, np.ndarray]:
    grid = x.detach().cpu().to(torch.float32).numpy().reshape(-1, columns)
    totals, below = np.zeros((2, columns)), np.zeros(columns, np.int64)
    rows = max(MIN_BLOCK_ROWS, BLOCK // columns)
    for start in range(0, len(grid), rows):
        part = grid[start : start + rows].astype(np.float64)
        # numpy adds along the first axis in the order of the rows.
        totals += part.clip(0).sum(axis=0), part.clip(max=0).sum(axis=0)
        below += np.count_nonzero(part < 0, axis=0)
    return totals, np.stack([len(grid) - below, below])


def mean_of_ranks(stack: np.ndarray, first: int, last: int) -> np.ndarray:
    """Return the mean of the values with ranks first..last-1 (0 = smallest) in each column of a finite float32 [m, n], as float32 [n].

    The sum is computed in float64 from the smallest to the largest value, so it does not depend on the order of the rows.
    """
    out = np.empty(stack.shape[1], np.float32)
    for left in range(0, out.size, TILE):
        columns = stack[:, left : left + TILE].T.copy()
        columns.sort(axis=1)
        total = np.zeros(len(columns))
        for rank in range(first, last):
            total += columns[:, rank]
        out[left : left + TILE] = (total / (last - first)).clip(-LARGEST, LARGEST)
    return out
