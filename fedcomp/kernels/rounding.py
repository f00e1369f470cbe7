"""Stochastic rounding: a coordinate goes up with the probability of its fraction, drawn by a random word of its own.

    ⌊t + u⌋   t ≥ 0 in fixed point with 32 bits after the point, u a word of (seed, coordinate) (kernels/philox.py)

In fixed point t is a product in float64 and a half, cut off, and all that follows is in integers. Vectors are on any device; results are
numpy arrays.
"""

import math

import numpy as np
from torch import Tensor

from . import philox
from .parallel import PIECE, map_ranges, pieces

ONE = 2.0**32  # in fixed point
FRACTION = 23  # bits of a float32 below its leading one
MAGNITUDE, INFINITE = 0x7FFFFFFF, 0x7F800000  # bits without the sign, and those of infinity
BITS = 16  # of a bin of a histogram, and of a bin of bit patterns
MAX_SHIFT = 23  # by so many powers of two every denormal becomes normal


def to_multiples(x: Tensor, unit: float, limit: float, seed: int) -> np.ndarray:
    """Integers l [n], int8 or int16, with unit·l = x in the mean over seeds, |x| cut at `limit`; l is exact where x/unit is whole.

    unit > 0 and limit/unit ≤ 32767.
    """
    small = math.ceil(limit / unit) <= 127
    levels = np.empty(x.numel(), np.int8 if small else np.int16)
    _fill(levels, x, "multiples", ONE / unit, limit, seed=seed)
    return levels


def to_powers(x: Tensor, shift: int, seed: int) -> np.ndarray:
    """Codes c [n], uint8, of powers of two that are |x| in the mean over seeds: 2^(c − 127 − shift), and 0 for c = 0.

    `shift` is at most `max_shift` the largest magnitude. What is smaller than the smallest power turns to it or to 0.
    """
    codes = np.empty(x.numel(), np.uint8)
    _fill(codes, x, "powers", np.float32(2.0**shift), seed=seed)
    return codes


def pack_negative(x: Tensor, codes: np.ndarray) -> np.ndarray:
    """One bit for each coordinate (kernels/bits.py), 1 where x is negative and its code is not 0: uint8 [ceil(n/8)]."""
    bits, x = np.empty((codes.size + 7) // 8, np.uint8), x.detach().cpu()

    def work(start: int, stop: int) -> None:
        for piece in pieces(x, start, stop):
            end = start + piece.size
            bits[start // 8 : (end + 7) // 8] = np.packbits((piece < 0) & (codes[start:end] != 0))
            start = end

    map_ranges(codes.size, work)
    return bits


def from_powers(codes: np.ndarray, bits: np.ndarray, shift: int) -> np.ndarray | None:
    """The powers of two, float32 [n], of codes and their signs; 2^128 is the largest float32. None if a zero has a sign."""
    powers = np.minimum(np.ldexp(1.0, np.arange(256) - 127 - shift), np.finfo(np.float32).max)
    powers[0] = 0.0
    values, table = np.empty(codes.size, np.float32), np.concatenate([powers, -powers])
    table = table.astype(np.float32)

    def work(start: int, stop: int) -> bool:
        some = codes[start:stop]
        negative = np.unpackbits(bits[start // 8 : (stop + 7) // 8], count=some.size)
        values[start:stop] = table[some + (negative.astype(np.uint16) << 8)]
        return not (negative.view(np.bool_) & (some == 0)).any()

    return values if all(map_ranges(codes.size, work)) else None


def to_levels(x: Tensor, levels: np.ndarray, nearest: bool, seed: int) -> np.ndarray:
    """Codes c [n], uint8, of levels [at most 256], float32 and ascending: the nearest one, or one of the two around x with x as their mean.

    Where x lies below the first level or above the last, it turns to that one.
    """
    wide = levels.astype(np.float64)
    ends = (wide[1:] + wide[:-1]) / 2 if nearest else wide[1:-1]
    edges = ends.astype(np.float32)
    edges = np.where(edges < ends, np.nextafter(edges, np.float32(np.inf)), edges)
    # What one more above a level adds to the chance of going up, in fixed point.
    up = np.zeros(levels.size) if nearest else np.append(ONE / np.diff(wide), 0.0)
    codes = np.empty(x.numel(), np.uint8)
    _fill(codes, x, "levels", edges, wide, up, seed=seed)
    return codes


def max_shift(largest: float) -> int:
    """The most powers of two, up to 23, by which a float32 of this magnitude can be multiplied."""
    return min(MAX_SHIFT, 128 - math.frexp(largest)[1])


def histogram(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """x in ascending bins, at most 65537: the mean of each that holds something, float64, and how many it holds, int64.

    Bit patterns are put together, in as few as will do: a bin is at most 2⁻⁷ of its values wide, and less where these are alike.
    """
    from . import rounding_loops

    x, edges = x.detach().cpu(), extremes(x)
    shift = max_shift(max(map(abs, edges)))
    factor = np.float32(2.0**shift)
    lowest, highest = (int(key) for key in _keys(np.array(edges, np.float32) * factor))
    width = max(0, (highest - lowest).bit_length() - BITS)
    first = lowest >> width
    table = np.zeros((2, (highest >> width) - first + 1), np.int64)

    def work(start: int, stop: int) -> np.ndarray:
        part = np.zeros_like(table)
        for piece in pieces(x, start, stop):
            rounding_loops.tally(piece, factor, first, width, part)
        return part

    for part in map_ranges(x.numel(), work):
        table += part
    bins = np.flatnonzero(table[0])
    counts, low = table[:, bins]
    left, right = (_values((bins + first + i) << width) for i in (0, 1))
    return np.ldexp(left + (right - left) * (low / counts / 2.0**width), -shift), counts


def largest(x: Tensor) -> float:
    """max |x|, 0 of none."""
    return max(map(abs, extremes(x)))


def extremes(x: Tensor) -> tuple[float, float]:
    """The smallest and the largest of x; 0 of none."""
    return tuple(edge.item() for edge in x.detach().aminmax()) if x.numel() else (0.0, 0.0)


def count(codes: np.ndarray, size: int) -> np.ndarray:
    """Return how often each code below `size` occurs."""
    return sum(
        np.bincount(codes[start : start + PIECE], minlength=size)
        for start in range(0, codes.size, PIECE)
    )


def lookup(symbols: np.ndarray, values: np.ndarray) -> np.ndarray:
    """values[symbols]; symbols are in range."""
    out = np.empty(symbols.size, values.dtype)

    def work(start: int, stop: int) -> None:
        out[start:stop] = values[symbols[start:stop]]

    map_ranges(symbols.size, work)
    return out


def _fill(out: np.ndarray, x: Tensor, name: str, *arguments: object, seed: int) -> None:
    """Fill `out` by the loop of this name for each piece of x."""
    from . import rounding_loops

    loop, x = getattr(rounding_loops, name), x.detach().cpu()
    low, high = philox.halves(seed)

    def work(start: int, stop: int) -> None:
        for piece in pieces(x, start, stop):
            loop(piece, arguments, low, high, start, out[start : start + piece.size])
            start += piece.size

    map_ranges(x.numel(), work)


def _keys(x: np.ndarray) -> np.ndarray:
    """Integers, int64, in the order of the float32s x: bit patterns of magnitudes, with the sign."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & MAGNITUDE), bits)


def _values(keys: np.ndarray) -> np.ndarray:
    """The float64s whose keys these are; what follows the largest float32 is 2^128."""
    values = (
        np.minimum(np.abs(keys), INFINITE - 1).astype(np.int32).view(np.float32).astype(np.float64)
    )
    return np.copysign(np.where(np.abs(keys) < INFINITE, values, 2.0**128), keys)
