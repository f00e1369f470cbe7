"""Loops over Rice codes and sparse values, compiled by numba. kernels/rice.py and sparse.py say what they do."""

import numba
from llvmlite import ir
from numba.extending import intrinsic
from numpy import float32, int64, uint64

from .loops import compiled

TOP = uint64(1 << 63)


@intrinsic
def leading_zeros(_, word):
    """Return the number of zero bits before the first one of a word that is not zero."""
    return word(word), lambda context, builder, signature, args: builder.ctlz(
        args[0], ir.Constant(ir.IntType(1), 1)
    )


@numba.njit(nogil=True, inline="always")
def _word(raw, at):
    """Eight bytes, the first the most significant, from the one with the bit `at` on."""
    word = uint64(0)
    for i in range(8):  # one load, and one instruction that swaps the bytes
        word = word << uint64(8) | uint64(raw[uint64(at >> 3) + uint64(i)])
    return word


@numba.njit(nogil=True, inline="always")
def _bits(raw, at, width):
    """The number in `width` bits from `at` on: at most 40."""
    return int64((_word(raw, at) << uint64(at & 7)) >> uint64(1) >> uint64(63 - width))


@numba.njit(nogil=True)
def _unary(raw, start, end, high):
    """Fill `high` with the zeros before each one from the bit `start` on. Return the bit after the last one, past `end` if ones lack."""
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
    """Fill the positions of all rows, one row after the other, and whether each row is valid. Nothing outside of `raw` is read.

    Positions of a valid row rise and are below numel.
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
            most = (numel >> b) + 1  # more zeros are too many, and might overflow
            for _ in range(lengths[j]):
                last = min(last + (min(row[i], most) << b) + _bits(raw, at, b) + 1, numel)
                row[i] = last
                i += uint64(1)
                at += b
        good[r] = last < numel and _bits(raw, at, spare) == 0


@compiled
def add_at(into, positions, values, weight):
    """into[positions] += weight * values, in float32."""
    weight = float32(weight)
    for i in range(uint64(positions.size)):
        into[uint64(positions[i])] += weight * values[i]


@compiled
def add_signs_at(into, positions, raw, magnitude, weight):
    """`add_at` of ±magnitude, whose signs are bits, the most significant first."""
    step = float32(weight) * float32(magnitude)
    for i in range(uint64(positions.size)):
        positive = raw[i >> uint64(3)] << (i & uint64(7)) & uint64(128)
        into[uint64(positions[i])] += step if positive else -step
