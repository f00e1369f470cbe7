"""Loops of kernels/rice.py and kernels/sparse.py, compiled by numba."""

import numba
from llvmlite import ir
from numba.extending import intrinsic
from numpy import float32, int64, uint64

from .loops import compiled

TOP = uint64(1 << 63)


@intrinsic
def leading_zeros(_, word):
    """Return the number of leading zero bits of a nonzero word."""
    one = ir.Constant(ir.IntType(1), 1)
    return word(word), lambda context, builder, signature, args: builder.ctlz(args[0], one)


@numba.njit(nogil=True, inline="always")
def _word(raw, at):
    """Return eight bytes, from the byte that contains bit `at` on, as a big-endian number."""
    word = uint64(0)
    for i in range(8):  # compiled to one load and one byte swap
        word = word << uint64(8) | uint64(raw[uint64(at >> 3) + uint64(i)])
    return word


@numba.njit(nogil=True, inline="always")
def _bits(raw, at, width):
    """Return the number that is stored in `width` ≤ 40 bits from bit `at` on."""
    return int64((_word(raw, at) << uint64(at & 7)) >> uint64(1) >> uint64(63 - width))


@numba.njit(nogil=True)
def _unary(raw, start, end, high):
    """Fill `high` with the number of 0 bits before each 1 bit, from bit `start` on.

    Return the index of the bit after the last 1, or end + 1 if there are too few 1 bits.
    """
    i, before, at = uint64(0), start, start & ~7
    skip = uint64(start & 7)
    while at < end:
        word = _word(raw, at) << skip >> skip
        while word:
            zeros = leading_zeros(word)
            one = at + int64(zeros)
            high[i] = one - before
            before = one + 1
            i += uint64(1)
            if i == uint64(high.size):
                return before
            word ^= TOP >> zeros
        at += 64
        skip = uint64(0)
    return end + 1


@compiled
def unpack(raw, starts, ends, counts, parameters, lengths, numel, positions, good):
    """Decode rows: fill `positions` row after row, and `good` with whether each row is valid. Reads only within `raw`.

    The positions of a valid row are strictly increasing and below numel.
    """
    first, block = 0, 0
    for r in range(starts.size):
        row = positions[first : first + counts[r]]
        at, blocks, filled = _unary(raw, starts[r], ends[r], row), block, 0
        spare = ends[r] - at
        while filled < row.size:
            spare -= parameters[block] * lengths[block]
            filled += lengths[block]
            block += 1
        first += row.size
        good[r] = 0 <= spare < 8
        if not good[r]:
            continue
        last, i = int64(-1), uint64(0)
        for j in range(blocks, block):
            b = parameters[j]
            most = (numel >> b) + 1  # larger numbers of zeros are invalid and could overflow
            for _ in range(lengths[j]):
                last = min(last + (min(row[i], most) << b) + _bits(raw, at, b) + 1, numel)
                row[i] = last
                i += uint64(1)
                at += b
        good[r] = last < numel and _bits(raw, at, spare) == 0


@compiled
def add_at(into, positions, values, weight):
    """Add weight * values to into[positions], in float32."""
    weight = float32(weight)
    for i in range(uint64(positions.size)):
        into[uint64(positions[i])] += weight * values[i]
