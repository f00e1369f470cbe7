"""EF-signSGD sends the sign of every coordinate, and one scale for all coordinates.

Karimireddy, Rebjock, Stich and Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019, algorithm 1.

The decoded vector and its squared error are, for a vector x of n coordinates:

    C(x) = ‖x‖₁/n · sign(x);
    ‖x − C(x)‖² = (1 − ‖x‖₁²/(n‖x‖₂²))·‖x‖₂².

The contraction factor δ is therefore at least 1/n, and exactly 1/n if only one coordinate is nonzero. In the paper, sign(0) = 0. Here a
sign is one bit, so sign(0) = 1; the equation for the squared error still holds. The frame of a zero vector has an empty section. If the
scale is a subnormal float32, only the largest coordinate is sent (codecs/spike.py).

Format of the body (see codecs/frame.py):

    the scale ‖x‖₁/n, as float32;
    the signs, one bit each (0 = negative), padded to a byte.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import kernels
from ..kernels import Rows
from ..layout import Layout
from . import frame, spike
from .base import Codec, Context, expect
from .frame import Section
from .selection import take
from .update import Bits, Update

SCALE = struct.Struct("<f")


@dataclass(frozen=True)
class EFSign(Codec):
    """A codec that sends one bit per coordinate, its sign, and decodes every coordinate as plus or minus the mean magnitude."""

    name: ClassVar[str] = "efsign"
    id: ClassVar[int] = 10
    source: ClassVar[str] = "Karimireddy et al. 2019"

    def contraction(self, numel: int) -> float:
        # Rounding the scale to float32 has a relative error of at most 2⁻²⁴.
        return (1 - 2.0**-40) / max(numel, 1)

    def longest_section(self, numel: int) -> int:
        return max(len(frame.varint(numel)) + SCALE.size + (numel + 7) // 8, spike.max_bytes(numel))

    def _encode_rows(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[Section]:
        numel, stack = rows[0].numel(), kernels.stacked(rows)
        scales = _scales(kernels.norm1_rows(stack), numel)
        return [
            spike.pack(row)
            if spike.is_needed(scale, numel)
            else Section(numel, SCALE.pack(scale) + signs)
            for row, scale, signs in zip(rows, scales, kernels.bits.signs_rows(stack), strict=True)
        ]

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        numel = layout.numel
        if section.count < max(numel, 1):
            update = spike.unpack(section, numel)
            (scale,) = _scales(abs(update.values).sum(dtype=np.float64, keepdims=True), numel)
            is_needed = spike.is_needed(scale, numel)
            expect(is_needed, "only the largest coordinate is encoded; expected all signs")
            return update
        packed, signs = take(memoryview(section.body), SCALE.size)
        (mean,) = SCALE.unpack(packed)
        valid = 0 < mean < math.inf and not spike.is_needed(mean, numel)
        expect(valid, f"the scale of the signs is {mean}, which is out of range")
        high = np.array([mean], np.float32)
        return Bits(numel, kernels.bits.read_bits(signs, numel), high, -high)


def _scales(norms: np.ndarray, numel: int) -> np.ndarray:
    """Return the mean magnitude of each vector, as float32, given the L1 norms of the vectors."""
    return (norms / max(numel, 1)).astype(np.float32)
