"""Coordinates drawn without replacement: the same from a seed everywhere.

A seed gives a sequence of coordinates, each 64 random bits modulo n (kernels/philox.py); what that favours is below n·2⁻⁶⁴. The first k
different ones are a uniform choice of k. Where more than half are to be drawn, those that are left out are drawn instead.
"""

import numpy as np

from . import philox


def positions(numel: int, count: int, seed: int, stream: int) -> np.ndarray:
    """`count` of numel positions, int64, ascending: 0 ≤ count ≤ numel."""
    drawn, start = min(count, numel - count), 0
    marked = np.zeros(numel, np.bool_)
    while missing := drawn - int(np.count_nonzero(marked)):
        marked[_sequence(numel, start, missing, seed, stream)] = True
        start += missing
    return np.flatnonzero(marked if drawn == count else ~marked)


def _sequence(numel: int, start: int, count: int, seed: int, stream: int) -> np.ndarray:
    """Coordinates start..start+count-1 of the sequence, int64 [count]."""
    words = philox.words(seed, 2 * count, 2 * start, stream).astype(np.uint64)
    return ((words[::2] | words[1::2] << np.uint64(32)) % np.uint64(numel)).astype(np.int64)
