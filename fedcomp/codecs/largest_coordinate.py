"""The encoding of only the largest coordinate, for vectors whose mean magnitude is a subnormal float32.

A subnormal float32 has fewer than 24 bits of precision. If a codec sent a subnormal mean, the rounding error of the mean could be so large
that the codec would not be contractive. The codecs `efsign` and `onebit`, which send means, therefore send only the largest coordinate of
such a vector. This gives the contraction factor δ = 1/n for every vector of n coordinates. A section that contains only the largest
coordinate has the coordinate count 1 instead of n.
"""

import math
import struct

import numpy as np
from torch import Tensor

from .. import kernels
from .base import expect
from .frame import EMPTY, Section, read_varint, varint
from .update import Sparse

MIN_NORMAL = np.finfo(np.float32).tiny  # the smallest normal float32
VALUE = struct.Struct("<f")


def is_needed(mean: float | np.floating, numel: int) -> bool:
    """Return whether only the largest coordinate of a vector [numel] should be sent.

    `mean`: the mean magnitude of the vector, or the largest mean magnitude of its parts. For numel = 1, the mean is the magnitude of the
    only coordinate. It is exact even if it is subnormal, so a codec can send it.
    """
    return bool(mean < MIN_NORMAL and (numel > 1 or mean == 0))


def pack(x: Tensor) -> Section:
    """Return a section with the largest coordinate of a finite x [n], or an empty section if x is zero."""
    positions = kernels.top_k([x], 1).positions
    if not positions.numel():
        return EMPTY
    position = int(positions[0])
    return Section(1, varint(position) + VALUE.pack(x[position].item()))


def unpack(section: Section, numel: int) -> Sparse:
    """Decode the result of `pack` into an update. Raises FrameError for a section that `pack` does not return."""
    if section.count == 0:
        return Sparse.zero(numel)
    position, used = read_varint(memoryview(section.body))
    fits = section.count == 1 and position < numel and len(section.body) == used + VALUE.size
    expect(fits, "the only encoded coordinate is incomplete or out of range")
    (value,) = VALUE.unpack_from(section.body, used)
    valid = math.isfinite(value) and value != 0
    expect(valid, f"the only encoded coordinate has the invalid value {value}")
    return Sparse(numel, np.array([position]), np.array([value], np.float32))


def max_bytes(numel: int) -> int:
    """Return the largest size in bytes of a section with one coordinate, including its coordinate count."""
    return 1 + len(varint(numel)) + VALUE.size
