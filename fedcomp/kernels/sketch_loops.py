"""Loops of kernels/count_sketch.py, compiled by numba. The lowest bit of a word turns the highest of a float32, its sign."""

import numba
import numpy as np
from numpy import uint32, uint64

from .count_sketch import UNIT
from .loops import compiled, philox


@numba.njit(nogil=True, inline="always")
def _draw(first, low, high, stream, words):
    """Words first..first + UNIT − 1; `first` is a multiple of 4."""
    for j in range(uint64(UNIT // 4)):
        block, at = (first >> uint64(2)) + j, j << uint64(2)
        a, b, c, d = philox(low, high, uint32(block), uint32(block >> uint64(32)), stream, uint32(0))
        words[at], words[at + uint64(1)], words[at + uint64(2)], words[at + uint64(3)] = a, b, c, d


@compiled
def add(x, first, low, high, stream, cells):
    """Add x [n], float32, the coordinates from `first` on, a multiple of 4, to the cells [columns] of a row."""
    low, high, stream, columns = uint32(low), uint32(high), uint32(stream), uint64(cells.size)
    bits, words = x.view(np.uint32), np.empty(UNIT, np.uint32)
    for start in range(uint64(0), uint64(x.size), uint64(UNIT)):
        _draw(uint64(first) + start, low, high, stream, words)
        for i in range(min(uint64(UNIT), uint64(x.size) - start)):
            word = words[i]
            cells[uint64(word) * columns >> uint64(32)] += uint32(bits[start + i] ^ word << uint32(31)).view(np.float32)


@compiled
def estimate(cells, first, low, high, stream, out):
    """Fill `out` with medians over the rows of cells, float32 [rows, columns], for the coordinates from `first` on, a multiple of 4."""
    rows, columns = cells.shape[0], uint64(cells.shape[1])
    low, high, bits = uint32(low), uint32(high), cells.view(np.uint32)
    words, found = np.empty(UNIT, np.uint32), np.zeros((rows, UNIT), np.float32)
    turned = found.view(np.uint32)
    for start in range(uint64(0), uint64(out.size), uint64(UNIT)):
        many = min(uint64(UNIT), uint64(out.size) - start)
        for r in range(uint64(rows)):
            _draw(uint64(first) + start, low, high, uint32(stream + r), words)
            for i in range(many):
                word = words[i]
                turned[r, i] = bits[r, uint64(word) * columns >> uint64(32)] ^ word << uint32(31)
        for last in range(rows - 1, 0, -1):  # the rows are sorted by exchanging neighbours, which vectorises
            for r in range(uint64(last)):
                below, above = found[r], found[r + uint64(1)]
                for i in range(uint64(UNIT)):
                    a, b = below[i], above[i]
                    below[i], above[i] = (a, b) if a < b else (b, a)
        for i in range(many):
            out[start + i] = found[rows >> 1, i] + np.float32(0)
