"""Coordinates drawn without replacement: the same from a seed everywhere; where they are few, in a time that does not grow with the vector.

A seed gives a sequence of coordinates, each 64 random bits modulo n (kernels/philox.py); what that favours is below n·2⁻⁶⁴. The first k
different ones are a uniform choice of k. Where more than half are to be drawn, those that are left out are drawn instead.
"""

import numpy as np

from . import philox

DENSE = 1 / 16  # share of the vector from which drawn coordinates are marked, not sorted


def positions(numel: int, count: int, seed: int, stream: int) -> np.ndarray:
    """`count` of numel positions, int64, ascending: 0 ≤ count ≤ numel."""
    drawn = min(count, numel - count)
    if drawn <= DENSE * numel:
        found = _sorted(numel, drawn, seed, stream)
        if drawn == count:
            return found
        marked = np.zeros(numel, np.bool_)
        marked[found] = True
    else:
        marked = _marked(numel, drawn, seed, stream)
    return np.flatnonzero(marked if drawn == count else ~marked)


def _sorted(numel: int, count: int, seed: int, stream: int) -> np.ndarray:
    """The first `count` different coordinates of the sequence, ascending. So many are drawn as are missing, and never one too many."""
    found, start = np.empty(0, np.int64), 0
    while missing := count - found.size:
        found = np.concatenate([found, _sequence(numel, start, missing, seed, stream)])
        found.sort()
        found, start = found[np.diff(found, prepend=-1) > 0], start + missing
    return found


def _marked(numel: int, count: int, seed: int, stream: int) -> np.ndarray:
    """The same coordinates, as a bool array [numel]."""
    marked, start = np.zeros(numel, np.bool_), 0
    while missing := count - int(np.count_nonzero(marked)):
        marked[_sequence(numel, start, missing, seed, stream)] = True
        start += missing
    return marked


def _sequence(numel: int, start: int, count: int, seed: int, stream: int) -> np.ndarray:
    """Coordinates start..start+count-1 of the sequence, int64 [count]."""
    words = philox.words(seed, 2 * count, 2 * start, stream).astype(np.uint64)
    return ((words[::2] | words[1::2] << np.uint64(32)) % np.uint64(numel)).astype(np.int64)
