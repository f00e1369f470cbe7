"""Loops of kernels/bitsliced_counter.py, compiled by numba. Rows are uint64; bits stand where the bytes of memory put them."""

import functools

import numba
import numpy as np
from numpy import uint64

from .loops import compiled


@functools.lru_cache(16)
def full(words: int) -> np.ndarray:
    """A row of ones, read-only."""
    return _constant(words, 0xFFFF_FFFF_FFFF_FFFF)


@functools.lru_cache(16)
def empty(words: int) -> np.ndarray:
    """A row of zeros, read-only."""
    return _constant(words, 0)


def _constant(words: int, value: int) -> np.ndarray:
    row = np.full(words, value, np.uint64)
    row.flags.writeable = False
    return row


@numba.njit(nogil=True, inline="always")
def _full(a, b, c):
    """A full adder: what stays, and the carry."""
    odd = a ^ b
    return odd ^ c, (a & b) | (odd & c)


@numba.njit(nogil=True, inline="always")
def _fifteen(a, b, c, d, e, f, g, h, i, j, k, m, n, o, p):
    """How many of fifteen bits are 1, in four digits, the lowest first."""
    one, a = _full(a, b, c)
    one, b = _full(one, d, e)
    one, c = _full(one, f, g)
    one, d = _full(one, h, i)
    one, e = _full(one, j, k)
    one, f = _full(one, m, n)
    one, g = _full(one, o, p)
    two, a = _full(a, b, c)
    two, b = _full(two, d, e)
    two, c = _full(two, f, g)
    four, eight = _full(a, b, c)
    return one, two, four, eight


@compiled
def eight(a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, out):
    """Write to `out` where eight or more of fifteen rows are 1."""
    for z in range(uint64(out.size)):
        _, _, _, out[z] = _fifteen(
            a[z], b[z], c[z], d[z], e[z], f[z], g[z], h[z], i[z], j[z], k[z], m[z], n[z], o[z], p[z]
        )


@compiled
def add(a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, one, two, four, eight, carry):
    """Add fifteen rows to the lowest four digits of counts, and write what they carry."""
    for z in range(uint64(carry.size)):
        s1, s2, s4, s8 = _fifteen(
            a[z], b[z], c[z], d[z], e[z], f[z], g[z], h[z], i[z], j[z], k[z], m[z], n[z], o[z], p[z]
        )
        one[z], t = _full(one[z], s1, uint64(0))
        two[z], t = _full(two[z], s2, t)
        four[z], t = _full(four[z], s4, t)
        eight[z], carry[z] = _full(eight[z], s8, t)


@compiled
def carry(digits, carried):
    """Add a row to the lowest of digits [d, words], and on; it is lost on the way."""
    for digit in range(uint64(digits.shape[0])):
        row = digits[digit]
        for z in range(uint64(carried.size)):
            kept = row[z] ^ carried[z]
            carried[z] &= row[z]
            row[z] = kept


@compiled
def unlike(row, other, far):
    """In how many bits two rows are not alike, and in how many of these `far` is 1."""
    total, wide = uint64(0), uint64(0)
    for z in range(uint64(row.size)):
        unlike = row[z] ^ other[z]
        total += _ones(unlike)
        wide += _ones(unlike & far[z])
    return total, wide


@numba.njit(nogil=True, inline="always")
def _ones(word):
    word -= word >> uint64(1) & uint64(0x5555555555555555)
    word = (word & uint64(0x3333333333333333)) + (word >> uint64(2) & uint64(0x3333333333333333))
    word = word + (word >> uint64(4)) & uint64(0x0F0F0F0F0F0F0F0F)
    return word * uint64(0x0101010101010101) >> uint64(56)
