"""Ternary gradients.

Wen, Xu, Yan, Wu, Wang, Chen, Li: TernGrad: ternary gradients to reduce communication in distributed deep learning. NeurIPS 2017.

    C(x)_i = s·sign(x_i)·b_i,  P(b_i = 1) = |x_i|/s;  s = max |x_i|, after x was clipped to ±2.5σ

Unbiased but for the clipping; layer by layer with @layer. A scale that the server announces, `scale` of the context, one float32 for each
section, takes the place of s, and what is larger is clipped to it. Frames of one s add: their sum holds integers −m…m.

Unlike the paper, σ is taken about zero: σ = ‖x‖₂/√n, so that what lies far from zero and close together is not clipped away. The wire is
that of codecs/levels.py, with s as the unit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from .. import kernels
from ..errors import ProtocolError, SpecError
from ..kernels import rounding
from ..layout import Layout
from . import levels as wire
from .base import Codec, Context, expect
from .frame import Section
from .update import Update

SCALE = np.dtype("<f4")  # of what is announced


@dataclass(frozen=True)
class TernGrad(Codec):
    """Every coordinate as −s, 0 or s."""

    clip: float = 2.5  # values are clipped to so many standard deviations; 0 = not at all
    name: ClassVar[str] = "terngrad"
    id: ClassVar[int] = 14
    source: ClassVar[str] = "Wen et al. 2017"
    linear: ClassVar[bool] = True  # frames of one scale
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.clip < 0:
            raise SpecError(
                f"clip is {self.clip:g}; give standard deviations, such as 2.5, or 0 for none"
            )

    def variance(self, numel: int) -> float | None:
        # Σ|x_i|(s − |x_i|), ‖x‖∞‖x‖₁ ≤ (1 + √n)/2·‖x‖²
        return (math.sqrt(numel) - 1) / 2 if numel and not self.clip else None

    def longest_section(self, numel: int) -> int:
        return wire.longest_multiples(numel, 1)

    def scale(self, x: Tensor) -> float:
        """s of x, a float32: what a client reports where the server is to announce one for all."""
        largest = rounding.largest(x)
        if not self.clip or not largest:
            return largest
        return min(largest, wire.below(self.clip * kernels.norm2(x) / math.sqrt(x.numel())))

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        own = self.scale(x)
        scale = _announced(context, own)
        if not own or not scale:
            return wire.pack_multiples(np.zeros(x.numel(), np.int8), 0.0)
        return wire.pack_multiples(rounding.to_multiples(x, scale, min(own, scale), seed), scale)

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        return wire.open_multiples(section)

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        sizes, total, scales = {section.count for section in sections}, None, set()
        expect(len(sizes) == 1, "frames of different sizes cannot be merged")
        for section in sections if sections[0].count else ():
            symbols, most, scale = wire.unpack_multiples(section)
            if most:
                total = np.zeros(section.count, np.int32) if total is None else total
                total += symbols
                total -= most
                scales.add(scale)
        expect(
            len(scales) <= 1,
            "frames of different scales cannot be merged; let the server announce one",
        )
        if total is None:
            return sections[0]
        most = int(np.abs(total).max())
        expect(
            most <= wire.MOST and most * scale <= wire.LARGEST,
            "the sum of the frames is not finite",
        )
        return wire.pack_multiples(total.astype(np.int16), scales.pop())


def _announced(context: Context, own: float) -> float:
    """The scale that the server announced for this section, or else the client's own. Raises ProtocolError for what is no scale."""
    if "scale" not in context.announced:
        return own
    data, at = context.announced["scale"], context.section
    if len(data) % SCALE.itemsize or len(data) <= at * SCALE.itemsize:
        raise ProtocolError(
            f"the announced scale has {len(data)} bytes, which hold no float32 for section {at}"
        )
    scale = float(np.frombuffer(data, SCALE)[at])
    if not 0 <= scale < math.inf:
        raise ProtocolError(f"the announced scale of section {at} is {scale}")
    return scale
