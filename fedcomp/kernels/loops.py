"""Loops over arrays, compiled by numba. They release the interpreter lock, so that threads can share a vector.

A key is a float32's bit pattern as an int32, `(bits ^ flip) & mask`: its magnitude, or the value itself on one side of
zero. Keys from 1 up are candidates, and larger keys are larger values. Most blocks hold none that matters, and cost one vectorised
maximum. Indices are unsigned: numba then leaves out the test for negative ones, which would keep the loops from being vectorised.
"""

import functools
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy import int32, uint32, uint64

BLOCK = 32


def compiled(function: Callable | None = None, **options: Any) -> Callable:
    """Compile a function by numba, with a cache on disk if a folder for it can be written. As a decorator it takes numba's options."""
    if function is None:
        return functools.partial(compiled, **options)
    before, folder = numba.config.CACHE_DIR, cache_folder()
    numba.config.CACHE_DIR = folder or before
    try:
        return numba.njit(nogil=True, cache=bool(folder), **options)(function)
    finally:
        numba.config.CACHE_DIR = before


@functools.cache
def cache_folder() -> str:
    """Return the folder of the compiled loops of this version of the code, "" where none can be written; others beside it are removed.

    It is named by a digest of all files of this folder: numba alone would see changes of a function's own file, not of what it imports.
    """
    here = Path(__file__).parent
    sources = b"".join(file.read_bytes() for file in sorted(here.glob("*.py")))
    name = f"numba-{hashlib.sha256(sources).hexdigest()[:16]}"
    for parent in (here / "__pycache__", Path.home() / ".cache" / "fedcomp"):
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(parent / name, os.W_OK):
            for old in set(parent.glob("numba-*")) - {parent / name}:
                shutil.rmtree(old, ignore_errors=True)
            return str(parent / name)
    return ""


@numba.njit(nogil=True, inline="always")
def _key(e, x, i, flip, mask):
    total = x[i] if e is None else e[i] + x[i]
    return (np.float32(total).view(int32) ^ flip) & mask


@numba.njit(nogil=True, inline="always")
def _largest(e, x, start, stop, flip, mask):
    largest = int32(0)
    for i in range(uint64(start), uint64(stop)):
        largest = max(largest, _key(e, x, i, flip, mask))
    return largest


@compiled
def histogram(e, x, flip, mask, floor, base, shift, counts):
    """Add to counts[j] the keys of e + x (of x where e is None) that are >= floor and have (key - base) >> shift == j.

    1 <= floor and base <= floor, so j is never negative; keys past the last bin are left out.
    """
    flip = int32(flip)
    mask = int32(mask)
    floor = int32(floor)
    base = int32(base)
    shift = int32(shift)
    for start in range(0, x.size, BLOCK):
        stop = min(start + BLOCK, x.size)
        if _largest(e, x, start, stop, flip, mask) < floor:
            continue
        for i in range(uint64(start), uint64(stop)):
            key = _key(e, x, i, flip, mask)
            if key >= floor:
                j = (key - base) >> shift
                if j < counts.size:
                    counts[uint64(j)] += 1


@compiled
def collect(e, x, flip, mask, threshold, ties, first, out):
    """Write to `out` the positions, counted from `first`, of the keys above `threshold` and of the first `ties` keys equal to it.

    threshold >= 0. Ends when `out` is full. Returns the number of ties that are left to take, and the part of `out` that is left.
    """
    flip, mask, threshold = int32(flip), int32(mask), int32(threshold)
    filled = 0
    for start in range(0, x.size, BLOCK):
        stop = min(start + BLOCK, x.size)
        if _largest(e, x, start, stop, flip, mask) < threshold:
            continue
        for i in range(start, stop):
            key = _key(e, x, uint64(i), flip, mask)
            if key > threshold or (key == threshold and ties > 0):
                if filled == out.size:
                    return ties, out[filled:]
                out[uint64(filled)] = first + i
                filled += 1
                ties -= key == threshold
    return ties, out[filled:]


@compiled
def all_finite(values):
    """Whether none of values [n], float32, is NaN or infinity."""
    largest, bits = int32(0), values.view(np.int32)
    for i in range(uint64(bits.size)):
        largest = max(largest, bits[i] & int32(0x7FFFFFFF))
    return largest < int32(0x7F800000)


@compiled
def add_at(into, positions, values, weight):
    """into[positions] += weight * values, in float32."""
    scale = np.float32(weight)
    for i in range(uint64(positions.size)):
        into[uint64(positions[i])] += scale * values[i]


@compiled
def add_signs_at(into, positions, raw, magnitude, weight):
    """`add_at` for ±magnitude, as bits in bytes, the most significant first."""
    step = np.float32(weight) * np.float32(magnitude)
    for i in range(uint64(positions.size)):
        positive = raw[i >> uint64(3)] << (i & uint64(7)) & uint64(128)
        into[uint64(positions[i])] += step if positive else -step


@numba.njit(nogil=True, inline="always")
def add_rows(sums, source, starts, factors, count):
    """sums[j] += Σ factors[n] * source[starts[n] + j] over n < count, for all j; float32, starts int64. Four rows at a time."""
    size = sums.size
    whole = count - count % 4
    for n in range(0, whole, 4):
        a, b = source[starts[n] :][:size], source[starts[n + 1] :][:size]
        c, d = source[starts[n + 2] :][:size], source[starts[n + 3] :][:size]
        p, q, r, s = factors[n], factors[n + 1], factors[n + 2], factors[n + 3]
        for j in range(size):
            sums[j] += p * a[j] + q * b[j] + (r * c[j] + s * d[j])
    for n in range(whole, count):
        a, p = source[starts[n] :][:size], factors[n]
        for j in range(size):
            sums[j] += p * a[j]


@numba.njit(nogil=True, inline="always")
def philox(low, high, c0, c1, c2, c3):
    """A block of four words (kernels/philox.py). All arguments and results are uint32."""
    for _ in range(10):
        x, y = uint64(c0) * uint64(0xD2511F53), uint64(c2) * uint64(0xCD9E8D57)
        c0 = uint32((y >> uint64(32)) ^ c1 ^ low)
        c1 = uint32(y)
        c2 = uint32((x >> uint64(32)) ^ c3 ^ high)
        c3 = uint32(x)
        low, high = uint32(low + uint32(0x9E3779B9)), uint32(high + uint32(0xBB67AE85))
    return c0, c1, c2, c3


@numba.njit(nogil=True, inline="always")
def draw(low, high, stream, start, out):
    """Words start..start+out.size-1 of a seed and a stream; `start` is a multiple of 4, and so is `out.size`."""
    low, high, stream, first = uint32(low), uint32(high), uint32(stream), uint64(start) >> uint64(2)
    for j in range(uint64(out.size >> 2)):
        block, at = first + j, j << uint64(2)
        a, b, c, d = philox(
            low, high, uint32(block), uint32(block >> uint64(32)), stream, uint32(0)
        )
        out[at], out[at + uint64(1)], out[at + uint64(2)], out[at + uint64(3)] = a, b, c, d


@compiled
def philox_fill(low, high, stream, start, out):
    """`draw` for callers that are not compiled."""
    draw(low, high, stream, start, out)


@numba.njit(nogil=True, inline="always")
def word_at(low, high, stream, place):
    """Word `place`, uint64, of a seed and a stream."""
    block, lane = place >> uint64(2), place & uint64(3)
    a, b, c, d = philox(low, high, uint32(block), uint32(block >> uint64(32)), stream, uint32(0))
    a, c = (b, d) if lane & uint64(1) else (a, c)
    return c if lane & uint64(2) else a


@compiled
def philox_at(low, high, stream, places, out):
    """The words of a seed and a stream at places, int64."""
    low, high, stream = uint32(low), uint32(high), uint32(stream)
    for i in range(uint64(places.size)):
        out[i] = word_at(low, high, stream, uint64(places[i]))
