"""Small integers as bit planes."""

import numpy as np
import pytest
from cases import for_each

from fedcomp.errors import FrameError
from fedcomp.kernels import bit_planes


@pytest.mark.parametrize("size", [2, 3, 4, 10, 16, 129, 256])
def test_packed_integers_are_unpacked_from_any_position(size):
    width = (size - 1).bit_length()
    codes = np.random.default_rng(size).integers(0, size, 4000).astype(np.uint8)
    codes[:2] = 0, size - 1
    data = bit_planes.pack(codes, width)
    assert len(data) == width * 500
    table = np.arange(1 << width, dtype=np.float32) - 7
    bits = bit_planes.unpack(memoryview(data), 4000, size)
    for start, stop in [(0, 4000), (0, 8), (3992, 4000), (1024, 2056), (16, 16)]:
        read = bit_planes.read(bits, start, stop, table)
        assert read.dtype == np.float32 and np.array_equal(
            read, codes[start:stop].astype(np.float32) - 7
        )


def test_bit_planes_have_the_documented_layout():
    assert bit_planes.pack(np.array([1, 0, 2, 3, 0, 0, 0, 0], np.uint8), 2) == bytes(
        [0b10010000, 0b00110000]
    )


@for_each("length", [0, 1, 999, 1001, 2000])
def test_another_length_is_refused(length):
    with pytest.raises(FrameError, match="expected 4000 integers of 2 bits"):
        bit_planes.unpack(memoryview(bytes(length)), 4000, 4)


@for_each("size", [3, 5, 10, 11, 129, 255])
def test_every_integer_that_is_too_large_is_refused(size):
    width = (size - 1).bit_length()
    for value in range(1 << width):
        codes = np.full(16, size - 1, np.uint8)
        codes[5] = value
        data = memoryview(bit_planes.pack(codes, width))
        if value < size:
            bit_planes.unpack(data, 16, size)
        else:
            with pytest.raises(FrameError, match=f"not below {size}"):
                bit_planes.unpack(data, 16, size)
