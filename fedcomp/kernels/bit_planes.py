"""Small integers as bit planes: first the lowest bit of each, eight to a byte, the first the most significant; then the next.

Their number is a multiple of 8, so no plane has padding.
"""

import numpy as np

from ..errors import FrameError
from .parallel import map_ranges

PIECE = 1 << 17  # integers whose bits are gathered at a time


def pack(codes: np.ndarray, width: int) -> bytes:
    """The planes of integers [N], uint8, below 2^width."""
    planes = np.empty((width, codes.size // 8), np.uint8)

    def work(start: int, stop: int) -> None:
        for first in range(start, stop, PIECE):
            held = codes[first : min(first + PIECE, stop)]
            for bit in range(width):
                planes[bit, first // 8 :][: held.size // 8] = np.packbits(held >> bit & 1)

    map_ranges(codes.size, work)
    return planes.tobytes()


def unpack(data: memoryview, count: int, size: int) -> np.ndarray:
    """The planes [width, count/8] of integers below `size`, a view of `data`. Raises FrameError unless `pack` could have made them."""
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
    """table[code] for integers start..stop-1, both multiples of 8; a float32 table of 2^width."""
    bits = np.unpackbits(planes[:, start // 8 : stop // 8], axis=1)
    codes = bits[0]
    for place, plane in enumerate(bits[1:], 1):
        codes |= plane << place
    return table[codes]


def _any_above(planes: np.ndarray, top: int) -> bool:
    """Return whether an integer is above `top`: compared bit by bit from the highest, eight integers at a time."""
    above, equal = np.zeros((), np.uint8), np.full((), 0xFF, np.uint8)
    for bit in reversed(range(len(planes))):
        if top >> bit & 1:
            equal = equal & planes[bit]
        else:
            above, equal = above | equal & planes[bit], equal & ~planes[bit]
    return bool(np.any(above))
