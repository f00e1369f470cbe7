"""Loops of kernels/order.py, compiled by numba (kernels/loops.py)."""

import numpy as np
from numpy import uint64

from .loops import compiled

TILE = 128  # columns that are sorted together, near the processor
LARGEST = float(np.finfo(np.float32).max)


@compiled
def _exchange(low, high):
    """The smaller of each pair to `low`, the larger to `high`."""
    for t in range(uint64(low.size)):
        a, b = low[t], high[t]
        low[t], high[t] = min(a, b), max(a, b)


@compiled
def mean_of_ranks(stack, pairs, first, last, start, stop, out):
    """Fill out[start:stop]: kernels/order.py."""
    m = stack.shape[0]
    tile, total = np.empty((m, TILE), np.float32), np.empty(TILE, np.float64)
    for left in range(start, stop, TILE):
        width = min(TILE, stop - left)
        for i in range(m):
            source, target = stack[i, left : left + width], tile[i]
            for t in range(uint64(width)):
                target[t] = source[t]
        for c in range(len(pairs)):
            _exchange(tile[pairs[c, 0]], tile[pairs[c, 1]])
        for t in range(uint64(TILE)):
            total[t] = 0.0
        for i in range(first, last):
            row = tile[i]
            for t in range(uint64(TILE)):
                total[t] += np.float64(row[t])
        for t in range(width):
            out[left + t] = np.float32(min(max(total[t] / (last - first), -LARGEST), LARGEST))
