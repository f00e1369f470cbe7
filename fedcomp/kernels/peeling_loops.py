"""Loops of kernels/peeling.py, compiled by numba."""

import numpy as np
from numpy import uint64

from .loops import compiled


@compiled
def peel(cells, negative, table, values, is_peeled):
    """Peel keys, given their cells [k, rows]. Fill `values` [k] and `is_peeled` [k], and subtract the peeled values from the table.

    Each round peels every key that is the only key in one of its cells at the start of the round.
    """
    keys, rows = uint64(cells.shape[0]), uint64(cells.shape[1])
    count, mixed = np.zeros(table.size, np.int32), np.zeros(table.size, np.int32)
    for i in range(keys):
        for r in range(rows):
            j = uint64(cells[i, r])
            count[j] += 1
            mixed[j] ^= i
    # `mixed`: XOR of the keys in each cell, the key itself if there is only one. `single`: cells whose number of keys has become one.
    # `peeled`: keys in the order of peeling.
    single, peeled = np.empty(table.size, np.int32), np.empty(keys, np.int32)
    end = 0
    for j in range(table.size):
        if count[j] == 1:
            single[end] = j
            end += 1
    begin = first = last = 0
    while begin < end:
        for n in range(begin, end):
            if count[uint64(single[n])] == 1:
                i = uint64(mixed[uint64(single[n])])
                if not is_peeled[i]:
                    r = uint64(0)
                    while count[uint64(cells[i, r])] != 1:
                        r += uint64(1)
                    value = table[uint64(cells[i, r])]
                    values[i] = -value if negative[i, r] else value
                    is_peeled[i] = True
                    peeled[last] = i
                    last += 1
        begin = end
        for n in range(first, last):
            i = uint64(peeled[n])
            for r in range(rows):
                j = uint64(cells[i, r])
                table[j] -= -values[i] if negative[i, r] else values[i]
                count[j] -= 1
                mixed[j] ^= i
                if count[j] == 1:
                    single[end] = j
                    end += 1
        first = last
