"""Peeling: the integers that known keys stand for, from a count sketch of them.

    S[r, h_r(i)] += s_r(i)·q_i     for each row r; the keys i are known, h and s are those of kernels/count_sketch.py

A cell with one key that is not known yet tells its integer; it is subtracted wherever it was added, and so on. What is told is exact, mod
2⁶⁴. In the limit of many keys all are told above 1.222 cells a key in 3 rows, 1.295 in 4, 1.425 in 5, and none of a large core below
(Molloy: Cores in random hypergraphs and Boolean formulas. 2005).

Keys that are left, mostly a few that share all of their cells, or a core in a table that is too small, still have more equations than
unknowns as a rule: least squares, in steps of conjugate gradients, rounded to integers, whose rest is solved for again. Which of them the
equations determine is seen by solving for integers that are known: where these come out, and nothing is left of the cells, so did the
others. What is not determined gets the shortest solution, or with few steps comes closer to it: never farther from the truth, in the sum of
squares, than zeros are.

Time is O(keys · rows): the steps grow fewer as what is left grows.
"""

from typing import NamedTuple

import numpy as np

from . import count_sketch, philox

BLOCK = 1 << 14  # keys that are placed together
MOST_STEPS = 200  # of conjugate gradients
WORK = 1 << 21  # steps times keys, at most
ROUNDS = 4  # of solving for the rest
STREAM = 1 << 18  # of the words that known integers are made of


class Places(NamedTuple):
    """The cells of k keys in a table of rows · columns cells."""

    cells: np.ndarray  # int32 [k, rows], counted through the rows of the table
    negative: np.ndarray  # bool [k, rows]
    size: int  # of the table; below 2³¹


class Recovered(NamedTuple):
    values: np.ndarray  # int64 [k]
    peeled: int  # keys that were told by a cell of their own
    solved: int  # that least squares determined; the rest is estimated


def places(positions: np.ndarray, rows: int, columns: int, seed: int) -> Places:
    """Return the cells of positions, int64 [k], in a table [rows, columns] of a seed."""
    cells = np.empty((positions.size, rows), np.int32)
    negative = np.empty((positions.size, rows), np.bool_)
    for start in range(0, positions.size, BLOCK):
        span = slice(start, start + BLOCK)
        for r, (buckets, signs) in enumerate(
            count_sketch.places(positions[span], rows, columns, seed)
        ):
            cells[span, r], negative[span, r] = buckets + r * columns, signs
    return Places(cells, negative, rows * columns)


def sums(where: Places, values: np.ndarray) -> np.ndarray:
    """Return the table of integers [k]: int64 [size], mod 2⁶⁴."""
    table = np.zeros(where.size, np.int64)
    _add(table, where, values)
    return table


def recover(where: Places, table: np.ndarray) -> Recovered:
    """The integers of keys from their table, int64 [size], which is overwritten with what they leave of it."""
    values, found = peel(where, table)
    peeled = int(np.count_nonzero(found))
    if peeled == found.size:
        return Recovered(values, peeled, 0)
    left = np.flatnonzero(~found)
    rest = Places(where.cells[left], where.negative[left], where.size)
    values[left], determined = solve(rest, table)
    return Recovered(values, peeled, int(np.count_nonzero(determined)))


def peel(where: Places, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers, int64 [k], zero where there is none, and for which keys they were found, bool [k]. What is found leaves the table."""
    from . import peeling_loops

    values, found = np.zeros(len(where.cells), np.int64), np.zeros(len(where.cells), np.bool_)
    peeling_loops.peel(where.cells, where.negative, table, values, found)
    return values, found


def solve(where: Places, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers [k] by least squares, and which of them are determined, bool [k]. What is solved leaves the table."""
    used, cells = np.unique(where.cells, return_inverse=True)
    dense = Places(cells.reshape(where.cells.shape).astype(np.int32), where.negative, used.size)
    rest = table[used]
    # What is known shall be as large as what is not.
    bits = min(56, int(np.abs(rest).max()).bit_length())
    known = (philox.words(0, len(dense.cells), 0, STREAM).astype(np.int64) << 24) >> 56 - bits
    values, again = _solve(dense, rest), _solve(dense, sums(dense, known))
    table[used] = rest
    return values, (again == known) & (rest[dense.cells] == 0).all(1)


def _solve(where: Places, table: np.ndarray) -> np.ndarray:
    """Integers [k], which leave the table."""
    signs, values = np.where(where.negative, -1.0, 1.0), np.zeros(len(where.cells), np.int64)
    for _ in range(ROUNDS):
        step = np.rint(_least_squares(where, signs, table.astype(np.float64))).astype(np.int64)
        values += step
        _add(table, where, -step)
    return values


def _least_squares(where: Places, signs: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The shortest x [k] whose sums come closest to the table, float64 [size], or what a few steps of CGLS make of it."""
    x = np.zeros(len(signs))
    slope = _gather(where, signs, table)
    direction, square = slope.copy(), float(slope @ slope)
    enough = 1e-30 * square
    for _ in range(max(2, min(MOST_STEPS, WORK // len(signs)))):
        if square <= enough:
            break
        seen = _spread(where, signs, direction)
        length = square / float(seen @ seen)
        x += length * direction
        table = table - length * seen
        slope = _gather(where, signs, table)
        before, square = square, float(slope @ slope)
        direction = slope + square / before * direction
    return x


def _spread(where: Places, signs: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.bincount(where.cells.ravel(), (signs * x[:, None]).ravel(), where.size)


def _gather(where: Places, signs: np.ndarray, table: np.ndarray) -> np.ndarray:
    return (signs * table[where.cells]).sum(1)


def _add(table: np.ndarray, where: Places, values: np.ndarray) -> None:
    for cells, negative in zip(where.cells.T, where.negative.T, strict=True):
        np.add.at(table, cells, np.where(negative, -values, values))
