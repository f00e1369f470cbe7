"""Randomized Hadamard rotation: every coordinate of a block becomes a sum, with random signs, of all coordinates of the block.

Ailon and Chazelle, "Approximate nearest neighbors and the fast Johnson–Lindenstrauss transform", STOC 2006.

A block x of d coordinates is rotated to a block u, with a diagonal matrix D of random signs and the Walsh–Hadamard matrix W:

    u = W·D·x·2^−e      (rotation);
    x = D·W·u·2^e/d     (inverse rotation).

D negates the coordinate with index i in the vector if bit i of the random stream SIGNS (kernels/philox.py) is 1. Bit 0 is the lowest bit of
the first 32-bit word. W has entries ±1, and W·W = d·I. The factor 2^−e scales the largest magnitude of the block into [½, 1), so that no
sum overflows and subnormal numbers lose no bits. The matrix W·D/√d is a rotation; the codecs include the factor 1/√d in their scales.

W is applied by a butterfly: in stages with strides d/2, …, 2, 1, each of which replaces pairs of coordinates a, b by a + b and a − b. Every
machine computes these float32 sums in the same order, so the results have the same bits. Squared norms and inner products of a block are
computed in integers.

A vector is divided into blocks of 2¹⁴ coordinates. The remaining coordinates are divided into smaller blocks of decreasing size, each a
power of two and at least 8. The last block is padded with at most 32 zeros. The error bounds of codecs hold for each block separately, with
the size d and the norms of the block. Bounds that decrease with d are therefore weak for the small blocks at the end of a vector.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from . import philox
from .parallel import map_ranges

BLOCK, MIN_BLOCK = 1 << 14, 8  # numbers of coordinates of a full block and of the smallest block
MAX_PADDING = 32  # maximum number of zeros at the end of the last block
CHUNK = 8 * BLOCK  # number of coordinates that a thread rotates at a time, which fit in the cache
SIGNS = 3  # index of the random stream of the signs
# Sums of squares are integers in units of 1/SQUARES, and sums of products are integers in units of 1/PRODUCTS, both below 2⁶².
SQUARES, PRODUCTS = 2.0**33, 2.0**38
LARGEST = float(np.finfo(np.float32).max)


@lru_cache(256)
def edges(numel: int) -> np.ndarray:
    """Return the start of each block of a vector [numel] and the end of the last block, as int64. Do not modify this array."""
    whole, rest = divmod(numel, BLOCK)
    sizes = [BLOCK] * whole
    while rest > 0:
        size = max(MIN_BLOCK, 1 << (rest - 1).bit_length())
        sizes.append(size if size - rest <= MAX_PADDING else size // 2)
        rest -= sizes[-1]
    return np.cumsum([0, *sizes])


class RotatedBlocks:
    """Consecutive rotated blocks u [N], N ≤ CHUNK, of a vector x [n]. The first coordinate has the index `start` in x.

    Unless stated otherwise, methods return float64 arrays with one value per block.
    """

    def __init__(self, x: Tensor, seed: int, start: int):
        from . import hadamard_loops

        self.loops, self.seed, block_edges = hadamard_loops, seed, edges(x.numel())
        stop = min(start + CHUNK, block_edges[-1])
        first, last = np.searchsorted(block_edges, [start, stop]).tolist()
        self.indices = slice(first, last)  # indices of the blocks in the vector
        self.span = slice(start, int(block_edges[last]))  # coordinates, including padding
        self.edges = block_edges[first : last + 1] - start
        self.sizes = np.diff(self.edges)  # number d of coordinates of each block
        self.exponents = np.empty(last - first, np.int64)  # exponent e of each block
        self.u = np.empty(self.span.stop - start, np.float32)
        values = np.ascontiguousarray(x[self.span].to(torch.float32).numpy())
        signs = _sign_bytes(seed, start, self.span.stop)
        hadamard_loops.rotate(values, signs, self.edges, self.exponents, self.u)

    def squares(self) -> np.ndarray:
        """Return ‖u‖² of each block."""
        sums = np.empty(self.sizes.size, np.int64)
        self.loops.squares(self.u, self.edges, sums)
        return sums / SQUARES

    def extremes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the smallest and the largest coordinate of each block."""
        low, high = (f.reduceat(self.u, self.edges[:-1]) for f in (np.minimum, np.maximum))
        return low.astype(np.float64) + 0.0, high.astype(np.float64) + 0.0  # no −0

    def bins(self, thresholds: np.ndarray) -> np.ndarray:
        """Quantize the coordinates u to codes [N], uint8. `thresholds`: float32 [blocks, t].

        If j thresholds of the block are below |u|, the code is 2·j + 1 for u > 0, and 2·j otherwise.
        """
        codes = np.empty(self.u.size, np.uint8)
        self.loops.bins(self.u, self.edges, thresholds, codes)
        return codes

    def products(self, table: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ⟨u, q⟩ and ‖q‖² of each block, where q = table[codes]. `table`: float32, with magnitudes below 4."""
        product, squared = np.empty((2, self.sizes.size), np.int64)
        self.loops.products(self.u, self.edges, table, codes, product, squared)
        return product / PRODUCTS, squared / PRODUCTS

    def rounded(self, low: np.ndarray, step: np.ndarray, top: int, dtype: type) -> np.ndarray:
        """Round (u − low)/step stochastically to integers [N] of at most `top`, or to 0 in blocks with step 0.

        `low`, `step`: float64 [blocks]. `dtype`: int16 or uint8.
        """
        codes: np.ndarray = np.empty(self.u.size, dtype)
        inverse = np.divide(1.0, step, where=step > 0, out=np.zeros_like(step))
        key = np.uint64(self.seed)
        self.loops.rounded(self.u, self.edges, low, inverse, top, key, self.span.start, codes)
        return codes


def rotate(x: Tensor, seed: int, use: Callable[[RotatedBlocks], None]) -> None:
    """Rotate a vector [n] in chunks, on several threads, and call `use` with each rotated chunk."""
    x = x.detach().cpu()

    def work(start: int, stop: int) -> None:
        for at in range(start, stop, CHUNK):
            use(RotatedBlocks(x, seed, at))

    map_ranges(int(edges(x.numel())[-1]), work, CHUNK)


def rotate_back(
    values: np.ndarray, seed: int, numel: int, first: int, scale: np.ndarray, shift: np.ndarray
) -> np.ndarray:
    """Return the inverse rotation of consecutive blocks of a vector [numel], starting with block `first`, as float32 without padding.

    The rotated coordinates of a block of size d are scale·values + shift/d. `values`: float32 [coordinates of the blocks], overwritten.
    `scale`, `shift`: float64 [blocks]. Results are clipped to the range of float32.
    """
    from . import hadamard_loops

    block_edges = edges(numel)[first : first + scale.size + 1]
    out, signs = np.empty_like(values), _sign_bytes(seed, *block_edges[[0, -1]].tolist())
    hadamard_loops.rotate_back(values, signs, block_edges - block_edges[0], scale, shift, out)
    return out[: numel - int(block_edges[0])]


def _sign_bytes(seed: int, start: int, stop: int) -> np.ndarray:
    """Return the sign bits of the coordinates start..stop-1, packed into bytes, the first coordinate in the lowest bit of a byte.

    `start` and `stop` are multiples of 8.
    """
    words = philox.words(seed, (stop + 31) // 32 - start // 32, start // 32, SIGNS)
    return words.astype("<u4", copy=False).view(np.uint8)[start % 32 // 8 :][: (stop - start) // 8]
