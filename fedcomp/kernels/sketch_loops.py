"""Loops of kernels/count_sketch.py, compiled by numba.

`first`: index of the first coordinate of a range, a multiple of 4. `low`, `high`: halves of the seed (philox.py). `stream`: index of the
random stream of a row, or of row 0 in `estimate`.
"""

import numba
import numpy as np
from numpy import uint32, uint64

from .count_sketch import UNIT
from .loops import compiled, draw, word_at


@numba.njit(nogil=True, inline="always")
def _draw(positions, first, count, low, high, stream, words):
    """Write the random words of `count` ≤ UNIT coordinates, as in `estimate`, to `words`."""
    if positions is None:
        draw(low, high, stream, first, words)
    else:
        for i in range(count):
            words[i] = word_at(low, high, stream, uint64(positions[first + i]))


@compiled
def add(x, first, low, high, stream, cells):
    """Add x [n], float32, to the cells [columns] of one row of a sketch."""
    low, high, stream, columns = uint32(low), uint32(high), uint32(stream), uint64(cells.size)
    bits, words = x.view(np.uint32), np.empty(UNIT, np.uint32)
    for start in range(uint64(0), uint64(x.size), uint64(UNIT)):
        count = min(uint64(UNIT), uint64(x.size) - start)
        draw(low, high, stream, uint64(first) + start, words)
        for i in range(count):
            word = words[i]
            value = uint32(bits[start + i] ^ word << uint32(31)).view(np.float32)
            cells[uint64(word) * columns >> uint64(32)] += value


@compiled
def estimate(cells, positions, first, low, high, stream, out):
    """Fill `out` with estimates of coordinates: medians over the rows of the sketch `cells`, float32 [rows, columns].

    The coordinates are first, first + 1, …, or positions[first], positions[first + 1], … if `positions` (int64) is not None.
    """
    rows, columns = cells.shape[0], uint64(cells.shape[1])
    low, high, bits = uint32(low), uint32(high), cells.view(np.uint32)
    words, estimates = np.empty(UNIT, np.uint32), np.zeros((rows, UNIT), np.float32)
    estimate_bits = estimates.view(np.uint32)
    for start in range(uint64(0), uint64(out.size), uint64(UNIT)):
        count = min(uint64(UNIT), uint64(out.size) - start)
        for r in range(uint64(rows)):
            _draw(positions, uint64(first) + start, count, low, high, uint32(stream + r), words)
            for i in range(count):
                word = words[i]
                cell = bits[r, uint64(word) * columns >> uint64(32)]
                estimate_bits[r, i] = cell ^ word << uint32(31)
        for last in range(rows - 1, 0, -1):  # a bubble sort, vectorized over the coordinates
            for r in range(uint64(last)):
                below, above = estimates[r], estimates[r + uint64(1)]
                for i in range(uint64(UNIT)):
                    a, b = below[i], above[i]
                    below[i], above[i] = (a, b) if a < b else (b, a)
        for i in range(count):
            out[start + i] = estimates[rows >> 1, i] + np.float32(0)
