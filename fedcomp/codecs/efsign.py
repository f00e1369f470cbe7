"""EF-signSGD sends the sign of every coordinate, and one scale for all coordinates.

Karimireddy, Rebjock, Stich and Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019, algorithm 1.

A vector x of n coordinates is decoded as C(x), with the following squared error:

    C(x) = ‖x‖₁/n · sign(x);
    ‖x − C(x)‖² = (1 − ‖x‖₁²/(n‖x‖₂²))·‖x‖₂².

The contraction factor δ is therefore at least 1/n, and exactly 1/n if only one coordinate is nonzero. In the paper, sign(0) = 0. Here,
sign(0) = 1, because a sign is one bit. If the scale ‖x‖₁/n is a subnormal float32 or is rounded to zero, only the largest coordinate is
sent (codecs/largest_coordinate.py). If x is zero, nothing is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import kernels
from ..kernels import Rows
from ..layout import Layout
from . import frame, largest_coordinate
from .base import Codec, Context
from .frame import Section
from .selection import MEAN, take, unpack_magnitude
from .update import Bits, Update


@dataclass(frozen=True)
class EFSign(Codec):
    """A codec that sends one bit per coordinate, its sign, and decodes every coordinate as plus or minus the mean magnitude."""

    name = "efsign"
    id = 10
    source = "Karimireddy et al. 2019"

    def contraction(self, numel: int) -> float:
        # The scale is rounded to float32 with a relative error of at most 2⁻²⁴. This multiplies δ = 1/n by at least 1 − 2⁻⁴⁰.
        return (1 - 2.0**-40) / max(numel, 1)

    def longest_section(self, numel: int) -> int:
        return max(
            len(frame.varint(numel)) + MEAN.size + (numel + 7) // 8,
            largest_coordinate.max_bytes(numel),
        )

    def _encode_rows(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[Section]:
        numel, stack = rows[0].numel(), kernels.stacked(rows)
        scales = (kernels.norm1_rows(stack) / max(numel, 1)).astype(np.float32)
        return [
            largest_coordinate.pack(row)
            if largest_coordinate.is_needed(scale, numel)
            else Section(numel, MEAN.pack(scale) + signs)
            for row, scale, signs in zip(rows, scales, kernels.bits.signs_rows(stack), strict=True)
        ]

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        numel = layout.numel
        if section.count < max(numel, 1):
            return largest_coordinate.unpack(section, numel)
        packed, signs = take(memoryview(section.body), MEAN.size)
        high = np.array([unpack_magnitude(packed)], np.float32)
        return Bits(numel, kernels.bits.read_bits(signs, numel), high, -high)
