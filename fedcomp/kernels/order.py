"""Order statistics down the columns of a stack: every column is sorted, by one network of comparators for all of them.

Knuth: The art of computer programming 3, 5.2.2, algorithm M (Batcher's merge exchange); what the wanted ranks do not need is left out.

A comparator works on two rows, so that as many columns are compared at once as fit into a register.
"""

from functools import lru_cache

import numpy as np

from . import backend
from .parallel import map_ranges

LARGEST = float(np.finfo(np.float32).max)


def mean_of_ranks(stack: np.ndarray, first: int, last: int) -> np.ndarray:
    """The mean of the ranks first..last-1, 0 the smallest, of every column of a finite float32 stack [m, n]: float32 [n].

    Summed in float64 from the smallest to the largest, so that it does not depend on the order of the rows. The stack is not touched.
    """
    m, n = stack.shape
    if not 0 <= first < last <= m:
        raise IndexError(f"ranks {first}..{last - 1} are not among those of {m} rows")
    out = np.empty(n, np.float32)
    if (
        stack.dtype == np.float32
        and stack.flags.c_contiguous
        and backend.compile_vector(stack.size)
    ):
        from . import order_loops

        pairs = network(m, first, last)
        map_ranges(
            n,
            lambda start, stop: order_loops.mean_of_ranks(
                stack, pairs, first, last, start, stop, out
            ),
        )
        return out
    total = np.zeros(n)
    for row in np.sort(stack, axis=0)[first:last]:
        total += row
    np.divide(total, last - first, out=total).clip(-LARGEST, LARGEST, out=total)
    out[:] = total
    return out


@lru_cache(64)
def network(m: int, first: int, last: int) -> np.ndarray:
    """Comparators (i, j), i < j, int64 [c, 2], that bring the ranks first..last-1 of m numbers to their places, the smaller to i."""
    needed, kept = set(range(first, last)), []
    for i, j in reversed(_merge_exchange(m)):
        if i in needed or j in needed:
            needed |= {i, j}
            kept.append((i, j))
    return np.array(kept[::-1], np.int64).reshape(-1, 2)


def _merge_exchange(m: int) -> list[tuple[int, int]]:
    """Comparators that sort m numbers."""
    top = 1 << max((m - 1).bit_length() - 1, 0)
    pairs, p = [], top
    while p > 0:
        q, r, d = top, 0, p
        while d > 0:
            pairs += [(i, i + d) for i in range(m - d) if i & p == r]
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return pairs
