"""Rice codes of strictly increasing positions. A Rice code (Rice 1979) is a Golomb code (Golomb 1966) whose divisor is a power of two, 2^b.

Positions p_0 < p_1 < … are coded as their gaps g_i = p_i − p_(i−1), where p_(−1) = −1. With the parameter b, the code has three parts:

    Unary stream: for each i, (g_i − 1) >> b zero bits, then a one bit.
    Low stream: for each i, the b low bits of g_i − 1, the most significant first.
    Padding: zero bits up to a whole byte.

Bits are packed from the most significant bit of the first byte. The number of positions, the parameter b and the size of the vector are
sent separately. The functions `pack_rows` and `unpack_rows` allow a different parameter for each position.

The optimal parameter for `count` uniformly distributed positions of a vector [numel] is called b*. Let p = count/numel and φ = (√5 + 1)/2.
Then b* is the largest b ≥ 1 with (1 − p)^(2^(b−1)) ≥ φ − 1, or 0 if there is none. It is computed in integers, so that it is the same on
every machine.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt
from types import ModuleType
from typing import NamedTuple

import numpy as np

from ..errors import FrameError

WIDEST = 40  # largest parameter b; small enough that no position in a damaged code reaches 2^63
SPARE = 8  # number of zero bytes after the last code, needed because eight bytes are read at a time
AFTER = bytes(SPARE)
MANY = 1_000  # compiled loops save time, despite their import, for at least this many positions
_FRACTION = 128  # number of fractional bits of fixed-point numbers
_GOLDEN = (isqrt(5 << 2 * _FRACTION) - (1 << _FRACTION)) >> 1  # φ − 1


class Fields(NamedTuple):
    """Numbers of at most 40 bits that are written before the codes of rows. The arrays are int64, with one entry per number."""

    rows: np.ndarray  # index of the row before whose code the number is written, ascending
    widths: np.ndarray  # size of the number in bits
    values: np.ndarray


@lru_cache(4096)
def parameter(count: int, numel: int) -> int:
    """Return the optimal parameter b*, or 0 if `count` is 0."""
    if count == 0:
        return 0
    power, b = ((numel - count) << _FRACTION) // numel, 0
    while power >= _GOLDEN and b < WIDEST:
        power, b = power * power >> _FRACTION, b + 1
    return b


def parameters(counts: np.ndarray, numel: int) -> np.ndarray:
    """Return the optimal parameters b* for `counts` [m], as int64 [m]."""
    return np.array([parameter(count, numel) for count in counts.tolist()], np.int64)


def best_parameter(positions: np.ndarray, numel: int) -> int:
    """Return the smallest parameter from b* − 2 to b* + 2 that gives the shortest code."""
    return int(best_parameters(positions, np.array([positions.size]), numel)[0])


def best_parameters(
    positions: np.ndarray, counts: np.ndarray, numel: int, widest: int = WIDEST
) -> np.ndarray:
    """Return `best_parameter`, limited to `widest`, for each of m rows of `counts` [m] positions, as int64 [m]."""
    skips, (low, high) = (
        skip_lengths(positions, counts),
        search_range(parameters(counts, numel), widest),
    )
    best, filled = low.copy(), np.flatnonzero(counts)
    runs, kept, high = (counts.cumsum() - counts)[filled], counts[filled], high[filled]
    for i in range(4 if filled.size else 0):
        b = low + i
        # With b + 1, each position has one more low bit and half as many zero bits, rounded down. The code length is convex in b.
        saved = np.add.reduceat((skips >> b.repeat(counts)) + 1 >> 1, runs)
        best[filled] += (saved > kept) & (b[filled] < high)
    return best


def search_range(b: np.ndarray, widest: int = WIDEST) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest parameter to try. `b`: the optimal parameters b*."""
    return np.clip(b - 2, 0, widest), np.minimum(b + 2, widest)


def bits(positions: np.ndarray, b: int) -> int:
    """Return the length in bits of a Rice code, without padding."""
    return int(((np.diff(positions, prepend=-1) - 1) >> b).sum()) + positions.size * (b + 1)


def pack(positions: np.ndarray, b: int) -> bytes:
    """Return the Rice code of positions, int64 [count], strictly increasing and ≥ 0."""
    return pack_rows(positions, np.array([positions.size]), np.full(positions.size, b))[0]


def pack_rows(
    positions: np.ndarray, counts: np.ndarray, each: np.ndarray, lead: Fields | None = None
) -> list[bytes]:
    """Return the Rice codes of m rows of `counts` [m] positions. `each`: parameter of each position.

    The numbers in `lead` are written before the code of their row.
    """
    skips = skip_lengths(positions, counts)
    unary = (skips >> each) + 1
    units, lows = sums(unary, counts), sums(each, counts)
    leads = 0 if lead is None else np.bincount(lead.rows, lead.widths, counts.size).astype(np.int64)
    sizes = (leads + units + lows + 7) // 8
    edges = sizes.cumsum()
    starts = (edges - sizes) * 8
    if compiled := loops(positions.size):
        data = np.zeros(sizes.sum(), np.uint8)
        fields = Fields(*np.zeros((3, 0), np.int64)) if lead is None else lead
        numbers = np.bincount(fields.rows, minlength=counts.size)
        compiled.pack(skips, each, counts, starts, numbers, fields.widths, fields.values, data)
    else:
        stream = np.zeros(int(sizes.sum()) * 8, np.uint8)
        if lead is not None:
            at = lead.widths.cumsum() - lead.widths + (starts - leads.cumsum() + leads)[lead.rows]
            _put(stream, lead.widths, lead.values, at)
        starts = starts + leads
        stream[unary.cumsum() + (starts - units.cumsum() + units).repeat(counts) - 1] = 1
        at = each.cumsum() - each + (starts + units - lows.cumsum() + lows).repeat(counts)
        _put(stream, each, skips, at)
        data = np.packbits(stream)
    return [
        data[stop - size : stop].tobytes() for size, stop in zip(sizes.tolist(), edges.tolist())
    ]


def unpack(data: bytes | memoryview, count: int, b: int, numel: int) -> np.ndarray:
    """Decode `count` positions below numel into int64. Time and memory are O(numel) for any arguments.

    Raises FrameError unless `data` is exactly what `pack` returns for `count` positions below numel.
    """
    if not 0 <= count <= numel:
        raise FrameError(
            f"damaged frame: the list of positions claims {count} positions, but the vector has {numel} elements"
        )
    if not 0 <= b <= WIDEST:
        raise FrameError(
            f"damaged frame: the Rice parameter of the list of positions is {b}; expected 0 to {WIDEST}"
        )
    size = len(data)
    if not count * (b + 1) <= size * 8 < count * (b + 1) + (numel >> b) + 8 or bool(size) > count:
        raise FrameError(
            f"damaged frame: the list of positions has {size} bytes, which cannot encode {count} positions below {numel}"
        )
    if not count:
        return np.empty(0, np.int64)
    start, end, counts, each = np.array([0]), np.array([8 * size]), np.array([count]), np.array([b])
    positions, good = unpack_rows(padded([data]), start, end, counts, each, counts, numel)
    if not good[0]:
        raise FrameError(
            f"damaged frame: the list of positions ({size} bytes) cannot be decoded to {count} positions below {numel}"
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
    """Decode m codes. Return the positions of all rows, concatenated, and whether each code is valid, bool [m].

    The positions of an invalid code are undefined. `raw`: result of `padded`. Code i consists of the bits starts[i]..ends[i]−1 and contains
    counts[i] ≥ 1 positions. A row consists of blocks. `parameters`, `lengths`: parameter and number of positions of each block.
    """
    total = sum(counts.tolist())
    if compiled := loops(total):
        positions, good = np.empty(total, np.int64), np.empty(counts.size, np.bool_)
        compiled.unpack(raw, starts, ends, counts, parameters, lengths, numel, positions, good)
        return positions, good
    each = parameters.repeat(lengths)
    runs, lows = counts.cumsum() - counts, sums(each, counts)
    ones = np.flatnonzero(np.unpackbits(raw).view(np.bool_))
    index = np.arange(each.size) - runs.repeat(counts)  # index of each position in its row
    stops = np.full(index.size, -1)
    if ones.size:
        at = np.searchsorted(ones, starts).repeat(counts) + index
        stops = ones[np.minimum(at, ones.size - 1)]
    heads = stops[runs + counts - 1] + 1
    at = each.cumsum() - each + (heads - lows.cumsum() + lows).repeat(counts)
    before = np.append(-1, stops[:-1])
    before[runs] = starts - 1
    skips = (stops - before - 1 << each) + read_bits(raw, each, np.minimum(at, ends[-1]))
    positions = (skips + 1).cumsum()
    positions -= (positions[runs] - skips[runs]).repeat(counts)
    spare = ends - heads - lows
    padding = raw[ends // 8 - 1] & (1 << np.clip(spare, 0, 8)) - 1
    rising = np.minimum.reduceat(stops - before, runs) > 0
    inside = (heads > starts) & (heads <= ends) & (spare >= 0) & (spare < 8)
    in_range = positions[runs + counts - 1] < numel
    return positions, rising & inside & in_range & (padding == 0)


def padded(codes: Sequence[bytes | memoryview]) -> np.ndarray:
    """Concatenate codes and SPARE zero bytes, as uint8."""
    return np.frombuffer(b"".join((*codes, AFTER)), np.uint8)


def read_bits(raw: np.ndarray, widths: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Read int64 numbers from a result of `padded`. Number i has widths[i] ≤ 40 bits and starts at bit at[i]."""
    words = np.ndarray(raw.size - SPARE + 1, ">u8", raw, strides=(1,))  # words[i] starts at byte i
    return words[at >> 3].astype(np.int64) >> 64 - (at & 7) - widths & (1 << widths) - 1


def skip_lengths(positions: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return g_i − 1, the number of coordinates that are skipped before each position, for m rows of `counts` [m] positions."""
    skips = np.diff(positions, prepend=-1) - 1
    first = (counts.cumsum() - counts)[counts > 0]
    skips[first] = positions[first]
    return skips


def sums(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the sums of m runs of consecutive values of lengths `counts` [m], as int64 [m]."""
    filled, total = counts > 0, np.zeros(counts.size, np.int64)
    if filled.any():
        total[filled] = np.add.reduceat(values, (counts.cumsum() - counts)[filled], dtype=np.int64)
    return total


def loops(count: int) -> ModuleType | None:
    """Return the compiled loops, or None if `count` positions are encoded faster without them."""
    if count < MANY:
        return None
    from . import rice_loops

    return rice_loops


def _put(stream: np.ndarray, widths: np.ndarray, values: np.ndarray, at: np.ndarray) -> None:
    """Write the lowest `widths` bits of each value to the indices `at` of a stream with one element per bit."""
    for bit in range(widths.max(initial=0)):
        if bit == widths.min():
            has = widths > bit
            widths, values, at = widths[has], values[has], at[has]
        stream[at + bit] = values >> widths - 1 - bit & 1
