"""Coordinates drawn without replacement from a seed, the same on every machine.

A seed determines a sequence of coordinates, each 64 random bits modulo n (kernels/philox.py), with a bias below n·2⁻⁶⁴. The first k
distinct coordinates of the sequence are a uniform sample. If k > n/2, the complement of the sample is drawn instead.
"""

import numpy as np

from . import philox


def positions(numel: int, count: int, seed: int, stream: int) -> np.ndarray:
    """Return `count` of numel positions, int64, ascending; 0 ≤ count ≤ numel."""
    drawn, start = min(count, numel - count), 0
    marked = np.zeros(numel, np.bool_)
    while missing := drawn - int(np.count_nonzero(marked)):
        marked[_sequence(numel, start, missing, seed, stream)] = True
        start += missing
    return np.flatnonzero(marked if drawn == count else ~marked)


def _sequence(numel: int, start: int, count: int, seed: int, stream: int) -> np.ndarray:
    """Return the coordinates start..start+count-1 of the sequence, int64 [count]."""
    words = philox.words(seed, 2 * count, 2 * start, stream).astype(np.uint64)
    return ((words[::2] | words[1::2] << np.uint64(32)) % np.uint64(numel)).astype(np.int64)
