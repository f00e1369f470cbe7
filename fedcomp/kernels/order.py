"""Order statistics of the columns of a stack."""

import numpy as np

from .parallel import map_ranges

LARGEST = float(np.finfo(np.float32).max)
TILE = 4096  # columns that are sorted at a time, so that they fit in the cache


def mean_of_ranks(stack: np.ndarray, first: int, last: int) -> np.ndarray:
    """Return the mean of the ranks first..last-1 of every column of a finite float32 stack [m, n]: float32 [n]. Rank 0 is the smallest.

    The sum is computed in float64 from the smallest to the largest value, so it does not depend on the order of the rows. The stack is not
    modified.
    """
    m, n = stack.shape
    if not 0 <= first < last <= m:
        raise IndexError(f"ranks {first}..{last - 1} are not among those of {m} rows")
    out = np.empty(n, np.float32)

    def work(start: int, stop: int) -> None:
        for left in range(start, stop, TILE):
            right = min(left + TILE, stop)
            columns = stack[:, left:right].T.copy()
            columns.sort(axis=1)
            total = np.zeros(right - left)
            for rank in range(first, last):
                total += columns[:, rank]
            out[left:right] = (total / (last - first)).clip(-LARGEST, LARGEST)

    map_ranges(n, work)
    return out
