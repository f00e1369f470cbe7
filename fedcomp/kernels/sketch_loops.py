"""Loops of kernels/count_sketch.py, compiled by numba. The lowest bit of a word turns the highest of a float32, its sign.

A range of coordinates begins at `first`, a multiple of 4.
"""

import numba
import numpy as np
from numpy import uint32, uint64

from .count_sketch import UNIT
from .loops import compiled, draw, word_at


@numba.njit(nogil=True, inline="always")
def _draw(positions, first, many, low, high, stream, words):
    """The words of `many` coordinates, at most UNIT."""
    if positions is None:
        draw(low, high, stream, first, words)
    else:
        for i in range(many):
            words[i] = word_at(low, high, stream, uint64(positions[first + i]))


@compiled
def add(x, first, low, high, stream, cells):
    """Add x [n], float32, the coordinates from `first` on, to the cells [columns] of a row."""
    low, high, stream, columns = uint32(low), uint32(high), uint32(stream), uint64(cells.size)
    bits, words = x.view(np.uint32), np.empty(UNIT, np.uint32)
    for start in range(uint64(0), uint64(x.size), uint64(UNIT)):
        many = min(uint64(UNIT), uint64(x.size) - start)
        draw(low, high, stream, uint64(first) + start, words)
        for i in range(many):
            word = words[i]
            cells[uint64(word) * columns >> uint64(32)] += uint32(
                bits[start + i] ^ word << uint32(31)
            ).view(np.float32)


@compiled
def estimate(cells, positions, first, low, high, stream, out):
    """Fill `out` with medians over the rows of cells, float32 [rows, columns].

    Coordinates are those at positions, int64, from `first` on, or a range where `positions` is None.
    """
    rows, columns = cells.shape[0], uint64(cells.shape[1])
    low, high, bits = uint32(low), uint32(high), cells.view(np.uint32)
    words, found = np.empty(UNIT, np.uint32), np.zeros((rows, UNIT), np.float32)
    turned = found.view(np.uint32)
    for start in range(uint64(0), uint64(out.size), uint64(UNIT)):
        many = min(uint64(UNIT), uint64(out.size) - start)
        for r in range(uint64(rows)):
            _draw(positions, uint64(first) + start, many, low, high, uint32(stream + r), words)
            for i in range(many):
                word = words[i]
                turned[r, i] = bits[r, uint64(word) * columns >> uint64(32)] ^ word << uint32(31)
        for last in range(
            rows - 1, 0, -1
        ):  # the rows are sorted by exchanging neighbours, which vectorises
            for r in range(uint64(last)):
                below, above = found[r], found[r + uint64(1)]
                for i in range(uint64(UNIT)):
                    a, b = below[i], above[i]
                    below[i], above[i] = (a, b) if a < b else (b, a)
        for i in range(many):
            out[start + i] = found[rows >> 1, i] + np.float32(0)
