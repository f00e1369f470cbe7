"""Loops of kernels/sums.py, compiled by numba.

Float64 adds what lies within 53 bits without an error, in any order. So a block whose magnitudes are near enough to each other
is summed by vector instructions, and its sum goes to the table of its smallest exponent, in the unit of that; the compiler may reorder
these sums, since every partial one is exact. Other blocks are added one by one.
"""

from collections.abc import Callable

import numba
import numpy as np
from numpy import int64, uint32, uint64

from .loops import compiled
from .sums import FRACTION, FRACTION_BITS, LOW, LOW_BITS

MAGNITUDE = uint32(0x7FFFFFFF)
LINE = 64  # magnitudes in a block: 24 bits each, up to 23 exponents apart, 6 bits for the sum
UPPER = uint32(0xFFFFF000)  # sign, exponent and the upper twelve bits of the significand
TILE = 512  # columns whose sums stay near the processor
SQUARES = (
    32  # squares in a block: 24 bits each part, up to 2·12 exponents apart, 5 bits for the sum
)

SCALES = np.ldexp(1.0, 150 - np.arange(256).clip(1))  # from a magnitude to units of its exponent


def reordered(function: Callable) -> Callable:
    """`compiled`, with leave to reorder sums."""
    return compiled(function, fastmath={"reassoc"})


@numba.njit(nogil=True, inline="always")
def _range(bits, start, stop):
    """The largest and the smallest exponent of a block's nonzeros; the smallest is above the largest where there is none."""
    largest, smallest = uint32(0), uint32(0xFFFFFFFF)
    for i in range(uint64(start), uint64(stop)):
        magnitude = bits[i] & MAGNITUDE
        largest, smallest = (
            max(largest, magnitude),
            min(smallest, magnitude - uint32(1)),
        )  # what 0 turns to is larger than all
    return largest >> uint32(23), uint32((uint64(smallest) + uint64(1)) >> uint64(23))


@numba.njit(nogil=True, inline="always")
def _put(low, high, exponent, total):
    """Add to a sum that is held as low + high·2²⁴."""
    low[exponent] += int64(total) & int64(LOW)
    high[exponent] += int64(total) >> int64(LOW_BITS)


@numba.njit(nogil=True, inline="always")
def _significand(bits):
    magnitude = bits & MAGNITUDE
    return int64(magnitude & uint32(FRACTION)) | int64(magnitude > uint32(FRACTION)) << int64(
        FRACTION_BITS
    )


@reordered
def magnitudes(x, table):
    """Add |x| [n], float32, to a table [2, 256]: kernels/sums.py."""
    bits = x.view(np.uint32)
    for start in range(0, x.size, LINE):
        stop = min(start + LINE, x.size)
        largest, smallest = _range(bits, start, stop)
        if largest > smallest + uint32(23):
            for i in range(uint64(start), uint64(stop)):
                table[0, (bits[i] & MAGNITUDE) >> uint32(23)] += _significand(bits[i])
        elif largest >= smallest:
            total = 0.0
            for i in range(uint64(start), uint64(stop)):
                total += abs(np.float64(x[i]))
            _put(table[0], table[1], smallest, total * SCALES[smallest])


@reordered
def squares(x, table):
    """Add x² [n], float32, to a table [6, 256]: kernels/sums.py. The square of h + l, twelve bits each, is h² + 2hl + l²."""
    bits = x.view(np.uint32)
    for start in range(0, x.size, SQUARES):
        stop = min(start + SQUARES, x.size)
        largest, smallest = _range(bits, start, stop)
        if largest > smallest + uint32(12):
            for i in range(uint64(start), uint64(stop)):
                significand = _significand(bits[i])
                _put(
                    table[0],
                    table[1],
                    (bits[i] & MAGNITUDE) >> uint32(23),
                    significand * significand,
                )
        elif largest >= smallest:
            hh, hl, ll = 0.0, 0.0, 0.0
            for i in range(uint64(start), uint64(stop)):
                high = np.float64(uint32(bits[i] & UPPER).view(np.float32))
                low = np.float64(x[i]) - high
                hh, hl, ll = hh + high * high, hl + high * low, ll + low * low
            scale = SCALES[smallest]
            _put(table[0], table[1], smallest, ll * scale * scale)
            _put(table[2], table[3], smallest, hl * scale * scale / 2.0**12)
            _put(table[4], table[5], smallest, hh * scale * scale / 2.0**24)


@compiled
def sides(grid, high, totals, negative):
    """Fill totals [stretches, 2, columns] and negative [stretches, columns], zeros, from grid [rows, columns]: kernels/sums.py."""
    rows, columns = grid.shape
    for start in range(0, rows, high):
        stretch, stop = start // high, min(start + high, rows)
        for left in range(0, columns, TILE):
            right = min(left + TILE, columns)
            up, down, below = (
                totals[stretch, 0, left:right],
                totals[stretch, 1, left:right],
                negative[stretch, left:right],
            )
            for row in range(start, stop):
                values = grid[row, left:right]
                for i in range(uint64(right - left)):
                    value = np.float64(values[i])
                    up[i] += max(value, 0.0)
                    down[i] += min(value, 0.0)
                    below[i] += value < 0
