"""A decorator that compiles loops with numba, and compiled loops that several modules use.

Compiled loops release the interpreter lock, so that several threads can process parts of a vector. Indices are unsigned, because numba
checks signed indices for negative values, which prevents vectorization. For `low`, `high` (halves of the seed), `stream` and random words,
see philox.py.
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


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Compile a function with numba.njit(**options), and cache the result on disk if possible."""
    if function is None:
        return functools.partial(compiled, **options)
    config: Any = numba.config
    before, folder = config.CACHE_DIR, cache_folder()
    config.CACHE_DIR = folder or before
    try:
        return numba.njit(nogil=True, cache=bool(folder), **options)(function)
    finally:
        config.CACHE_DIR = before


@functools.cache
def cache_folder() -> str:
    """Return a folder for the compiled loops of this version of the code, or "" if none is writable. Delete folders of other versions.

    The name of the folder is a digest of all kernel modules, because numba does not detect changes of the modules that a loop imports.
    """
    package = Path(__file__).parent
    sources = b"".join(file.read_bytes() for file in sorted(package.glob("*.py")))
    name = f"numba-{hashlib.sha256(sources).hexdigest()[:16]}"
    for parent in (package / "__pycache__", Path.home() / ".cache" / "fedcomp"):
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
    """For n < `count` and all j, add factors[n] * source[starts[n] + j] to sums[j]. All arrays except `starts` are float32."""
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
    """Return the four Philox words for the key (low, high) and the counter (c0..c3). All arguments and results are uint32."""
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
    """Fill `out` with the random words of a stream from index `start`. `start` and `out.size` are multiples of 4."""
    low, high, stream, first = uint32(low), uint32(high), uint32(stream), uint64(start) >> uint64(2)
    for j in range(uint64(out.size >> 2)):
        block, at = first + j, j << uint64(2)
        a, b, c, d = philox(
            low, high, uint32(block), uint32(block >> uint64(32)), stream, uint32(0)
        )
        out[at], out[at + uint64(1)], out[at + uint64(2)], out[at + uint64(3)] = a, b, c, d


@numba.njit(nogil=True, inline="always")
def word_at(low, high, stream, index):
    """Return the random word at an index of a stream, as uint64."""
    block, lane = index >> uint64(2), index & uint64(3)
    a, b, c, d = philox(low, high, uint32(block), uint32(block >> uint64(32)), stream, uint32(0))
    a, c = (b, d) if lane & uint64(1) else (a, c)
    return c if lane & uint64(2) else a
