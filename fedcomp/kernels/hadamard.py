"""Randomized Hadamard rotation: every coordinate of a block becomes a sum of all of them under random signs.

Ailon, Chazelle: Approximate nearest neighbors and the fast Johnson–Lindenstrauss transform. STOC 2006.

    u = W·D·x·2^−e      back: x = D·W·u·2^e/d

for each block of d coordinates. D holds the signs: coordinate i turns where bit i mod 32, the lowest first, of word ⌊i/32⌋ of stream
SIGNS (kernels/philox.py) is 1. W is the Walsh–Hadamard matrix of ±1, W·W = d. 2^e brings the largest magnitude into [½, 1), so nothing
overflows and denormals keep their bits. W·D/√d is a rotation; the square root is left to the scale that a codec sends. The butterfly
has the strides d/2, …, 2, 1 and puts a + b and a − b in the place of a and b: float32 sums of two in a fixed order, so every machine
has the same bits. Sums over blocks are integers.

Blocks have 2¹⁴ coordinates. The rest is cut into powers of two, the largest first; what fits into one, at least 8, with no more than 32
zeros behind it is the last. So a vector is never more than 32 coordinates longer when it is turned, against up to twice as long with
one block. What is proven of a rotation of d coordinates holds for each block by itself, with its own norm and d ≤ 2¹⁴: bounds that grow
with d are those of 2¹⁴, and those that shrink with d are weak for the last few coordinates, which are mixed with few others.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from . import philox
from .parallel import map_ranges

BLOCK, LEAST = 1 << 14, 8  # coordinates of a block, and of the smallest one
SPARE = 32  # zeros that may fill up the last block
CHUNK = 8 * BLOCK  # coordinates that one thread turns at a time: they stay in its cache
SIGNS = 3  # stream of the signs
SQUARES, PRODUCTS = 2.0**33, 2.0**38  # units in which sums over a block are below 2⁶²
LARGEST = float(np.finfo(np.float32).max)


@lru_cache(256)
def edges(numel: int) -> np.ndarray:
    """Return the starts of the blocks of a vector [numel] and the end of the last: int64, multiples of 8. Do not modify."""
    whole, rest = divmod(numel, BLOCK)
    sizes = [BLOCK] * whole
    while rest > 0:
        size = max(LEAST, 1 << (rest - 1).bit_length())
        sizes.append(size if size - rest <= SPARE else size // 2)
        rest -= sizes[-1]
    return np.cumsum([0, *sizes])


class Turned:
    """The blocks of a vector x [n] from coordinate `start` on, at most CHUNK coordinates, turned: u [N] float32.

    Numbers of blocks are float64 [blocks].
    """

    def __init__(self, x: Tensor, seed: int, start: int):
        from . import hadamard_loops

        self.loops, self.seed, marks = hadamard_loops, seed, edges(x.numel())
        first, last = np.searchsorted(marks, [start, min(start + CHUNK, marks[-1])]).tolist()
        self.blocks = slice(first, last)  # of the vector's blocks
        self.span = slice(start, int(marks[last]))  # of its coordinates, with the zeros behind them
        self.edges = marks[first : last + 1] - start
        self.sizes = np.diff(self.edges)  # d of each block
        self.exponents = np.empty(last - first, np.int64)  # e of each block
        self.u = np.empty(self.span.stop - start, np.float32)
        held = np.ascontiguousarray(x[self.span].to(torch.float32).numpy())
        signs = _sign_bytes(seed, start, self.span.stop)
        hadamard_loops.turn(held, signs, self.edges, self.exponents, self.u)

    def squares(self) -> np.ndarray:
        """Return ‖u‖² of each block, which is d·‖x·2^−e‖²."""
        sums = np.empty(self.sizes.size, np.int64)
        self.loops.squares(self.u, self.edges, sums)
        return sums / SQUARES

    def extremes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the smallest and the largest u of each block."""
        low, high = (f.reduceat(self.u, self.edges[:-1]) for f in (np.minimum, np.maximum))
        return low.astype(np.float64) + 0.0, high.astype(np.float64) + 0.0  # no −0

    def bins(self, thresholds: np.ndarray) -> np.ndarray:
        """Return codes [N], uint8: 1 where u > 0, plus twice the number of thresholds, float32 [blocks, t], that are below |u|."""
        codes = np.empty(self.u.size, np.uint8)
        self.loops.bins(self.u, self.edges, thresholds, codes)
        return codes

    def products(self, table: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ⟨u, q⟩ and ‖q‖² of each block for q = table[codes], a float32 table of magnitudes below 4."""
        along, squared = np.empty((2, self.sizes.size), np.int64)
        self.loops.products(self.u, self.edges, table, codes, along, squared)
        return along / PRODUCTS, squared / PRODUCTS

    def rounded(self, low: np.ndarray, step: np.ndarray, top: int, kind: type) -> np.ndarray:
        """Return integers r [N], int16 or uint8, at most `top`, with low + step·r = u in the mean over seeds; 0 where step = 0."""
        codes = np.empty(self.u.size, kind)
        inverse = np.divide(1.0, step, where=step > 0, out=np.zeros_like(step))
        key = np.uint64(self.seed)
        self.loops.rounded(self.u, self.edges, low, inverse, top, key, self.span.start, codes)
        return codes


def turn(x: Tensor, seed: int, use: Callable[[Turned], None]) -> None:
    """Turn a vector [n] and hand it to `use`, chunk after chunk, by threads."""
    x = x.detach().cpu()
    map_ranges(
        int(edges(x.numel())[-1]),
        lambda start, stop: [use(Turned(x, seed, a)) for a in range(start, stop, CHUNK)],
        CHUNK,
    )


def turn_back(
    values: np.ndarray, seed: int, numel: int, first: int, scale: np.ndarray, shift: np.ndarray
) -> np.ndarray:
    """Return the coordinates, float32, of blocks of a vector [numel] from number `first` on, whose u·2^e/d are scale·values + shift/d.

    `values` [whole blocks] is float32 and is overwritten; `scale` and `shift` [blocks] are float64. Coordinates beyond the range of
    float32 become its end.
    """
    from . import hadamard_loops

    marks = edges(numel)[first : first + scale.size + 1]
    out, signs = np.empty_like(values), _sign_bytes(seed, *marks[[0, -1]].tolist())
    hadamard_loops.turn_back(values, signs, marks - marks[0], scale, shift, out)
    return out[: numel - int(marks[0])]


def _sign_bytes(seed: int, start: int, stop: int) -> np.ndarray:
    """Return the sign bits of the coordinates start..stop-1, the lowest of a byte first; both are multiples of 8."""
    words = philox.words(seed, (stop + 31) // 32 - start // 32, start // 32, SIGNS)
    return words.astype("<u4", copy=False).view(np.uint8)[start % 32 // 8 :][: (stop - start) // 8]
