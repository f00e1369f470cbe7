"""Ordered samples without replacement, of many generators at once: what numpy's Generator.choice(n, k, replace=False) draws, word by word.

Bentley, Floyd: A sample of brilliance. CACM 1987, which makes a set of k of n; then Fisher and Yates's shuffle. A number below r is
⌊w·r/2³²⌋ of a word w, and where that would favour some, of the first word that does not: Lemire: Fast random integer generation in an
interval. ACM TOMACS 2019.
"""

import numpy as np

MOST = 10_000  # of how many may be drawn in this way whatever k is; beyond, numpy draws large samples in another
FEW = 50  # of more than MOST, one of so many
LOW, SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def serves(n: np.ndarray, k: int) -> np.ndarray:
    """Whether `draw` can draw k ≥ 1 of each n ≥ k: bool [m]."""
    return (n <= LOW.astype(np.int64)) & ((n <= MOST) | (k <= n // FEW))


def draw(words: np.ndarray, n: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples of k of 0..n-1, for n int64 [m] that `serves`, from words uint32 [m, 2k-1]: int64 [m, k], and whether each is numpy's.

    It is not where a word would have favoured some: numpy goes on with the next one.
    """
    least, rows = n - k, np.arange(n.size)
    ranges = np.empty((n.size, 2 * k - 1), np.uint64)
    ranges[:, :k] = least[:, None] + np.arange(1, k + 1)
    ranges[:, k:] = np.arange(k, 1, -1)
    spared = np.flatnonzero(least == 0)  # a number below one takes no word
    words[spared, 1:] = words[spared, :-1]
    products = words * ranges
    fair = ((products & LOW) >= (LOW + np.uint64(1) - ranges) % ranges).all(axis=1)
    drawn = (products >> SHIFT).astype(np.int64).T
    chosen = np.empty((k, n.size), np.int64)
    for i in range(k):
        chosen[i] = np.where((chosen[:i] == drawn[i]).any(axis=0), least + i, drawn[i])
    for i, place in zip(range(k - 1, 0, -1), drawn[k:], strict=True):
        moved = chosen[place, rows]
        chosen[place, rows] = chosen[i]
        chosen[i] = moved
    return chosen.T, fair
