"""Loops over Rice codes, compiled by numba; kernels/rice.py and positions.py have the same in numpy and say what they do.

Rows follow one another; `runs` [m + 1] is where each one's positions begin, and the end. Indices are unsigned, as in kernels/loops.py.
"""

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numpy import int64, uint8, uint64

from .loops import compiled


@intrinsic
def trailing_zeros(_, word):
    """How many zero bits a word that is not zero ends with."""
    return word(word), lambda context, builder, signature, args: builder.cttz(
        args[0], ir.Constant(ir.IntType(1), 1)
    )


@intrinsic
def reversed_bits(_, word):
    """A word with its bits in the opposite order."""
    return word(word), lambda context, builder, signature, args: builder.bitreverse(args[0])


@compiled
def pack(positions, runs, each, starts, low_starts, data):
    """Write rows into `data`, uint8, where nothing but the bits before starts [m] may be set; low streams begin at low_starts [m]."""
    for r in range(starts.size):
        at, last = starts[r], int64(-1)
        for i in range(uint64(runs[r]), uint64(runs[r + 1])):
            at += (positions[i] - last - 1) >> each[i]
            data[uint64(at >> 3)] |= uint8(128 >> (at & 7))
            at += 1
            last = positions[i]
        at, last = low_starts[r], int64(-1)
        full, kept = at >> 3, at & 7
        pending = int64(data[full]) >> (8 - kept) if kept else int64(0)
        for i in range(uint64(runs[r]), uint64(runs[r + 1])):
            b = each[i]
            pending = (pending << b) | ((positions[i] - last - 1) & ((1 << b) - 1))
            kept += b
            while kept >= 8:
                kept -= 8
                data[uint64(full)] = pending >> kept
                full += 1
            pending &= (1 << kept) - 1
            last = positions[i]
        if kept:
            data[full] = pending << (8 - kept)


@numba.njit(nogil=True, inline="always")
def _word(raw, at):
    """Eight bytes, the first the most significant, from the one with the bit `at` on."""
    word = uint64(0)
    for i in range(8):  # one load, and one instruction that turns it round
        word = word << uint64(8) | uint64(raw[uint64(at >> 3) + uint64(i)])
    return word


@numba.njit(nogil=True, inline="always")
def _bits(raw, at, width):
    """The number in so many bits from `at` on: at most 40."""
    return int64((_word(raw, at) << uint64(at & 7)) >> uint64(1) >> uint64(63 - width))


@numba.njit(nogil=True)
def _unary(raw, start, end, high):
    """Fill `high` with the zeros before each of so many ones from the bit `start` on. Returns where the last ends, or a bit past `end`."""
    i, last, at = uint64(0), start - 1, start & ~7
    word = reversed_bits(_word(raw, at)) & ~uint64(0) << uint64(start & 7)
    while at < end:
        while word:
            stop = at + int64(trailing_zeros(word))
            high[i] = stop - last - 1
            last = stop
            i += uint64(1)
            if i == uint64(high.size):
                return last + 1
            word &= word - uint64(1)
        at += 64
        if at < end:
            word = reversed_bits(_word(raw, at))
    return end + 1


@compiled
def unpack_one(raw, end, b, numel, positions):
    """Fill the positions from a code of one parameter in bits 0..end − 1 of `padded` bytes. Returns whether it is one."""
    at, last = _unary(raw, int64(0), end, positions), int64(-1)
    spare = end - at - positions.size * b
    if not 0 <= spare < 8:
        return False
    for i in range(uint64(positions.size)):
        last = min(last + (positions[i] << b) + _bits(raw, at, b) + 1, numel)
        positions[i] = last
        at += b
    return last < numel and _bits(raw, at, spare) == 0


@compiled
def unpack(raw, starts, ends, runs, each, numel, positions, good):
    """Fill the positions of each row from its code in bits starts..ends − 1 of `padded` bytes, as far as it is good."""
    for r in range(starts.size):
        row, b = positions[runs[r] : runs[r + 1]], each[runs[r] : runs[r + 1]]
        at, last = _unary(raw, starts[r], ends[r], row), int64(-1)
        spare = ends[r] - at - b.sum()
        good[r] = 0 <= spare < 8
        if not good[r]:
            continue
        for i in range(uint64(row.size)):
            last = min(last + (row[i] << b[i]) + _bits(raw, at, b[i]) + 1, numel)
            row[i] = last
            at += b[i]
        good[r] = last < numel and _bits(raw, at, spare) == 0


@compiled
def best(positions, run, stop, low, high):
    """The first b of low..high at which one more bit would not shorten the code of positions run..stop−1."""
    for b in range(low, high):
        saved, last = int64(0), int64(-1)
        for i in range(uint64(run), uint64(stop)):
            saved += (((positions[i] - last - 1) >> b) + 1) >> 1
            last = positions[i]
        if saved <= stop - run:
            return b
    return high


@compiled
def costs(positions, run, stop, first, unit, columns):
    """The bits of each `unit` of positions run..stop−1 with parameters first, first + 1, …: int64 [units, columns]."""
    table, last = np.zeros(((stop - run + unit - 1) // unit, columns), np.int64), int64(-1)
    for j in range(uint64(table.shape[0])):
        begin, end = run + int64(j) * unit, min(run + int64(j + uint64(1)) * unit, stop)
        for i in range(uint64(begin), uint64(end)):
            rest = uint64(positions[i] - last - 1)
            last = positions[i]
            for c in range(uint64(columns)):
                table[j, c] += int64(rest >> (uint64(first) + c))
        for c in range(uint64(columns)):
            table[j, c] += (end - begin) * (first + int64(c) + 1)
    return table


@compiled
def halved(table):
    """Rows added in pairs."""
    joined = np.zeros(((table.shape[0] + 1) >> 1, table.shape[1]), np.int64)
    for j in range(uint64(table.shape[0])):
        for c in range(uint64(table.shape[1])):
            joined[j >> uint64(1), c] += table[j, c]
    return joined


@compiled
def least(table, begin, columns):
    """The sum over rows of the least of so many columns from `begin` on."""
    total = int64(0)
    for j in range(uint64(table.shape[0])):
        smallest = table[j, uint64(begin)]
        for c in range(uint64(begin), uint64(begin + columns)):
            smallest = min(smallest, table[j, c])
        total += smallest
    return total


@compiled
def plan(
    positions, runs, near, begins, narrowest, blocked, units, sizes, gain, form, size, width, each
):
    """Fill form, size, width [m] and each [positions] with how each row takes the fewest bytes; form is the best single parameter."""
    for r in range(form.size):
        run, stop = runs[r], runs[r + 1]
        if stop - run < blocked:
            form[r] = best(positions, run, stop, near[r, 0], near[r, 1])
            each[run:stop] = form[r]
            continue
        first, unit = begins[r, -1], units[r]
        table = costs(positions, run, stop, first, unit, 1 << (narrowest + begins.shape[1] - 1))
        totals = table.sum(0)
        form[r] = near[r, 0]
        for b in range(near[r, 0], near[r, 1] + 1):
            if totals[b - first] < totals[form[r] - first]:
                form[r] = b
        each[run:stop] = form[r]
        limit, joined = (totals[form[r] - first] + 7) // 8, table
        limit -= limit >> gain
        for s in range(sizes):
            joined = halved(joined) if s else joined
            for k in range(begins.shape[1]):
                w = narrowest + k
                length = (
                    1 + (w * joined.shape[0] + least(joined, begins[r, k] - first, 1 << w) + 7) // 8
                )
                if length < limit:
                    limit, size[r], width[r] = length, s, w
            if joined.shape[0] == 1:
                break
        if width[r]:
            for _ in range(size[r]):
                table = halved(table)
            w = width[r]
            begin, block = begins[r, w - narrowest], unit << size[r]
            for j in range(table.shape[0]):
                window = table[j, begin - first : begin - first + (1 << w)]
                each[run + j * block : min(run + (j + 1) * block, stop)] = begin + window.argmin()
