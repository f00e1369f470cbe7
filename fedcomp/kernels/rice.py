"""Strictly increasing positions as Rice codes: Golomb codes (Golomb 1966) whose parameter is a power of two (Rice 1979).

Of positions p_0 < p_1 < … the gaps g_i = p_i − p_(i−1), with p_(−1) = −1, are coded with parameter b:

    unary stream   for each i: (g_i − 1) >> b zero bits, then a one bit
    low stream     for each i: the b low bits of g_i − 1, the most significant first
    padding        zero bits up to a whole byte

The streams follow one another without a break; the first bit is the most significant one of the first byte. All unary parts
come first so that numpy can find every stop bit at once. `count`, `b` and `numel` travel outside.

b* is the largest b with (1 − p)^(2^(b−1)) ≥ φ − 1, φ = (√5 + 1)/2 and p the density: 1 + floor(log2(log(φ−1)/log(1−p))), at
least 0. It is found in integers, so that every machine finds the same.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt

import numpy as np

from ..errors import FrameError
from . import backend

WIDEST = 40  # b may not be above: positions stay below 2^63 whatever the bytes claim
_FRACTION = 128  # bits after the point
_GOLDEN = (isqrt(5 << 2 * _FRACTION) - (1 << _FRACTION)) >> 1  # φ − 1


@lru_cache(4096)
def parameter(count: int, numel: int) -> int:
    """b* for `count` positions spread evenly over numel; 0 for none."""
    if count == 0:
        return 0
    power, b = ((numel - count) << _FRACTION) // numel, 0
    while power >= _GOLDEN and b < WIDEST:
        power, b = power * power >> _FRACTION, b + 1
    return b


def best_parameter(positions: np.ndarray, numel: int) -> int:
    """The b of the shortest code among b* − 2 … b* + 2; of equals the smallest."""
    tried = _near(parameter(positions.size, numel))
    rest = np.diff(positions, prepend=-1) - 1
    lengths = [int((rest >> b).sum()) + positions.size * b for b in tried.tolist()]
    return int(tried[np.argmin(lengths)])


def best_parameters(positions: np.ndarray, counts: np.ndarray, numel: int) -> np.ndarray:
    """`best_parameter` for m rows whose positions follow one another, counts [m] long: int64 [m]."""
    rest = _rest(positions, counts)
    tried = _near(np.array([parameter(count, numel) for count in counts.tolist()], np.int64))
    lengths = [_sums(rest >> b.repeat(counts), counts) + counts * b for b in tried]
    return tried[np.argmin(lengths, axis=0), np.arange(counts.size)]


def bits(positions: np.ndarray, b: int) -> int:
    """The exact length of the code without its padding."""
    return int(((np.diff(positions, prepend=-1) - 1) >> b).sum()) + positions.size * (b + 1)


def pack(positions: np.ndarray, b: int) -> bytes:
    """The code of positions (int64 [count], strictly increasing from 0 up)."""
    length = bits(positions, b)
    head = length - positions.size * b
    if backend.compile_positions(positions.size):
        from . import loops

        data = np.zeros((length + 7) // 8, np.uint8)
        loops.rice_pack(positions, b, head, data)
        return data.tobytes()
    rest = np.diff(positions, prepend=-1) - 1
    stream = np.zeros(length, np.uint8)
    stream[((rest >> b) + 1).cumsum() - 1] = 1
    stream[head:] = (rest[:, None] >> np.arange(b - 1, -1, -1) & 1).ravel()
    return np.packbits(stream).tobytes()


def pack_rows(positions: np.ndarray, counts: np.ndarray, parameters: np.ndarray) -> list[bytes]:
    """`pack` of m rows whose positions follow one another, counts [m] long, each with its own b in parameters [m]."""
    rest, b = _rest(positions, counts), parameters.repeat(counts)
    unary = (rest >> b) + 1
    heads = _sums(unary, counts)  # bits of each row's unary stream
    sizes = (heads + counts * parameters + 7) // 8
    edges = sizes.cumsum()
    starts = (edges - sizes) * 8
    stream = np.zeros(edges[-1] * 8 if counts.size else 0, np.uint8)
    before = (heads.cumsum() - heads).repeat(counts)  # unary bits of earlier rows
    stream[starts.repeat(counts) + unary.cumsum() - before - 1] = 1
    index = np.arange(positions.size) - (counts.cumsum() - counts).repeat(counts)  # within the row
    low = (starts + heads).repeat(counts) + index * b
    for bit in range(b.max(initial=0)):
        has = b > bit
        stream[(low + bit)[has]] = (rest >> np.maximum(b - 1 - bit, 0) & 1)[has]
    data = np.packbits(stream).tobytes()
    return [data[stop - size : stop] for size, stop in zip(sizes.tolist(), edges.tolist())]


def unpack(data: bytes | memoryview, count: int, b: int, numel: int) -> np.ndarray:
    """The `count` positions below numel, int64, that `data` is the whole code of. Memory and time are O(numel) whatever is claimed.

    Raises FrameError on counts and parameters that cannot be, data that is cut off or goes on, padding that is not zero, and
    positions out of range. `pack` of the result gives `data` again.
    """
    if not 0 <= count <= numel:
        raise FrameError(f"{count} positions are claimed of a vector of {numel}; the frame is damaged or of another size")
    if not 0 <= b <= WIDEST:
        raise FrameError(f"Rice parameter {b} is not in 0..{WIDEST}; the frame is damaged")
    size = len(data)
    if not count * (b + 1) <= size * 8 < count * (b + 1) + (numel >> b) + 8:
        raise FrameError(f"{size} bytes cannot code {count} positions of a vector of {numel} at parameter {b}; the frame is damaged")
    raw = np.frombuffer(data, np.uint8)
    if backend.compile_positions(count):
        from . import loops

        positions = np.empty(count, np.int64)
        end = loops.rice_unpack(raw, b, positions)
    else:
        positions, end = _unpack(np.unpackbits(raw), count, b)
    spare = size * 8 - end
    if end < 0 or spare >= 8:
        raise FrameError(f"{size} bytes are not the length of the code of these {count} positions; the frame is cut off or goes on")
    if spare and raw[-1] & ((1 << spare) - 1):
        raise FrameError(f"the last {spare} bits of the positions are not zero; the frame is damaged")
    if positions.max(initial=-1) >= numel:
        raise FrameError(f"a position is {positions.max()} or more in a vector of {numel}; the frame is damaged or of another size")
    return positions


def unpack_rows(
    codes: Sequence[bytes | memoryview], counts: np.ndarray, parameters: np.ndarray, numel: int
) -> list[np.ndarray | FrameError]:
    """`unpack` of m codes together, each with its count [m] and b [m]; a FrameError in the place of one that is none."""
    sizes = np.array([len(code) for code in codes], np.int64)
    safe = (counts > 0) & (counts <= numel) & (parameters <= WIDEST) & (counts * (parameters + 1) <= sizes * 8)
    if not safe.all() or counts.sum() >= backend.MANY:
        return [_or_error(*row, numel) for row in zip(codes, counts.tolist(), parameters.tolist(), strict=True)]
    bits = np.unpackbits(np.frombuffer(b"".join(codes), np.uint8))
    ends = sizes.cumsum() * 8
    starts, ones = ends - sizes * 8, np.flatnonzero(bits)
    runs = counts.cumsum() - counts  # where a row's positions begin
    index = np.arange(counts.sum()) - runs.repeat(counts)  # within the row
    stops = ones[np.minimum(np.searchsorted(ones, starts).repeat(counts) + index, ones.size - 1)] if ones.size else index
    heads = stops[runs + counts - 1] + 1
    b = parameters.repeat(counts)
    at = heads.repeat(counts) + index * b
    low = np.zeros(index.size, np.int64)
    for bit in range(parameters.max(initial=0)):
        has = b > bit
        here = bits[np.minimum(at + bit, bits.size - 1)].astype(np.int64)
        low += np.where(has, here << np.maximum(b - 1 - bit, 0), 0)
    before = np.append(-1, stops[:-1])
    before[runs] = starts - 1
    gaps = (stops - before - 1 << b) + low + 1
    positions = gaps.cumsum()
    positions -= (positions[runs] - gaps[runs]).repeat(counts) + 1
    tails = heads + counts * parameters
    spare = ends - tails
    padding = np.array([code[-1] for code in codes]) & (1 << np.clip(spare, 0, 8)) - 1
    rising = np.minimum.reduceat(stops - before, runs) > 0
    inside = (heads > starts) & (heads <= ends) & (spare >= 0) & (spare < 8) & (positions[runs + counts - 1] < numel)
    good = rising & inside & (padding == 0)
    rows = np.split(positions, runs[1:])
    fits = zip(rows, codes, counts.tolist(), parameters.tolist(), good.tolist(), strict=True)
    return [row if ok else _or_error(code, count, b, numel) for row, code, count, b, ok in fits]


def _or_error(code: bytes | memoryview, count: int, b: int, numel: int) -> np.ndarray | FrameError:
    try:
        return unpack(code, count, b, numel)
    except FrameError as error:
        return error


def _unpack(stream: np.ndarray, count: int, b: int) -> tuple[np.ndarray, int]:
    """Positions, and the length of their code in bits; -1 for one that is cut off. stream: one element per bit."""
    stops = np.flatnonzero(stream)[:count]
    head = int(stops[-1]) + 1 if stops.size else 0
    end = head + count * b
    if stops.size < count or end > stream.size:
        return stops, -1
    low = stream[head:end].reshape(count, b) @ (1 << np.arange(b - 1, -1, -1))
    high = np.diff(stops, prepend=-1) - 1
    return ((high << b) + low + 1).cumsum() - 1, end


def _near(b: int | np.ndarray) -> np.ndarray:
    """The parameters that are tried around b, or around each of b [m]: [5] or [5, m]."""
    return np.clip(np.add.outer(np.arange(-2, 3), b), 0, WIDEST)


def _rest(positions: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """g_i − 1, for m rows that follow one another, counts [m] long."""
    rest = np.diff(positions, prepend=-1) - 1
    first = (counts.cumsum() - counts)[counts > 0]
    rest[first] = positions[first]
    return rest


def _sums(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The sum of each of m runs of values, counts [m] long."""
    return np.diff(np.append(0, values.cumsum())[np.append(0, counts.cumsum())])
