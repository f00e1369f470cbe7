"""Small integers as bit planes: the first plane has the lowest bit of every integer, the second plane the next bit, and so on.

The bits of a plane are packed into bytes, the first integer in the most significant bit. The number of integers is a multiple of 8, so
planes need no padding.
"""

import numpy as np

from ..errors import FrameError

PIECE = 1 << 17  # number of integers that are packed or checked at a time


def pack(codes: np.ndarray, width: int) -> bytes:
    """Return the bit planes of uint8 integers [N] below 2^width, as width·N/8 bytes."""
    planes = np.empty((width, codes.size // 8), np.uint8)
    for start in range(0, codes.size, PIECE):
        piece = codes[start : start + PIECE]
        for bit in range(width):
            planes[bit, start // 8 :][: piece.size // 8] = np.packbits(piece >> bit & 1)
    return planes.tobytes()


def unpack(data: memoryview, count: int, size: int) -> np.ndarray:
    """Return the bit planes [width, count/8] of `count` integers below `size`, as a view of `data`.

    Raises FrameError if `data` has another length, or if an integer is not below `size`.
    """
    width = (size - 1).bit_length()
    if len(data) != width * count // 8:
        raise FrameError(
            f"damaged frame: the quantized values have {len(data)} bytes; expected {count} integers of {width} bits"
        )
    planes = np.frombuffer(data, np.uint8).reshape(width, -1)
    if size < 1 << width:
        itself = np.arange(1 << width, dtype=np.uint8)
        for start in range(0, count, PIECE):
            if read(planes, start, min(start + PIECE, count), itself).max() >= size:
                raise FrameError(f"damaged frame: a quantized value is not below {size}")
    return planes


def read(planes: np.ndarray, start: int, stop: int, table: np.ndarray) -> np.ndarray:
    """Return table[c] [stop - start] for the integers c with the indices start..stop-1.

    `planes`: as returned by `unpack`. `table`: [2^width]. `start` and `stop` are multiples of 8.
    """
    bits = np.unpackbits(planes[:, start // 8 : stop // 8], axis=1)
    codes = bits[0]
    for bit, plane in enumerate(bits[1:], 1):
        codes |= plane << bit
    return table[codes]
