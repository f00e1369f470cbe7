"""The wire of codecs that send one of few levels for each coordinate.

    symbols     [n], each below `size`: entropy-coded (kernels/range_coder.py) where that is shorter than packed; the length tells which
    packed      as many symbols as fit into 64 bits, the first counting least, then the next; of the last word only the bytes it needs
    multiples   m, the largest magnitude, as LEB128; unless it is 0, the unit as float32, and the integers + m as symbols below 2m + 1

From 2²⁰ symbols on, several are coded as one where these have at most 256 values (`range_coder.group`).
"""

import struct
from functools import cache

import numpy as np

from ..kernels import range_coder, rounding
from ..kernels.parallel import map_ranges
from .base import expect
from .frame import Section, read_varint, varint
from .update import Dense

UNIT = struct.Struct("<f")
LARGEST, SMALLEST = float(np.finfo(np.float32).max), 2.0**-149  # of float32
MOST = 32767  # the largest multiple
GROUPED = 1 << 20  # symbols from which several are coded as one
WORD = np.dtype("<u8")


def pack(symbols: np.ndarray, size: int) -> bytes:
    """Symbols [n], uint8 or uint16, each below size ≥ 2, as the shorter of the two; of equals packed."""
    coded = _coded(symbols, size)
    if coded is not None and len(coded) < packed_bytes(symbols.size, size):
        return coded
    return _packed(symbols, size)


def unpack(data: memoryview, count: int, size: int) -> np.ndarray:
    """The symbols [count], uint8 or uint16. Raises FrameError unless `pack` makes `data` of them."""
    length = packed_bytes(count, size)
    if len(data) < length and size <= range_coder.LARGEST:
        return _decoded(data, count, size)
    expect(len(data) == length, "levels have another length")
    symbols = _unpacked(data, count, size)
    coded = _coded(symbols, size)
    expect(
        coded is None or len(coded) >= length, "levels are packed that would be shorter when coded"
    )
    return symbols


def packed_bytes(count: int, size: int) -> int:
    """Return the length of packed symbols in bytes, the longest that `pack` makes of them."""
    whole, rest = divmod(count, _digits(size))
    return whole * WORD.itemsize + ((size**rest - 1).bit_length() + 7) // 8


def pack_multiples(levels: np.ndarray, unit: float) -> Section:
    """Integers [n], int8 or int16, of magnitude ≤ 32767, and the float32 above 0 that they are multiples of. Overwrites the integers."""
    most = max(int(levels.max()), -int(levels.min()))
    if most == 0:
        return Section(levels.size, varint(0))
    kind = np.dtype(np.uint8 if most <= 127 else np.uint16)
    symbols = levels.view(kind) if levels.itemsize == kind.itemsize else levels.astype(kind)
    symbols += kind.type(most)
    return Section(levels.size, varint(most) + UNIT.pack(unit) + pack(symbols, 2 * most + 1))


def unpack_multiples(section: Section) -> tuple[np.ndarray, int, float]:
    """Symbols [count], the integer that is the symbol 0, negated, and the unit; that is 0 where all are zero.

    Raises FrameError unless `pack_multiples` makes the section of them, and their multiples are finite.
    """
    numel, data = section.count, memoryview(section.body)
    most, start = read_varint(data)
    if most == 0:
        expect(len(data) == start, "bytes follow levels that are all zero")
        return np.broadcast_to(np.uint8(0), numel), 0, 0.0
    expect(most <= MOST and len(data) >= start + UNIT.size, "levels are cut short, or too large")
    (unit,) = UNIT.unpack_from(data, start)
    expect(0 < unit and unit * most <= LARGEST, f"levels are up to {most} times the unit {unit}")
    symbols = unpack(data[start + UNIT.size :], numel, 2 * most + 1)
    expect(
        most == max(int(symbols.max()) - most, most - int(symbols.min())),
        "no level is as large as is said",
    )
    return symbols, most, unit


def open_multiples(section: Section) -> Dense:
    """The update of a section of multiples. Raises FrameError like `unpack_multiples`."""
    symbols, most, unit = unpack_multiples(section)
    if most == 0:
        return Dense(np.zeros(section.count, np.float32))
    return Dense(rounding.spread(symbols, (unit * np.arange(-most, most + 1)).astype(np.float32)))


def longest_multiples(numel: int, most: int) -> int:
    """A length that no section of multiples up to `most` exceeds, count included."""
    return len(varint(numel)) + len(varint(most)) + UNIT.size + packed_bytes(numel, 2 * most + 1)


def below(value: float) -> float:
    """The largest float32 that is not above a value > 0; the smallest that there is where none is."""
    nearest = np.float32(min(value, LARGEST))
    if float(nearest) > value:
        nearest = np.nextafter(nearest, np.float32(0))
    return max(float(nearest), SMALLEST)


def _coded(symbols: np.ndarray, size: int) -> bytes | None:
    """None where the entropy coder has no such alphabets."""
    if size > range_coder.LARGEST:
        return None
    if not _grouped(symbols.size, size):
        return range_coder.encode(symbols, size)
    width = range_coder.group_width(size)
    groups = map_ranges(
        -(-symbols.size // width),
        lambda start, stop: range_coder.group(symbols[start * width : stop * width], size),
    )
    return range_coder.encode(np.concatenate(groups), size**width)


def _decoded(data: memoryview, count: int, size: int) -> np.ndarray:
    if not _grouped(count, size):
        return range_coder.decode(data, count, size)
    width, symbols = range_coder.group_width(size), np.empty(count, np.uint8)
    groups = range_coder.decode(data, -(-count // width), size**width)

    def work(start: int, stop: int) -> None:
        part = symbols[start * width : stop * width]
        part[:] = range_coder.ungroup(groups[start:stop], size, part.size)

    map_ranges(groups.size, work)
    return symbols


def _grouped(count: int, size: int) -> bool:
    return count >= GROUPED and size * size <= range_coder.GROUP


def _packed(symbols: np.ndarray, size: int) -> bytes:
    digits = _digits(size)
    words = np.zeros(-(-symbols.size // digits), WORD)
    for j in reversed(range(digits)):
        column = symbols[j::digits]
        words *= size
        words[: column.size] += column
    return words.tobytes()[: packed_bytes(symbols.size, size)]


def _unpacked(data: memoryview, count: int, size: int) -> np.ndarray:
    digits = _digits(size)
    symbols = np.empty(count, np.uint8 if size <= 256 else np.uint16)
    words = np.zeros(-(-count // digits), WORD)
    words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    for j in range(digits):
        words, digit = np.divmod(words, WORD.type(size))
        column = symbols[j::digits]
        column[:] = digit[: column.size]
        expect(not digit[column.size :].any(), "levels go on after the last coordinate")
    expect(not words.any(), "levels are out of range")
    return symbols


@cache
def _digits(size: int) -> int:
    """Return how many symbols fit into a word."""
    digits = 1
    while size ** (digits + 1) <= 1 << 64:
        digits += 1
    return digits
