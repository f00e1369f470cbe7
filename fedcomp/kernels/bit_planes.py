"""Small integers as bit planes: the first plane has the lowest bit of every integer, the second plane the next bit, and so on.

A byte of a plane contains one bit of each of eight integers; the bit of the first integer is the most significant. The number of integers
is a multiple of 8, so planes need no padding. A bitwise operation on whole planes processes many integers at a time.
"""

from collections.abc import Iterable

import numpy as np

from ..errors import FrameError

PIECE = 1 << 17  # number of integers that are packed at a time


def pack(codes: np.ndarray, width: int) -> bytes:
    """Return the `width` bit planes of integers [N] as bytes. The integers are uint8 and below 2^width."""
    planes = np.empty((width, codes.size // 8), np.uint8)
    for start in range(0, codes.size, PIECE):
        piece = codes[start : start + PIECE]
        for bit in range(width):
            planes[bit, start // 8 :][: piece.size // 8] = np.packbits(piece >> bit & 1)
    return planes.tobytes()


def unpack(data: memoryview, count: int, size: int) -> np.ndarray:
    """Return the bit planes [width, count/8] of `count` integers below `size`, as a view of `data`.

    Raises FrameError if the length of `data` does not match `count` and `size`, or if an integer is not below `size`.
    """
    width = (size - 1).bit_length()
    if len(data) != width * count // 8:
        raise FrameError(
            f"damaged frame: the quantized values have {len(data)} bytes; expected {count} integers of {width} bits"
        )
    planes = np.frombuffer(data, np.uint8).reshape(width, -1)
    if size < 1 << width and at_least([*planes], size).any():
        raise FrameError(f"damaged frame: a quantized value is not below {size}")
    return planes


def read(planes: np.ndarray, start: int, stop: int, table: np.ndarray) -> np.ndarray:
    """Return table[i] for each integer i at the indices start..stop-1 of the bit planes.

    `start` and `stop` are multiples of 8. `table`: float32 [2^width].
    """
    bits = np.unpackbits(planes[:, start // 8 : stop // 8], axis=1)
    codes = bits[0]
    for bit, plane in enumerate(bits[1:], 1):
        codes |= plane << bit
    return table[codes]


def count(rows: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Count the ones in each column of several rows of packed bits.

    Return the counts as bit planes. At most three rows per plane are kept in memory.

    A full adder (five bit operations) replaces three rows of a plane by a sum row in the same plane and a carry row in the next plane
    (Warren, Hacker's Delight, 2nd ed. 2013, §5–2).
    """
    waiting: list[list[np.ndarray]] = []
    for row in rows:
        for plane in range(len(waiting) + 1):
            if plane == len(waiting):
                waiting.append([])
            waiting[plane].append(row)
            if len(waiting[plane]) < 3:
                break
            total, row = _full_add(*waiting[plane])
            waiting[plane] = [total]
    sums: list[np.ndarray] = []
    carry: list[np.ndarray] = []
    for rows_of_plane in waiting:
        match [*rows_of_plane, *carry]:
            case [total]:
                carry = []
            case [a, b]:
                total, carry = a ^ b, [a & b]
            case three:
                total, last = _full_add(*three)
                carry = [last]
        sums.append(total)
    return [*sums, *carry]


def _full_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    odd = a ^ b
    return odd ^ c, a & b | odd & c


def at_least(planes: list[np.ndarray], number: int) -> np.ndarray:
    """Compare integers, given as bit planes, with `number`. Return packed bits: 1 for each integer ≥ `number`."""
    above = planes[0] ^ planes[0]
    equal = ~above
    if number <= 0:
        return equal
    if (number - 1).bit_length() > len(planes):
        return above
    for i in reversed(range(len(planes))):
        if number - 1 >> i & 1:
            equal = equal & planes[i]
        else:
            above, equal = above | equal & planes[i], equal & ~planes[i]
    return above
