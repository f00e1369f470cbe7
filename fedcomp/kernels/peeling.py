"""Peeling recovers integers from a count sketch if the positions of the integers are known.

The position i of an integer q_i is called its key. The sketch adds q_i, with a sign s_r(i), to the cell h_r(i) of each row r of a table S
(count_sketch.py):

    S[r, h_r(i)] += s_r(i)·q_i.

A cell that contains a single key determines the integer of this key. Peeling subtracts this integer from all cells of the key, and
continues with cells that now contain a single key. Recovered integers are exact, modulo 2⁶⁴. In the limit of many keys, peeling recovers
all integers if the table has more than 1.222 cells per key with 3 rows, 1.295 with 4 rows, or 1.425 with 5 rows. With fewer cells, peeling
stops while many keys are left (Molloy, "Cores in random hypergraphs and Boolean formulas", 2005).

The integers of the keys that are left are computed by least squares, because their cells usually give more equations than there are unknown
integers. The solution, computed by conjugate gradients, is rounded to integers, which are subtracted from the table. This is done several
times, each time with the remaining values of the table. In some tables, the equations do not determine all integers. To find out which keys
are determined, the same equations are also solved for a test table of known random integers. A key counts as determined if the solution for
the test table gives its random integer, and if its cells in the given table are zero after the subtractions. For keys that are not
determined, the solution is only an estimate.

The time is O(keys · rows), because fewer steps of conjugate gradients are allowed if there are many keys.
"""

from typing import NamedTuple

import numpy as np

from . import count_sketch, philox

BLOCK = 1 << 14  # number of keys whose cells are computed at a time
MAX_STEPS = 200  # maximum number of steps of conjugate gradients
MAX_WORK = 1 << 21  # maximum of (number of steps) · (number of keys)
ROUNDS = 4  # number of times that a least-squares solution is subtracted from the table
STREAM = 1 << 18  # index of the random stream that gives the known random integers


class KeyCells(NamedTuple):
    """The cells of k keys (positions) in a table of rows · columns cells."""

    cells: np.ndarray  # indices in the flattened table, int32 [k, rows]
    negative: np.ndarray  # whether the key's sign s_r is negative in the row, bool [k, rows]
    size: int  # number of cells of the table, below 2³¹


class Recovered(NamedTuple):
    """The recovered integers of k keys."""

    values: np.ndarray  # int64 [k]
    peeled: int  # number of keys recovered by peeling
    solved: int  # number of keys determined by least squares; the values of all other keys are estimates


def key_cells(positions: np.ndarray, rows: int, columns: int, seed: int) -> KeyCells:
    """Return the cells of keys, int64 [k], in a count sketch [rows, columns]."""
    cells = np.empty((positions.size, rows), np.int32)
    negative = np.empty((positions.size, rows), np.bool_)
    for start in range(0, positions.size, BLOCK):
        span = slice(start, start + BLOCK)
        for r, (buckets, signs) in enumerate(
            count_sketch.buckets_and_signs(positions[span], rows, columns, seed)
        ):
            cells[span, r], negative[span, r] = buckets + r * columns, signs
    return KeyCells(cells, negative, rows * columns)


def sums(where: KeyCells, values: np.ndarray) -> np.ndarray:
    """Return the table of a count sketch, int64 [size]: in each cell, the sum of the signed values of its keys, modulo 2⁶⁴."""
    table = np.zeros(where.size, np.int64)
    _add(table, where, values)
    return table


def recover(where: KeyCells, table: np.ndarray) -> Recovered:
    """Recover the integers of keys from a table, int64 [size], and subtract them from the table in place."""
    values, is_peeled = peel(where, table)
    peeled = int(np.count_nonzero(is_peeled))
    if peeled == is_peeled.size:
        return Recovered(values, peeled, 0)
    remaining = np.flatnonzero(~is_peeled)
    rest = KeyCells(where.cells[remaining], where.negative[remaining], where.size)
    values[remaining], determined = solve(rest, table)
    return Recovered(values, peeled, int(np.count_nonzero(determined)))


def peel(where: KeyCells, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Peel keys, and subtract their integers from the table. Return the integers, int64 [k], and whether each key was peeled."""
    from . import peeling_loops

    values, is_peeled = np.zeros(len(where.cells), np.int64), np.zeros(len(where.cells), np.bool_)
    peeling_loops.peel(where.cells, where.negative, table, values, is_peeled)
    return values, is_peeled


def solve(where: KeyCells, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Solve for the integers of keys by least squares, and subtract them from the table.

    Return the integers, int64 [k], and whether the table determines each of them, bool [k].
    """
    used, cells = np.unique(where.cells, return_inverse=True)
    dense = KeyCells(cells.reshape(where.cells.shape).astype(np.int32), where.negative, used.size)
    rest = table[used]
    # The test table has random integers of about the same magnitude as the unknown integers.
    bits = min(56, int(np.abs(rest).max()).bit_length())
    random = (philox.words(0, len(dense.cells), 0, STREAM).astype(np.int64) << 24) >> 56 - bits
    values, recovered = _solve(dense, rest), _solve(dense, sums(dense, random))
    table[used] = rest
    return values, (recovered == random) & (rest[dense.cells] == 0).all(1)


def _solve(where: KeyCells, table: np.ndarray) -> np.ndarray:
    """Return the integers of keys [k] by least squares, and subtract them from the table in place."""
    signs, values = np.where(where.negative, -1.0, 1.0), np.zeros(len(where.cells), np.int64)
    for _ in range(ROUNDS):
        step = np.rint(_least_squares(where, signs, table.astype(np.float64))).astype(np.int64)
        values += step
        _add(table, where, -step)
    return values


def _least_squares(where: KeyCells, signs: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the least-squares solution [k] with the smallest norm, or an approximation after the maximum number of steps (CGLS)."""
    x = np.zeros(len(signs))
    slope = _gather(where, signs, table)
    direction, square = slope.copy(), float(slope @ slope)
    tolerance = 1e-30 * square
    for _ in range(max(2, min(MAX_STEPS, MAX_WORK // len(signs)))):
        if square <= tolerance:
            break
        image = np.bincount(where.cells.ravel(), (signs * direction[:, None]).ravel(), where.size)
        length = square / float(image @ image)
        x += length * direction
        table = table - length * image
        slope = _gather(where, signs, table)
        before, square = square, float(slope @ slope)
        direction = slope + square / before * direction
    return x


def _gather(where: KeyCells, signs: np.ndarray, table: np.ndarray) -> np.ndarray:
    return (signs * table[where.cells]).sum(1)


def _add(table: np.ndarray, where: KeyCells, values: np.ndarray) -> None:
    for cells, negative in zip(where.cells.T, where.negative.T, strict=True):
        np.add.at(table, cells, np.where(negative, -values, values))
