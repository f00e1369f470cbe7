"""Loops of kernels/rice.py, kernels/positions.py and kernels/sparse.py, compiled by numba."""

import numba
import numpy as np
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
    """Return eight bytes, starting with the byte that contains bit `at`, as a big-endian number."""
    word = uint64(0)
    for i in range(8):  # compiled to one load and one byte swap
        word = word << uint64(8) | uint64(raw[uint64(at >> 3) + uint64(i)])
    return word


@numba.njit(nogil=True, inline="always")
def _bits(raw, at, width):
    """Return the number that starts at bit `at` and has `width` ≤ 40 bits."""
    return int64((_word(raw, at) << uint64(at & 7)) >> uint64(1) >> uint64(63 - width))


@numba.njit(nogil=True)
def _unary(raw, start, end, high):
    """Read `high.size` 1 bits from `start` on, and write the number of 0 bits before each of them to `high`.

    Return the index of the bit after the last one read, or end + 1 if there are fewer 1 bits before `end`.
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
    """Decode the Rice codes of all rows to `positions`. Set good[r] to whether row r is valid: strictly increasing and below numel.

    No byte outside of `raw` is read.
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
            # More zero bits are invalid, and could cause an overflow.
            most = (numel >> b) + 1
            for _ in range(lengths[j]):
                last = min(last + (min(row[i], most) << b) + _bits(raw, at, b) + 1, numel)
                row[i] = last
                i += uint64(1)
                at += b
        good[r] = last < numel and _bits(raw, at, spare) == 0


@numba.njit(nogil=True, inline="always")
def _put(out, at, width, value):
    """Write the lowest `width` bits of `value` to `out` (zeros) at bit `at`. Return the index of the next bit."""
    while width > 0:
        room = 8 - (at & 7)
        step = min(room, width)
        part = (value >> (width - step)) & ((1 << step) - 1)
        out[at >> 3] |= np.uint8(part << (room - step))
        at += step
        width -= step
    return at


@compiled
def pack(skips, each, counts, starts, fields, widths, values, out):
    """Write the Rice codes of all rows to `out`, which must contain zeros.

    Row r starts at bit starts[r] with fields[r] numbers, followed by its code. `values`, `widths`: these numbers, and their sizes in bits.
    """
    i, f = 0, 0
    for r in range(starts.size):
        at, stop = starts[r], i + counts[r]
        for _ in range(fields[r]):
            at = _put(out, at, widths[f], values[f])
            f += 1
        for j in range(i, stop):
            at += skips[j] >> each[j]
            out[at >> 3] |= np.uint8(128 >> (at & 7))
            at += 1
        for j in range(i, stop):
            at = _put(out, at, each[j], skips[j])
        i = stop


@compiled
def best_parameter(skips, low, high):
    """Return the smallest parameter from `low` to `high` that gives the shortest code of a row."""
    for b in range(low, high):  # the code length is convex in the parameter b
        saved = 0
        for i in range(skips.size):
            saved += ((skips[i] >> b) + 1) >> 1
        if saved <= skips.size:
            return b
    return high


@compiled
def best_blocks(skips, each, begins, unit, sizes, gain):
    """Find the shortest code in blocks for a row (see positions.py), and write the Rice parameter of each position to `each`.

    Return the block size exponent and the offset width. If blocks save too little (at most the fraction 2^-gain of the bytes), return 0, 0
    and leave `each` unchanged. `begins`: Rice parameter of offset 0 for each offset width, starting with width 2. `sizes`: number of block
    size exponents to try.
    """
    first, columns = begins[-1], 1 << (begins.size + 1)
    n_blocks = (skips.size + unit - 1) // unit
    # code length in bits for each block and each parameter
    table, bits = np.zeros((n_blocks, columns), np.int64), 0
    for i in range(skips.size):
        bits += (skips[i] >> each[i]) + 1 + each[i]
        own = table[i // unit]
        for p in range(columns):
            own[p] += (skips[i] >> (first + p)) + first + p + 1
    limit = (bits + 7) // 8
    shortest, chosen_s, chosen_w = limit - (limit >> gain), 0, 0
    merged, n = table.copy(), n_blocks
    for s in range(sizes):
        if s:
            for j in range(n // 2):
                merged[j] = merged[2 * j] + merged[2 * j + 1]
            if n % 2:
                merged[n // 2] = merged[n - 1]
            n = (n + 1) // 2
        for k in range(begins.size):
            width, start = k + 2, begins[k] - first
            bits = width * n
            for j in range(n):
                bits += merged[j, start : start + (1 << width)].min()
            if 1 + (bits + 7) // 8 < shortest:
                shortest, chosen_s, chosen_w = 1 + (bits + 7) // 8, s, width
        if n == 1:
            break
    if chosen_w:
        begin, step = begins[chosen_w - 2], 1 << chosen_s
        window = slice(begin - first, begin - first + (1 << chosen_w))
        for j in range(0, n_blocks, step):
            parameter = begin + table[j : j + step].sum(0)[window].argmin()
            each[j * unit : (j + step) * unit] = parameter
    return chosen_s, chosen_w


@compiled
def add_at(into, positions, values, weight):
    """Add weight * values to into[positions], in float32."""
    weight = float32(weight)
    for i in range(uint64(positions.size)):
        into[uint64(positions[i])] += weight * values[i]
