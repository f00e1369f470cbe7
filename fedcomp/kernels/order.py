"""Order statistics down the columns of a stack: every column is sorted, by one network of comparators for all of them.

Knuth: The art of computer programming 3, 5.2.2, algorithm M (Batcher's merge exchange); what the wanted ranks do not need is left out.

A comparator works on two whole rows: one operation compares thousands of columns.
"""

from functools import lru_cache

import numpy as np

from .parallel import map_ranges

LARGEST = float(np.finfo(np.float32).max)
TILE = 4096  # columns that are sorted together, near the processor


def mean_of_ranks(stack: np.ndarray, first: int, last: int) -> np.ndarray:
    """Return the mean of the ranks first..last-1, 0 the smallest, of every column of a finite float32 stack [m, n]: float32 [n].

    Summed in float64 from the smallest to the largest, so that it does not depend on the order of the rows. The stack is not touched.
    """
    m, n = stack.shape
    if not 0 <= first < last <= m:
        raise IndexError(f"ranks {first}..{last - 1} are not among those of {m} rows")
    out, pairs = np.empty(n, np.float32), network(m, first, last)

    def work(start: int, stop: int) -> None:
        for left in range(start, stop, TILE):
            columns = slice(left, min(left + TILE, stop))
            rows = list(stack[:, columns].copy())
            spare = np.empty_like(rows[0])
            for i, j in pairs:
                np.minimum(rows[i], rows[j], out=spare)
                np.maximum(rows[i], rows[j], out=rows[j])
                rows[i], spare = spare, rows[i]
            total = np.zeros(spare.size)
            for row in rows[first:last]:
                total += row
            out[columns] = np.divide(total, last - first, out=total).clip(-LARGEST, LARGEST)

    map_ranges(n, work)
    return out


@lru_cache(64)
def network(m: int, first: int, last: int) -> list[tuple[int, int]]:
    """Return comparators (i, j), i < j, that bring the ranks first..last-1 of m numbers to their places, the smaller to i."""
    needed, kept = set(range(first, last)), []
    for i, j in reversed(_merge_exchange(m)):
        if i in needed or j in needed:
            needed |= {i, j}
            kept.append((i, j))
    return kept[::-1]


def _merge_exchange(m: int) -> list[tuple[int, int]]:
    """Return comparators that sort m numbers."""
    top = 1 << max((m - 1).bit_length() - 1, 0)
    pairs, p = [], top
    while p > 0:
        q, r, d = top, 0, p
        while d > 0:
            pairs += [(i, i + d) for i in range(m - d) if i & p == r]
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return pairs
