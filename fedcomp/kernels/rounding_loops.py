"""Loops of kernels/rounding.py, compiled by numba.

x is a part of a vector. `start`: index of x[0] in the vector, a multiple of 4. `low`, `high`: 32-bit halves of the seed.
"""

import numpy as np
from numpy import float32, float64, int32, int64, uint8, uint32, uint64

from .loops import compiled, draw
from .rounding import MAGNITUDE, ONE

N_WORDS = 1024  # number of random words that are drawn at a time
MANTISSA_BITS = 23  # number of bits of a float32 below its exponent


@compiled
def multiples(x, arguments, low, high, start, out):
    """Write the result of `to_multiples` for x [n] to `out`."""
    scale, limit = arguments
    words = np.empty(N_WORDS, np.uint32)
    for first in range(0, x.size, N_WORDS):
        draw(low, high, 0, start + first, words)
        for i in range(uint64(min(N_WORDS, x.size - first))):
            value = x[uint64(first) + i]
            level = (int64(min(abs(float64(value)), limit) * scale + 0.5) + int64(words[i])) >> 32
            out[uint64(first) + i] = -level if value < 0 else level


@compiled
def powers(x, arguments, low, high, start, out):
    """Write the result of `to_powers` for x [n] to `out`."""
    (factor,) = arguments
    words = np.empty(N_WORDS, np.uint32)
    for first in range(0, x.size, N_WORDS):
        draw(low, high, 0, start + first, words)
        for i in range(uint64(min(N_WORDS, x.size - first))):
            bits = float32(abs(x[uint64(first) + i] * factor)).view(uint32)
            # A carry out of the mantissa increases the exponent, which is the code.
            bits += words[i] >> uint32(32 - MANTISSA_BITS)
            out[uint64(first) + i] = bits >> uint32(MANTISSA_BITS)


@compiled
def levels(x, arguments, low, high, start, out):
    """Write the result of `to_levels` for x [n] to `out`."""
    edges, levels, slopes = arguments
    words, cells = np.empty(N_WORDS, np.uint32), np.empty(N_WORDS, np.uint8)
    for first in range(0, x.size, N_WORDS):
        draw(low, high, 0, start + first, words)
        count = uint64(min(N_WORDS, x.size - first))
        cells[:] = 0
        for edge in edges:  # numba would not vectorize a binary search
            for i in range(count):
                cells[i] += uint8(x[uint64(first) + i] >= edge)
        for i in range(count):
            cell = uint64(cells[i])
            above = (float64(x[uint64(first) + i]) - levels[cell]) * slopes[cell]
            probability = int64(min(max(above, 0.0), ONE) + 0.5)
            out[uint64(first) + i] = cell + uint64((probability + int64(words[i])) >> 32)


@compiled
def add_to_histogram(x, factor, first_bin, bin_bits, table):
    """Add x·factor to a histogram: the number of values in each bin to table[0], and the sum of the lowest `bin_bits` bits of their keys
    (`rounding._keys`) to table[1].

    `first_bin`: the value of key >> bin_bits for bin 0.
    """
    low_bits = (int64(1) << bin_bits) - 1
    for i in range(uint64(x.size)):
        bits = int64(float32(x[i] * factor).view(int32))
        key = -(bits & MAGNITUDE) if bits < 0 else bits
        at = uint64((key >> bin_bits) - first_bin)
        table[0, at] += 1
        table[1, at] += key & low_bits
