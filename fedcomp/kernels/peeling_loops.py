"""Loops of kernels/peeling.py, compiled by numba."""

import numpy as np
from numpy import uint64

from .loops import compiled


@compiled
def peel(cells, negative, table, values, found):
    """Fill `values` and `found` [k] with what cells [k, rows] that hold one key tell, and take it out of the table.

    In rounds: what is told in one is told by the table at its beginning.
    """
    keys, rows = uint64(cells.shape[0]), uint64(cells.shape[1])
    count, mixed = np.zeros(table.size, np.int32), np.zeros(table.size, np.int32)
    for i in range(keys):
        for r in range(rows):
            j = uint64(cells[i, r])
            count[j] += 1
            mixed[j] ^= i
    # Queues: cells that once held one key, keys as they were told.
    alone, told = np.empty(table.size, np.int32), np.empty(keys, np.int32)
    end = 0
    for j in range(table.size):
        if count[j] == 1:
            alone[end] = j
            end += 1
    begin = first = last = 0
    while begin < end:
        for place in range(begin, end):
            if count[uint64(alone[place])] == 1:
                i = uint64(mixed[uint64(alone[place])])
                if not found[i]:
                    r = uint64(0)
                    while count[uint64(cells[i, r])] != 1:
                        r += uint64(1)
                    value = table[uint64(cells[i, r])]
                    values[i] = -value if negative[i, r] else value
                    found[i] = True
                    told[last] = i
                    last += 1
        begin = end
        for place in range(first, last):
            i = uint64(told[place])
            for r in range(rows):
                j = uint64(cells[i, r])
                table[j] -= -values[i] if negative[i, r] else values[i]
                count[j] -= 1
                mixed[j] ^= i
                if count[j] == 1:
                    alone[end] = j
                    end += 1
        first = last
