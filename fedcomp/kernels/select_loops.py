"""Loops of kernels/select.py, compiled by numba.

The key of a float32 is the integer `(bits ^ flip) & mask`. The loops first compute the largest key of each block of elements with vector
instructions, and skip a block if its largest key is too small to be selected.
"""

import numba
import numpy as np
from numpy import int32, uint64

from .loops import compiled

BLOCK = 64  # number of elements in a block
# Number of bits of the k-th largest key that each pass over the keys determines.
DIGITS = 11, 10, 10


@numba.njit(nogil=True, inline="always")
def _largest(bits, start, stop, flip, mask):
    largest = int32(0)
    for i in range(uint64(start), uint64(stop)):
        largest = max(largest, (bits[i] ^ flip) & mask)
    return largest


@compiled
def kth_largest(bits, flip, mask, k):
    """Return the k-th largest key of int32 bits [n], and the number of larger keys.

    If fewer than k keys are positive, return 0 and the number of positive keys.
    """
    flip, mask, base, above, shift = int32(flip), int32(mask), int32(0), 0, 31
    for width in DIGITS:
        shift -= width
        counts, least = np.zeros(1 << width, np.int64), max(base, int32(1))
        for start in range(0, bits.size, BLOCK):
            stop = min(start + BLOCK, bits.size)
            if _largest(bits, start, stop, flip, mask) < least:
                continue
            for i in range(uint64(start), uint64(stop)):
                key = (bits[i] ^ flip) & mask
                if key >= least:
                    j = (key - base) >> shift
                    if j < counts.size:
                        counts[uint64(j)] += 1
        j = counts.size - 1
        while j > 0 and above + counts[j] < k:
            above += counts[j]
            j -= 1
        if above + counts[j] < k:
            return int32(0), above + counts[j]
        base += int32(j << shift)
    return base, above


@compiled
def collect(bits, flip, mask, threshold, ties, first, out):
    """Write the positions (plus `first`) of the keys above the threshold, and of the first `ties` keys equal to it, to `out`.

    Return the number of positions. A number above the size of `out` means that they do not fit.
    """
    flip, mask, threshold = int32(flip), int32(mask), int32(threshold)
    filled = 0
    for start in range(0, bits.size, BLOCK):
        stop = min(start + BLOCK, bits.size)
        if _largest(bits, start, stop, flip, mask) < threshold:
            continue
        for i in range(uint64(start), uint64(stop)):
            key = (bits[i] ^ flip) & mask
            if key > threshold or (key == threshold and ties > 0):
                if filled == out.size:
                    return filled + 1
                out[uint64(filled)] = first + i
                filled += 1
                ties -= key == threshold
    return filled


@compiled
def sum_is_finite(onto, x):
    """Return whether all elements of onto + x [n], or of x if onto is None, are finite. Both are float32."""
    largest = int32(0)
    for i in range(uint64(x.size)):
        total = x[i] if onto is None else onto[i] + x[i]
        largest = max(largest, np.float32(total).view(int32) & int32(0x7FFFFFFF))
    return largest < int32(0x7F800000)
