"""Loops of kernels/hadamard.py, compiled by numba.

`edges`: the start of each block and the end of the last block in the rotated vector `u`, all multiples of 8.
"""

import math

import numba
import numpy as np
from numpy import float32, float64, int32, int64, uint32, uint64

from .hadamard import LARGEST, PRODUCTS, SQUARES
from .loops import compiled, draw

N_WORDS = 1024  # number of random words that are drawn at a time


@compiled
def _stage(v, start, h):
    """Compute a butterfly stage over v[start:start+2h] in place. A separate function, because numba then vectorizes the loop."""
    for i in range(start, start + h):
        a, b = v[i], v[i + h]
        v[i], v[i + h] = a + b, a - b


@compiled
def butterfly(v, start, size):
    """Compute all butterfly stages over v[start:start+size] in place. `size`: a power of two, at least 8."""
    start, size = uint64(start), uint64(size)
    h = size >> uint64(1)
    while h:
        for first in range(start, start + size, h << uint64(1)):
            _stage(v, first, h)
        h >>= uint64(1)


@compiled
def rotate(x, signs, edges, exponents, u):
    """Rotate the blocks of x [n], float32, to u [N], padded with zeros. Write the exponent e of each block to `exponents`."""
    bits = x.view(np.uint32)
    for block in range(exponents.size):
        start, stop = uint64(edges[block]), uint64(edges[block + 1])
        end = min(stop, uint64(x.size))
        largest = int32(0)
        for i in range(start, end):
            largest = max(largest, int32(bits[i] & uint32(0x7FFFFFFF)))
        peak = uint32(largest)
        exponent = math.frexp(float64(peak.view(float32)))[1]
        half = exponent >> 1
        first, second = float32(math.ldexp(1.0, -half)), float32(math.ldexp(1.0, half - exponent))
        for byte in range(start >> uint64(3), end >> uint64(3)):
            sign = uint32(signs[byte])
            for j in range(uint32(8)):
                i = (byte << uint64(3)) + uint64(j)
                u[i] = _flip(x[i] * first * second, sign >> j)
        for i in range(max(start, end & ~uint64(7)), stop):
            value = x[i] * first * second if i < end else float32(0)
            u[i] = _flip(value, uint32(signs[i >> uint64(3)]) >> uint32(i & uint64(7)))
        butterfly(u, start, stop - start)
        exponents[block] = exponent


@compiled
def rotate_back(v, signs, edges, scale, shift, out):
    """Write the inverse rotation of scale·v + shift/d for each block (of size d) to out [N]. v is overwritten."""
    for block in range(scale.size):
        start, stop, factor = uint64(edges[block]), uint64(edges[block + 1]), scale[block]
        butterfly(v, start, stop - start)
        first = float64(v[start]) * factor + shift[block]
        for byte in range(start >> uint64(3), stop >> uint64(3)):
            sign = uint32(signs[byte])
            for j in range(uint32(8)):
                i = (byte << uint64(3)) + uint64(j)
                out[i] = _narrow(float64(_flip(v[i], sign >> j)) * factor)
        out[start] = _narrow(-first if signs[start >> uint64(3)] & 1 else first)


@numba.njit(nogil=True, inline="always")
def _flip(value, sign):
    """Return the float32 `value`, negated if the lowest bit of `sign` is 1."""
    bits = uint32(float32(value).view(uint32) ^ sign << uint32(31))
    return bits.view(float32)


@numba.njit(nogil=True, inline="always")
def _narrow(value):
    """Round a float64 to float32, clipped to its range. −0 becomes 0."""
    value = value if value < LARGEST else LARGEST
    return float32(value if value > -LARGEST else -LARGEST) + float32(0)


@compiled
def squares(u, edges, sums):
    """Write Σu² of each block to `sums`, int64, in units of 1/SQUARES."""
    for block in range(sums.size):
        total = int64(0)
        for i in range(uint64(edges[block]), uint64(edges[block + 1])):
            total += int64(float64(u[i]) * float64(u[i]) * SQUARES)
        sums[block] = total


@compiled
def bins(u, edges, thresholds, codes):
    """Write the code of each coordinate u (see `RotatedBlocks.bins`) to codes [N]. `thresholds`: [blocks, t]."""
    for block in range(edges.size - 1):
        start, stop = uint64(edges[block]), uint64(edges[block + 1])
        for i in range(start, stop):
            codes[i] = u[i] > float32(0)
        for threshold in thresholds[block]:
            for i in range(start, stop):
                codes[i] += np.uint8(2) if abs(u[i]) > threshold else np.uint8(0)


@compiled
def products(u, edges, table, codes, product, squared):
    """With q = table[code], write Σu·q and Σq² of each block to `product` and `squared`, in units of 1/PRODUCTS."""
    for block in range(product.size):
        first, second = int64(0), int64(0)
        for i in range(uint64(edges[block]), uint64(edges[block + 1])):
            q = float64(table[codes[i]])
            first += int64(float64(u[i]) * q * PRODUCTS)
            second += int64(q * q * PRODUCTS)
        product[block], squared[block] = first, second


@compiled
def rounded(u, edges, low, inverse, top, key, start, codes):
    """Write (u − low)·inverse, stochastically rounded and at most `top`, to codes [N].

    `key`: the seed. `inverse`: 1/step or 0. `start`: index of u[0] in the vector.
    """
    words = np.empty(N_WORDS, np.uint32)
    for block in range(edges.size - 1):
        for first in range(edges[block], edges[block + 1], N_WORDS):
            count = min(N_WORDS, edges[block + 1] - first)
            draw(key, key >> uint64(32), 0, start + first, words)
            for j in range(uint64(count)):
                i = uint64(first) + j
                whole = (float64(u[i]) - low[block]) * inverse[block]
                down = math.floor(whole)
                codes[i] = min(
                    int64(down) + int64(int64(words[j]) < int64((whole - down) * 4294967296.0)), top
                )
