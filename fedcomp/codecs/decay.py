"""A broadcast with weight decay: the weights are multiplied by a factor before the step of another frame is added to them.

body   the factor, a float32 from 0 to below 1; the frame of the step
"""

import struct

from ..errors import FrameError
from . import frame
from .base import expect
from .frame import DECAY, Section

FACTOR = struct.Struct("<f")


def wrap(factor: float, step: bytes, numel: int) -> bytes:
    """Return the frame that multiplies weights [numel] by `factor` before it adds `step`; `step` itself for a factor of 1."""
    if factor == 1:
        return step
    body = FACTOR.pack(factor) + step
    return frame.seal(DECAY, frame.MODEL, numel, [Section(numel, body)])


def unwrap(data: bytes, numel: int) -> tuple[float, bytes]:
    """Return the factor of a broadcast, 1 unless it decays weights, and the frame of its step. Raises FrameError."""
    if data[:4] != bytes([*frame.MAGIC, frame.VERSION, DECAY]):
        return 1.0, data
    _, ((_, (count, body)),) = frame.unseal(data, DECAY, numel)
    expect(count == numel, f"a decay of {count} weights was sent for a model of {numel}")
    if len(body) < FACTOR.size:
        raise FrameError("a decay frame ends before its factor")
    (factor,) = FACTOR.unpack_from(body)
    expect(0 <= factor < 1, f"a decay frame has the factor {factor:g}; expected 0 to below 1")
    return factor, bytes(body[FACTOR.size :])
