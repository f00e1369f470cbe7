"""The largest coordinate alone: what is sent of a vector of which the mean magnitude lies below the normal numbers of float32.

A mean that float32 cannot hold to 24 bits may be all but lost, and with it the contraction of a codec that sends means. Top-1 contracts by
1/n whatever the vector. Such a section counts one coordinate of many, which no other section of these codecs does.

    body   position, LEB128 in its shortest form; value as float32, not zero
"""

import math
import struct

import numpy as np
from torch import Tensor

from .. import kernels
from .base import expect
from .frame import EMPTY, Section, read_varint, varint
from .update import Sparse

NORMAL = np.finfo(np.float32).tiny  # the least that float32 holds to 24 bits
VALUE = struct.Struct("<f")


def needed(mean: float | np.floating, numel: int) -> bool:
    """Return whether a vector [numel] with this mean magnitude, or this largest of several, is sent in this way."""
    return bool(mean < NORMAL) and (numel > 1 or bool(mean == 0))


def pack(x: Tensor) -> Section:
    """The section of a finite x [n]; an empty one if x is zero."""
    positions = kernels.top_k([x], 1).positions
    if not positions.numel():
        return EMPTY
    position = int(positions[0])
    return Section(1, varint(position) + VALUE.pack(x[position].item()))


def unpack(section: Section, numel: int) -> Sparse:
    """The one coordinate of a section, or none. Raises FrameError unless `pack` could have made it."""
    if section.count == 0:
        return Sparse(numel, np.empty(0, np.int64), np.empty(0, np.float32))
    position, used = read_varint(memoryview(section.body))
    expect(
        section.count == 1 and position < numel and len(section.body) == used + VALUE.size,
        "a section of one coordinate is damaged",
    )
    (value,) = VALUE.unpack_from(section.body, used)
    expect(
        math.isfinite(value) and value != 0, f"a section of one coordinate has the value {value}"
    )
    return Sparse(numel, np.array([position]), np.array([value], np.float32))


def longest(numel: int) -> int:
    """A length in bytes, count included, that no section exceeds."""
    return 1 + len(varint(numel)) + VALUE.size
