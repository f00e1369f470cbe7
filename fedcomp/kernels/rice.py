"""Strictly increasing positions as Rice codes: Golomb codes (Golomb 1966) whose parameter is a power of two (Rice 1979).

Of positions p_0 < p_1 < … the gaps g_i = p_i − p_(i−1), with p_(−1) = −1, are coded with parameter b:

    unary stream   for each i: (g_i − 1) >> b zero bits, then a one bit
    low stream     for each i: the b low bits of g_i − 1, the most significant first
    padding        zero bits up to a whole byte

The streams follow one another without a break; the first bit is the most significant one of the first byte. All unary parts
come first so that numpy can find every stop bit at once. `count`, `b` and `numel` travel outside. In rows each position may have its own b.

b* is the largest b with (1 − p)^(2^(b−1)) ≥ φ − 1, φ = (√5 + 1)/2 and p the density: 1 + floor(log2(log(φ−1)/log(1−p))), at
least 0. It is found in integers, so that every machine finds the same.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from math import isqrt
from types import ModuleType
from typing import NamedTuple

import numpy as np

from ..errors import FrameError

WIDEST = 40  # b may not be above: positions stay below 2^63 whatever the bytes claim
SPARE = 8  # bytes after the last code that may be looked at
AFTER = bytes(SPARE)
MANY = 1_000  # positions from which compiled loops repay their import
_FRACTION = 128  # bits after the point
_GOLDEN = (isqrt(5 << 2 * _FRACTION) - (1 << _FRACTION)) >> 1  # φ − 1


class Fields(NamedTuple):
    """Numbers in so many bits each: int64 [f], in the order of their rows. A field has at most 40 bits."""

    rows: np.ndarray
    widths: np.ndarray
    values: np.ndarray


@lru_cache(4096)
def parameter(count: int, numel: int) -> int:
    """b* for `count` positions spread evenly over numel; 0 for none."""
    if count == 0:
        return 0
    power, b = ((numel - count) << _FRACTION) // numel, 0
    while power >= _GOLDEN and b < WIDEST:
        power, b = power * power >> _FRACTION, b + 1
    return b


def parameters(counts: np.ndarray, numel: int) -> np.ndarray:
    """`parameter` of each of counts [m]: int64 [m]."""
    return np.array([parameter(count, numel) for count in counts.tolist()], np.int64)


def best_parameter(positions: np.ndarray, numel: int) -> int:
    """The b of the shortest code among b* − 2 … b* + 2; of equals the smallest."""
    return int(best_parameters(positions, np.array([positions.size]), numel)[0])


def best_parameters(
    positions: np.ndarray, counts: np.ndarray, numel: int, widest: int = WIDEST
) -> np.ndarray:
    """`best_parameter` for m rows whose positions follow one another, counts [m] long; none above `widest`: int64 [m]."""
    rest, (low, high) = rests(positions, counts), near(parameters(counts, numel), widest)
    best, filled = low.copy(), np.flatnonzero(counts)
    runs, kept, high = (counts.cumsum() - counts)[filled], counts[filled], high[filled]
    for i in range(4 if filled.size else 0):
        b = low + i
        # One more low bit costs one bit a position and saves half of each unary part, rounded up: the length is convex in b.
        saved = np.add.reduceat((rest >> b.repeat(counts)) + 1 >> 1, runs)
        best[filled] += (saved > kept) & (b[filled] < high)
    return best


def near(b: np.ndarray, widest: int = WIDEST) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last parameter that are tried around b*."""
    return np.clip(b - 2, 0, widest), np.minimum(b + 2, widest)


def bits(positions: np.ndarray, b: int) -> int:
    """Return the length of the code in bits, without its padding."""
    return int(((np.diff(positions, prepend=-1) - 1) >> b).sum()) + positions.size * (b + 1)


def pack(positions: np.ndarray, b: int) -> bytes:
    """Return the code of positions (int64 [count], strictly increasing from 0 up)."""
    return pack_rows(positions, np.array([positions.size]), np.full(positions.size, b))[0]


def pack_rows(
    positions: np.ndarray, counts: np.ndarray, each: np.ndarray, lead: Fields | None = None
) -> list[bytes]:
    """Return a code for each of m rows whose positions follow one another, counts [m] long, `each` the b of every position.

    A row's code begins with the fields that `lead` has for it.
    """
    rest = rests(positions, counts)
    unary = (rest >> each) + 1
    units, lows = sums(unary, counts), sums(each, counts)
    leads = 0 if lead is None else np.bincount(lead.rows, lead.widths, counts.size).astype(np.int64)
    sizes = (leads + units + lows + 7) // 8
    edges = sizes.cumsum()
    starts = (edges - sizes) * 8
    stream = np.zeros(int(sizes.sum()) * 8, np.uint8)
    if lead is not None:
        at = lead.widths.cumsum() - lead.widths + (starts - leads.cumsum() + leads)[lead.rows]
        _put(stream, lead.widths, lead.values, at)
    starts = starts + leads
    stream[unary.cumsum() + (starts - units.cumsum() + units).repeat(counts) - 1] = 1
    at = each.cumsum() - each + (starts + units - lows.cumsum() + lows).repeat(counts)
    _put(stream, each, rest, at)
    data = np.packbits(stream).tobytes()
    return [data[stop - size : stop] for size, stop in zip(sizes.tolist(), edges.tolist())]


def unpack(data: bytes | memoryview, count: int, b: int, numel: int) -> np.ndarray:
    """Return the `count` positions below numel, int64, of a whole code. Memory and time are O(numel), whatever is claimed.

    Raises FrameError on impossible counts and parameters, data that is too short or too long, padding that is not zero, and
    positions out of range. `pack` of the result gives `data` again.
    """
    if not 0 <= count <= numel:
        raise FrameError(
            f"{count} positions are claimed of a vector of {numel}; the frame is damaged or of another size"
        )
    if not 0 <= b <= WIDEST:
        raise FrameError(f"Rice parameter {b} is not in 0..{WIDEST}; the frame is damaged")
    size = len(data)
    if not count * (b + 1) <= size * 8 < count * (b + 1) + (numel >> b) + 8 or bool(size) > count:
        raise FrameError(
            f"{size} bytes cannot code {count} positions of a vector of {numel} at parameter {b}; the frame is damaged"
        )
    if not count:
        return np.empty(0, np.int64)
    start, end, counts, each = np.array([0]), np.array([8 * size]), np.array([count]), np.array([b])
    positions, good = unpack_rows(padded([data]), start, end, counts, each, counts, numel)
    if not good[0]:
        raise FrameError(
            f"{size} bytes are not the code of {count} positions of {numel}; the frame is damaged or of another size"
        )
    return positions


def unpack_rows(
    raw: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    counts: np.ndarray,
    parameters: np.ndarray,
    lengths: np.ndarray,
    numel: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of m codes, one row after the other, and whether each code is valid, bool [m]. Rows of bad codes are undefined.

    The codes are the bits starts..ends − 1 [m] of `padded` bytes, starts ≤ ends. Each has at least one position, counts [m]. Rows are
    made of whole blocks of positions with one b: `parameters` and `lengths` of the blocks of all rows.
    """
    total = sum(counts.tolist())
    if compiled := loops(total):
        positions, good = np.empty(total, np.int64), np.empty(counts.size, np.bool_)
        compiled.unpack(raw, starts, ends, counts, parameters, lengths, numel, positions, good)
        return positions, good
    each = parameters.repeat(lengths)
    runs, lows = counts.cumsum() - counts, sums(each, counts)
    ones = np.flatnonzero(np.unpackbits(raw).view(np.bool_))
    index = np.arange(each.size) - runs.repeat(counts)  # within the row
    stops = (
        ones[np.minimum(np.searchsorted(ones, starts).repeat(counts) + index, ones.size - 1)]
        if ones.size
        else index * 0 - 1
    )
    heads = stops[runs + counts - 1] + 1
    at = each.cumsum() - each + (heads - lows.cumsum() + lows).repeat(counts)
    before = np.append(-1, stops[:-1])
    before[runs] = starts - 1
    rest = (stops - before - 1 << each) + read_bits(raw, each, np.minimum(at, ends[-1]))
    positions = (rest + 1).cumsum()
    positions -= (positions[runs] - rest[runs]).repeat(counts)
    spare = ends - heads - lows
    padding = raw[ends // 8 - 1] & (1 << np.clip(spare, 0, 8)) - 1
    rising = np.minimum.reduceat(stops - before, runs) > 0
    inside = (
        (heads > starts)
        & (heads <= ends)
        & (spare >= 0)
        & (spare < 8)
        & (positions[runs + counts - 1] < numel)
    )
    return positions, rising & inside & (padding == 0)


def padded(codes: Sequence[bytes | memoryview]) -> np.ndarray:
    """Return the bytes of all codes, uint8, followed by SPARE zero bytes."""
    return np.frombuffer(b"".join((*codes, AFTER)), np.uint8)


def read_bits(raw: np.ndarray, widths: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Numbers of so many bits each, at most 40, that begin at the bits `at` of `padded` bytes: int64."""
    words = np.ndarray(raw.size - SPARE + 1, ">u8", raw, strides=(1,))[
        at >> 3
    ]  # eight bytes from the one with the first bit
    return words.astype(np.int64) >> 64 - (at & 7) - widths & (1 << widths) - 1


def rests(positions: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """g_i − 1, for m rows that follow one another, counts [m] long."""
    rest = np.diff(positions, prepend=-1) - 1
    first = (counts.cumsum() - counts)[counts > 0]
    rest[first] = positions[first]
    return rest


def sums(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The sum of each of m runs of values, counts [m] long."""
    filled, total = counts > 0, np.zeros(counts.size, np.int64)
    if filled.any():
        total[filled] = np.add.reduceat(values, (counts.cumsum() - counts)[filled], dtype=np.int64)
    return total


def loops(count: int) -> ModuleType | None:
    """Return the compiled loops where so many positions repay their import."""
    return _loops() if count >= MANY else None


@cache
def _loops() -> ModuleType:
    from . import rice_loops

    return rice_loops


def _put(stream: np.ndarray, widths: np.ndarray, values: np.ndarray, at: np.ndarray) -> None:
    """Write the low bits of values, so many of each, into a stream of one element per bit, from `at` on."""
    for bit in range(widths.max(initial=0)):
        if bit == widths.min():
            has = widths > bit
            widths, values, at = widths[has], values[has], at[has]
        stream[at + bit] = values >> widths - 1 - bit & 1
