"""The encoding of coordinates that are quantized to a small number of levels.

A symbol is the index 0..size-1 of one of `size` levels. Symbols are packed or entropy-coded (kernels/range_coder.py), whichever is shorter.
Packed symbols are digits in base `size`: each 64-bit word contains as many digits as fit. The length of packed symbols depends only on
their number and `size`, so the decoder knows that shorter data is entropy-coded. To save time, 2²⁰ or more symbols are combined before
entropy coding: each group of w symbols becomes one symbol, where w is the largest number with size^w ≤ 256.

Multiples are levels that are integers times a common unit.
"""

import struct
from functools import cache
from typing import Any

import numpy as np

from ..kernels import range_coder
from .base import expect
from .frame import Section, read_varint, varint
from .update import Dense

UNIT = struct.Struct("<f")
# The largest and the smallest positive float32
LARGEST, SMALLEST = float(np.finfo(np.float32).max), 2.0**-149
MAX_MULTIPLE = 32767  # largest magnitude of an integer multiple of the unit
MIN_GROUPED = 1 << 20  # from this number on, symbols are combined before entropy coding
GROUP = 256  # largest number of possible values of a combined symbol
BYTE, WORD = np.dtype("u1"), np.dtype("<u8")


def pack(symbols: np.ndarray, size: int) -> bytes:
    """Encode symbols [n] from 0 to size − 1, uint8 or uint16: entropy-coded if that is shorter, else packed as digits."""
    coded = _coded(symbols, size)
    if coded is not None and len(coded) < packed_bytes(symbols.size, size):
        return coded
    return _packed(symbols, size)


def unpack(data: memoryview, count: int, size: int) -> np.ndarray:
    """Decode `data` into `count` symbols, uint8 or uint16.

    Raises FrameError unless `data` is exactly what `pack` returns for these symbols.
    """
    length = packed_bytes(count, size)
    if len(data) < length and size <= range_coder.LARGEST:
        width = _group_width(count, size)
        groups = range_coder.decode(data, -(-count // width), size**width)
        symbols, _ = split(groups, size, width)
        is_padded = not symbols[count:].any()
        expect(is_padded, "the padding of the last entropy-coded symbol is not zero")
        return symbols[:count]
    expect(len(data) == length, f"the quantized values have {len(data)} bytes; expected {length}")
    words = np.zeros(-(-count // _digits(size)), WORD)
    words.view(np.uint8)[:length] = np.frombuffer(data, np.uint8)
    symbols, rest = split(words, size, _digits(size))
    is_padded = not symbols[count:].any()
    expect(is_padded, "there are more quantized values than coordinates")
    expect(not rest.any(), "a quantized value is out of range")
    symbols = symbols[:count]
    coded = _coded(symbols, size)
    expect(
        coded is None or len(coded) >= length,
        "the quantized values are packed, although entropy coding is shorter",
    )
    return symbols


def packed_bytes(count: int, size: int) -> int:
    """Return the size in bytes of symbols that are packed as digits. `pack` never returns more bytes than this size."""
    whole, rest = divmod(count, _digits(size))
    return whole * WORD.itemsize + ((size**rest - 1).bit_length() + 7) // 8


def pack_multiples(levels: np.ndarray, unit: float) -> Section:
    """Encode a vector with the values levels·unit as a section.

    `levels` [n]: int8 or int16 with magnitudes of at most 32767; the array is overwritten.
    """
    top = max(int(levels.max()), -int(levels.min()))
    if top == 0:
        return Section(levels.size, varint(0))
    dtype = np.dtype(np.uint8 if top <= 127 else np.uint16)
    symbols = levels.view(dtype) if levels.itemsize == dtype.itemsize else levels.astype(dtype)
    symbols += dtype.type(top)
    return Section(levels.size, varint(top) + UNIT.pack(unit) + pack(symbols, 2 * top + 1))


def unpack_multiples(section: Section) -> tuple[np.ndarray, int, float]:
    """Decode the result of `pack_multiples` into symbols [count], the largest multiple m, and the unit. Each value is (symbol − m)·unit.

    If all values are zero, m and the unit are 0. Raises FrameError if the section is invalid, or if a value exceeds the range of float32.
    """
    numel, data = section.count, memoryview(section.body)
    top, start = read_varint(data)
    if top == 0:
        expect(len(data) == start, "more bytes follow, although all quantized values are zero")
        return np.broadcast_to(np.uint8(0), numel), 0, 0.0
    expect(
        top <= MAX_MULTIPLE,
        f"the largest quantized value is {top}; at most {MAX_MULTIPLE} is allowed",
    )
    expect(len(data) >= start + UNIT.size, "the unit of the quantized values is incomplete")
    (unit,) = UNIT.unpack_from(data, start)
    expect(
        0 < unit and unit * top <= LARGEST,
        f"the largest value, {top} times the unit {unit}, is not a positive float32 number",
    )
    symbols = unpack(data[start + UNIT.size :], numel, 2 * top + 1)
    largest = max(int(symbols.max()) - top, top - int(symbols.min()))
    expect(
        top == largest, f"the largest magnitude is stated as {top}, but no quantized value has it"
    )
    return symbols, top, unit


def open_multiples(section: Section) -> Dense:
    """Decode the result of `pack_multiples` into an update. Raises FrameError."""
    symbols, top, unit = unpack_multiples(section)
    if top == 0:
        return Dense(np.zeros(section.count, np.float32))
    return Dense((unit * np.arange(-top, top + 1)).astype(np.float32)[symbols])


def max_multiples_bytes(numel: int, top: int) -> int:
    """Return the largest size in bytes of a section from `pack_multiples`. `top`: largest magnitude of a multiple of the unit."""
    return len(varint(numel)) + len(varint(top)) + UNIT.size + packed_bytes(numel, 2 * top + 1)


def round_down(value: float) -> float:
    """Round a positive value down to float32. If the result would be 0, return the smallest positive float32 instead."""
    nearest = np.float32(min(value, LARGEST))
    if float(nearest) > value:
        nearest = np.nextafter(nearest, np.float32(0))
    return max(float(nearest), SMALLEST)


def join(symbols: np.ndarray, size: int, width: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Combine every `width` consecutive symbols into one integer [⌈n / width⌉], as digits in base `size`.

    The first symbol is the lowest digit of an integer. The last integer is padded with zeros.
    """
    integers = np.zeros(-(-symbols.size // width), dtype)
    for i in reversed(range(width)):
        digits = symbols[i::width]
        integers *= dtype.type(size)
        integers[: digits.size] += digits
    return integers


def split(integers: np.ndarray, size: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Split integers [m], a result of `join`, into symbols [m·width], including the padding.

    Also return each integer without its lowest `width` digits, [m]: 0, unless the integer is too large for a result of `join`.
    """
    symbols = np.empty((integers.size, width), np.uint8 if size <= 256 else np.uint16)
    base = integers.dtype.type(size)
    for digits in symbols.T:
        quotients = integers // base  # faster than np.divmod
        digits[:] = integers - quotients * base
        integers = quotients
    return symbols.ravel(), integers


def _coded(symbols: np.ndarray, size: int) -> bytes | None:
    """Entropy-code the symbols. Return None if `size` is too large for the entropy coder."""
    if size > range_coder.LARGEST:
        return None
    width = _group_width(symbols.size, size)
    groups = join(symbols, size, width, BYTE) if width > 1 else symbols
    return range_coder.encode(groups, size**width)


def _packed(symbols: np.ndarray, size: int) -> bytes:
    return join(symbols, size, _digits(size), WORD).tobytes()[: packed_bytes(symbols.size, size)]


def _group_width(count: int, size: int) -> int:
    """Return how many of `count` symbols are combined into one symbol before entropy coding."""
    return _digits(size, GROUP) if count >= MIN_GROUPED else 1


@cache
def _digits(size: int, limit: int = 1 << 64) -> int:
    """Return the largest d ≥ 1 for which every number with d digits in base `size` is below `limit`."""
    digits = 1
    while size ** (digits + 1) <= limit:
        digits += 1
    return digits
