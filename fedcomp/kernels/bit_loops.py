"""Loops of kernels/bits.py, compiled by numba. Element i stands in word i/32, at place (i mod 32) ^ 7 from the lowest bit."""

import numba
import numpy as np
from numpy import int32, uint32, uint64

from .loops import compiled, philox

SWAP = uint32(7)
BLOCK = 128  # elements whose coins are one block of random words


@numba.njit(nogil=True, inline="always")
def _word(bits, start):
    """Which of 32 floats are positive and which are zero."""
    positive, zero = uint32(0), uint32(0)
    for i in range(uint32(32)):
        here = bits[start + uint64(i)]
        positive |= uint32(here > int32(0)) << (i ^ SWAP)
        zero |= uint32((here & int32(0x7FFFFFFF)) == int32(0)) << (i ^ SWAP)
    return positive, zero


@numba.njit(nogil=True, inline="always")
def _block(bits, start, toss, low, high, stream, counter, out, at):
    p0, z0 = _word(bits, start)
    p1, z1 = _word(bits, start + uint64(32))
    p2, z2 = _word(bits, start + uint64(64))
    p3, z3 = _word(bits, start + uint64(96))
    if toss and (z0 | z1 | z2 | z3):
        c0, c1, c2, c3 = philox(
            low, high, uint32(counter), uint32(counter >> uint64(32)), stream, uint32(0)
        )
        z0, z1, z2, z3 = z0 & c0, z1 & c1, z2 & c2, z3 & c3
    out[at], out[at + uint64(1)], out[at + uint64(2)], out[at + uint64(3)] = (
        p0 | z0,
        p1 | z1,
        p2 | z2,
        p3 | z3,
    )


@compiled
def signs(x, toss, low, high, stream, first, out):
    """Write to `out`, four words for each BLOCK elements, which of x [n], float32, are positive.

    Zeros are, too, or, if `toss`, where a bit of the seed's words is 1; `first` is the number of the first block in these.
    """
    low, high, stream = uint32(low), uint32(high), uint32(stream)
    bits, whole = x.view(np.int32), uint64(x.size) // uint64(BLOCK)
    for block in range(whole):
        _block(
            bits,
            block * uint64(BLOCK),
            toss,
            low,
            high,
            stream,
            uint64(first) + block,
            out,
            uint64(4) * block,
        )
    rest = uint64(x.size) - whole * uint64(BLOCK)
    if rest:
        last = np.full(BLOCK, -1, np.int32)  # negative, so that the padding is zero
        for i in range(rest):
            last[i] = bits[whole * uint64(BLOCK) + i]
        _block(
            last, uint64(0), toss, low, high, stream, uint64(first) + whole, out, uint64(4) * whole
        )


@compiled
def spread(words, first, high, low, add, out):
    """out[i], plus what it was if `add`, is the value of bit first + i: high or low at (first + i) mod high.size."""
    at, end = uint64(first), uint64(first) + uint64(out.size)
    i = uint64(0)
    while at < end:
        column = at % uint64(high.size)
        aligned = (
            at & uint64(31) == 0 and at + uint64(32) <= end and column + uint64(32) <= high.size
        )
        word, count = words[at >> uint64(5)], uint64(1)
        if aligned:
            count = uint64(32)
            for k in range(uint32(32)):
                value = high[column + k] if (word >> (k ^ SWAP)) & uint32(1) else low[column + k]
                out[i + k] = out[i + k] + value if add else value
        else:
            value = (
                high[column]
                if (word >> (uint32(at & uint64(31)) ^ SWAP)) & uint32(1)
                else low[column]
            )
            out[i] = out[i] + value if add else value
        at, i = at + count, i + count
