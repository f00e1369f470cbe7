"""Small integers as bit planes. The first plane has the lowest bit of every integer, the next plane the next bit.

A byte of a plane has the bits of eight integers, the first in the most significant bit. The number of integers is a multiple of 8, so
planes have no padding.
"""

import numpy as np

from ..errors import FrameError
from .parallel import map_ranges

PIECE = 1 << 17  # integers that are packed at a time


def pack(codes: np.ndarray, width: int) -> bytes:
    """Return the planes of integers [N], uint8, below 2^width."""
    planes = np.empty((width, codes.size // 8), np.uint8)

    def work(start: int, stop: int) -> None:
        for first in range(start, stop, PIECE):
            piece = codes[first : min(first + PIECE, stop)]
            for bit in range(width):
                planes[bit, first // 8 :][: piece.size // 8] = np.packbits(piece >> bit & 1)

    map_ranges(codes.size, work)
    return planes.tobytes()


def unpack(data: memoryview, count: int, size: int) -> np.ndarray:
    """Return the planes [width, count/8] of integers below `size`, a view of `data`.

    Raises FrameError if `data` has another length or an integer is not below `size`.
    """
    width = (size - 1).bit_length()
    if len(data) != width * count // 8:
        raise FrameError(
            f"{len(data)} bytes are not {count} integers of {width} bits; the frame is damaged or of another size"
        )
    planes = np.frombuffer(data, np.uint8).reshape(width, -1)
    if size < 1 << width and _any_above(planes, size - 1):
        raise FrameError(f"an integer is not below {size}; the frame is damaged")
    return planes


def read(planes: np.ndarray, start: int, stop: int, table: np.ndarray) -> np.ndarray:
    """Return table[code] for the integers start..stop-1, both multiples of 8. `table`: float32 [2^width]."""
    bits = np.unpackbits(planes[:, start // 8 : stop // 8], axis=1)
    codes = bits[0]
    for bit, plane in enumerate(bits[1:], 1):
        codes |= plane << bit
    return table[codes]


def _any_above(planes: np.ndarray, top: int) -> bool:
    """Return whether any integer is above `top`. Integers are compared from the highest bit, eight at a time."""
    above, equal = np.zeros((), np.uint8), np.full((), 0xFF, np.uint8)
    for bit in reversed(range(len(planes))):
        if top >> bit & 1:
            equal = equal & planes[bit]
        else:
            above, equal = above | equal & planes[bit], equal & ~planes[bit]
    return bool(np.any(above))
