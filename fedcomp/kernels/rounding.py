"""Rounding of vectors to multiples of a unit, to powers of two or to given levels, and histograms of vectors.

Stochastic rounding of a number a + t·(b − a) between two neighbors a < b gives b with probability t, and a otherwise. The seed and the
index of a coordinate determine a random word of 32 bits (kernels/philox.py), and b is chosen if t + word·2⁻³² ≥ 1. `to_multiples` and
`to_levels` round t to 32 fractional bits. In `to_powers`, t is the mantissa of a float32, so only the upper 23 bits of the word are used.
Vectors can be on any device; results are numpy arrays.
"""

import math

import numpy as np
from torch import Tensor

from ..errors import FrameError
from . import philox
from .parallel import PIECE, map_ranges, pieces

ONE = 2.0**32  # the number 1 in fixed point with 32 fractional bits
# MAGNITUDE: mask of all bits but the sign. INFINITE: the bits of infinity.
MAGNITUDE, INFINITE = 0x7FFFFFFF, 0x7F800000
HISTOGRAM_BITS = 16  # a histogram has at most 2^HISTOGRAM_BITS + 1 bins
MAX_SHIFT = 23  # 2^MAX_SHIFT times any positive subnormal float32 is a normal number


def to_multiples(x: Tensor, unit: float, limit: float, seed: int) -> np.ndarray:
    """Clip |x| to `limit`, divide x by `unit` > 0, and round stochastically to integers [n], int8 or int16. limit/unit ≤ 32767."""
    small = math.ceil(limit / unit) <= 127
    levels = np.empty(x.numel(), np.int8 if small else np.int16)
    _fill(levels, x, "multiples", ONE / unit, limit, seed=seed)
    return levels


def to_powers(x: Tensor, shift: int, seed: int) -> np.ndarray:
    """Round |x| stochastically to powers of two or 0. Return uint8 codes [n]: a code c > 0 means 2^(c − 127 − shift), and code 0 means 0.

    `shift` must be at most max_shift(largest(x)).
    """
    codes = np.empty(x.numel(), np.uint8)
    _fill(codes, x, "powers", np.float32(2.0**shift), seed=seed)
    return codes


def from_powers(codes: np.ndarray, bits: np.ndarray, shift: int) -> np.ndarray:
    """Return the values, float32 [n], of codes from `to_powers`. A value is negative if its bit in the packed bits `bits` is 1.

    The value 2^128 becomes the largest float32.

    Raises FrameError if a zero has a negative sign.
    """
    negative = np.unpackbits(bits, count=codes.size)
    if (negative.view(np.bool_) & (codes == 0)).any():
        raise FrameError("damaged frame: a zero has a negative sign")
    powers = np.minimum(np.ldexp(1.0, np.arange(256) - 127 - shift), np.finfo(np.float32).max)
    powers[0] = 0.0
    table = np.concatenate([powers, -powers]).astype(np.float32)
    return table[codes + (negative.astype(np.uint16) << 8)]


def to_levels(x: Tensor, levels: np.ndarray, nearest: bool, seed: int) -> np.ndarray:
    """Round each value of x to the nearest level or, if not `nearest`, stochastically. Return the indices of the levels, uint8 [n].

    `levels`: at most 256, float32, ascending. Values outside of their range are rounded to the first or the last level.
    """
    exact_levels = levels.astype(np.float64)
    # A value is in cell i if exactly i edges are less than or equal to it. It is rounded to level i, or to level i or i + 1 if not
    # `nearest`.
    exact_edges = (exact_levels[1:] + exact_levels[:-1]) / 2 if nearest else exact_levels[1:-1]
    # Edges are rounded up to float32, so that each float32 value stays in its cell.
    edges = exact_edges.astype(np.float32)
    edges = np.where(edges < exact_edges, np.nextafter(edges, np.float32(np.inf)), edges)
    # In each cell, the probability of rounding up increases linearly. The slopes are in fixed point.
    slopes = np.zeros(levels.size) if nearest else np.append(ONE / np.diff(exact_levels), 0.0)
    codes = np.empty(x.numel(), np.uint8)
    _fill(codes, x, "levels", edges, exact_levels, slopes, seed=seed)
    return codes


def max_shift(largest: float) -> int:
    """Return the largest h ≤ 23 for which largest·2^h is in the range of float32."""
    return min(MAX_SHIFT, 128 - math.frexp(largest)[1])


def histogram(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean (float64, ascending) and the number of values (int64) of each nonempty bin of a histogram of x.

    There are at most 65537 bins. The width of a bin is at most 2⁻⁷ times the magnitude of its values, except close to 0.
    """
    from . import rounding_loops

    x, edges = x.detach().cpu(), extremes(x)
    shift = max_shift(max(map(abs, edges)))
    factor = np.float32(2.0**shift)
    lowest, highest = (int(key) for key in _keys(np.array(edges, np.float32) * factor))
    bin_bits = max(0, (highest - lowest).bit_length() - HISTOGRAM_BITS)  # a bin has 2^bin_bits keys
    first_bin = lowest >> bin_bits
    size = (highest >> bin_bits) - first_bin + 1

    def work(start: int, stop: int) -> np.ndarray:
        table = np.zeros((2, size), np.int64)
        for piece in pieces(x, start, stop):
            rounding_loops.add_to_histogram(piece, factor, first_bin, bin_bits, table)
        return table

    table = np.sum(map_ranges(x.numel(), work), axis=0)
    bins = np.flatnonzero(table[0])
    counts, low_sums = table[:, bins]
    left, right = (_values((bins + first_bin + i) << bin_bits) for i in (0, 1))
    means = left + (right - left) * (low_sums / counts / 2.0**bin_bits)
    return np.ldexp(means, -shift), counts


def largest(x: Tensor) -> float:
    """Return the largest magnitude in x, or 0 if x is empty."""
    return max(map(abs, extremes(x)))


def extremes(x: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value of x, or zeros if x is empty."""
    if not x.numel():
        return 0.0, 0.0
    smallest, largest = x.detach().aminmax()
    return smallest.item(), largest.item()


def count(codes: np.ndarray, size: int) -> np.ndarray:
    """Return how often each code below `size` occurs."""
    counts = np.zeros(size, np.int64)
    for start in range(0, codes.size, PIECE):
        counts += np.bincount(codes[start : start + PIECE], minlength=size)
    return counts


def _fill(out: np.ndarray, x: Tensor, name: str, *arguments: object, seed: int) -> None:
    """Fill `out` with the loop `name` in rounding_loops.py."""
    from . import rounding_loops

    loop, x = getattr(rounding_loops, name), x.detach().cpu()
    low, high = philox.halves(seed)

    def work(start: int, stop: int) -> None:
        for piece in pieces(x, start, stop):
            loop(piece, arguments, low, high, start, out[start : start + piece.size])
            start += piece.size

    map_ranges(x.numel(), work)


def _keys(x: np.ndarray) -> np.ndarray:
    """Return int64 keys that are ordered like the float32 values x: the bits of |x| as an integer, with the sign of x."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & MAGNITUDE), bits)


def _values(keys: np.ndarray) -> np.ndarray:
    """Invert `_keys`, to float64. Keys beyond the range of float32 give ±2^128."""
    sizes = np.abs(keys)
    values = np.minimum(sizes, INFINITE - 1).astype(np.int32).view(np.float32).astype(np.float64)
    return np.copysign(np.where(sizes < INFINITE, values, 2.0**128), keys)
