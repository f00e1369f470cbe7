"""The decorator that compiles loops over arrays by numba, and loops that several files share.

Loops release the interpreter lock, so that threads can share a vector. Indices are unsigned: numba then leaves out the test for negative
ones, which would keep the loops from being vectorised.
"""

import functools
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numpy import uint32, uint64


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


@numba.njit(nogil=True, inline="always")
def word_at(low, high, stream, place):
    """Word `place`, uint64, of a seed and a stream."""
    block, lane = place >> uint64(2), place & uint64(3)
    a, b, c, d = philox(low, high, uint32(block), uint32(block >> uint64(32)), stream, uint32(0))
    a, c = (b, d) if lane & uint64(1) else (a, c)
    return c if lane & uint64(2) else a
