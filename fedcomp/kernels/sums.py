"""Sums over whole vectors that are the same on every device and for any number of threads.

Norms are exact sums, rounded once. A float32's magnitude is an integer times 2⁻¹⁴⁹: its 24-bit significand, shifted by its exponent.
Significands, or their squares, are added as integers, one sum for each of the 256 exponents; the sums are put together as one long
integer, and that is rounded to float64. Vectors are finite, float32, float16 or bfloat16, on any device; norms are Python floats, since
they may lie outside of float32.
"""

import math

import numpy as np
import torch
from torch import Tensor

from . import backend
from .parallel import map_ranges, pieces

EXPONENTS = 256
UNIT = 149  # a magnitude is an integer times 2^-UNIT
FRACTION, FRACTION_BITS = 0x7FFFFF, 23
LOW, LOW_BITS = 0xFFFFFF, 24  # a square is kept in two parts, each as wide as a significand
SHIFTS = (
    0,
    LOW_BITS,
    13,
    13 + LOW_BITS,
    24,
    24 + LOW_BITS,
)  # powers of two that the rows of a table count for, low and high part
# each: |x| or l²; h·l/2¹², met twice, hence 13; h²/2²⁴ (sum_loops.squares)
PIECE = 1 << 20  # elements that are tabled at a time where no loop is compiled
STRETCH, LEAST = 1 << 16, 64  # elements, and rows, of a column sum that stands by itself
LANES = 64  # columns that a single one is taken apart into


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


ROOT_BITS = 65  # of a root behind the point: more than a float64 holds of the root of 1


def _root(total: int) -> int:
    """√total · 2^ROOT_BITS, cut off, with the last bit set where something was: it rounds to float64 as the root itself does."""
    scaled = total << 2 * ROOT_BITS
    root = math.isqrt(scaled)
    return root | (root * root != scaled)


def _sums(X: Tensor, power: int) -> list[int]:
    """Σ|x|^power of every row of X [m, n], in units of 2^(-UNIT·power)."""
    X = X.detach()
    if X.device.type == "cpu" and backend.compile_vector(X.shape[1]):
        return [_total(_compiled(x, power), power) for x in X]
    return [_total(table, power) for table in _tabled(X, power)]


def _total(table: np.ndarray, power: int) -> int:
    """The sum that a table [rows, EXPONENTS] holds."""
    rows, exponents = table.nonzero()
    shifts = np.array(SHIFTS)[rows] + power * (exponents - 1).clip(
        0
    )  # numbers below 2^-126 have the unit of the exponent 1
    return sum(
        count << shift
        for count, shift in zip(table[rows, exponents].tolist(), shifts.tolist(), strict=True)
    )


def _tabled(X: Tensor, power: int) -> np.ndarray:
    """The tables [m, 2, EXPONENTS] of the rows of X [m, n], piece by piece."""
    m, n = X.shape
    table = np.zeros((m, 2, EXPONENTS), np.int64)
    wide = max(1, PIECE // max(m, 1))
    for start in range(0, n, wide):
        bits = X[:, start : start + wide].to(torch.float32).contiguous().view(torch.int32)
        if bits.device.type == "cpu":
            table += _table_numpy(bits.numpy(), power)
        else:
            table += _table_torch(bits, power).cpu().numpy()
    return table


def _table_numpy(bits: np.ndarray, power: int) -> np.ndarray:
    exponents = bits >> FRACTION_BITS & EXPONENTS - 1
    terms = ((bits & FRACTION) + ((exponents > 0) << FRACTION_BITS)).astype(np.int64) ** power
    at = (exponents + EXPONENTS * np.arange(len(bits), dtype=np.int64)[:, None]).ravel()
    # Sums of integers below 2⁵³, and so exact in the float64 of bincount.
    parts = [
        np.bincount(at, part.ravel(), EXPONENTS * len(bits)).reshape(-1, EXPONENTS)
        for part in (terms & LOW, terms >> LOW_BITS)
    ]
    return np.stack(parts, axis=1).astype(np.int64)


def _table_torch(bits: Tensor, power: int) -> Tensor:
    exponents = bits >> FRACTION_BITS & EXPONENTS - 1
    terms = ((bits & FRACTION) + ((exponents > 0).to(torch.int32) << FRACTION_BITS)).to(
        torch.int64
    ) ** power
    table = bits.new_zeros(len(bits), 2, EXPONENTS, dtype=torch.int64)
    for row, part in enumerate((terms & LOW, terms >> LOW_BITS)):
        table[:, row].scatter_add_(1, exponents.to(torch.int64), part)
    return table


def _compiled(x: Tensor, power: int) -> np.ndarray:
    """The table of a large x [n] in main memory, by threads."""
    from . import sum_loops

    loop, rows = (sum_loops.magnitudes, 2) if power == 1 else (sum_loops.squares, 6)

    def work(start: int, stop: int) -> np.ndarray:
        table = np.zeros((rows, EXPONENTS), np.int64)
        for piece in pieces(x, start, stop):
            loop(piece, table)
        return table

    return sum(map_ranges(x.numel(), work))


def column_sides(x: Tensor, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each column of a finite x [rows · columns], row by row, not empty: the sums of what is ≥ 0 and < 0, and how many these are.

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
    grid = x.detach().cpu().to(torch.float32).contiguous().numpy().reshape(-1, columns)
    high = max(LEAST, STRETCH // columns)
    stretches = -(-len(grid) // high)
    totals, negative = np.zeros((stretches, 2, columns)), np.zeros((stretches, columns), np.int64)
    if backend.compile_vector(grid.size):
        from . import sum_loops

        def work(start: int, stop: int) -> None:
            at = slice(start // (high * columns), None)
            sum_loops.sides(
                grid[start // columns : stop // columns], high, totals[at], negative[at]
            )

        map_ranges(grid.size, work, high * columns)
    else:
        for i in range(stretches):
            part = grid[i * high : (i + 1) * high]
            totals[i], negative[i] = _sides(part), (part < 0).sum(axis=0)
    below = negative.sum(axis=0)
    return totals.cumsum(axis=0)[-1], np.stack([len(grid) - below, below])


def _sides(part: np.ndarray) -> list[np.ndarray]:
    """Sums of what is ≥ 0 and of what is < 0 in each column of part [rows, columns], one row after the other, as bincount adds."""
    at = np.arange(part.size) % part.shape[1]
    values = part.ravel().astype(np.float64)
    return [np.bincount(at, side, part.shape[1]) for side in (values.clip(0), values.clip(max=0))]
