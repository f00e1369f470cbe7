"""TernGrad: ternary gradients.

Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NeurIPS 2017.

Coordinates are clipped to ±2.5 standard deviations (option `clip`). Let the scale s be the largest magnitude after clipping. A coordinate
x_i is then decoded as s·sign(x_i) with probability |x_i|/s, and otherwise as 0. The codec is unbiased apart from the clipping. The paper
uses one scale per layer; the scope @layer gives one scale per tensor.

Frames with the same scale can be added: the sum of m frames consists of integers from −m to m, times the scale. Normally, each client has
its own scale. The strategy `shared-scale` announces common scales under the name `scale`: one scale for the model, or one for each tensor
or chunk. Clients then use the announced scales instead of their own, and clip larger values to them.

In the paper, the standard deviation is measured around the mean. Here, it is the root mean square ‖x‖₂/√n, so that nearly equal values far
from zero are not clipped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .. import kernels, spec
from ..errors import ProtocolError
from ..kernels import rounding
from ..layout import Layout
from .base import Codec, Context, require
from .frame import Section
from .levels import (
    LARGEST,
    MAX_MULTIPLE,
    max_multiples_bytes,
    open_multiples,
    pack_multiples,
    round_down,
    unpack_multiples,
)
from .update import Update

SCALE = np.dtype("<f4")  # format of an announced scale


@dataclass(frozen=True)
class TernGrad(Codec):
    """A codec that sends every coordinate as −s, 0 or s, where s is one scale for all coordinates."""

    clip: float = 2.5  # Clip values to this many standard deviations; 0 disables clipping
    name = "terngrad"
    id = 14
    source = "Wen et al. 2017"
    linear = True  # Frames can only be added if they have the same scale
    whole = True

    def __post_init__(self) -> None:
        spec.check_ranges(self, clip=(0, math.inf))

    def variance(self, numel: int) -> float | None:
        return (math.sqrt(numel) - 1) / 2 if numel and not self.clip else None

    def longest_section(self, numel: int) -> int:
        return max_multiples_bytes(numel, 1)

    def scale(self, x: Tensor) -> float:
        """Return the scale s of x, a float32 number. The strategy `shared-scale` sends it to the server."""
        largest = rounding.largest(x)
        if not self.clip or not largest:
            return largest
        return min(largest, round_down(self.clip * kernels.norm2(x) / math.sqrt(x.numel())))

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        own = self.scale(x)
        scale = _announced(context, own)
        if not own or not scale:
            return pack_multiples(np.zeros(x.numel(), np.int8), 0.0)
        return pack_multiples(rounding.to_multiples(x, scale, min(own, scale), seed), scale)

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        return open_multiples(section)

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        count, scales = sections[0].count, set()
        sizes = {section.count for section in sections}
        require(len(sizes) == 1, "frames of vectors of different sizes cannot be merged")
        total = np.zeros(count, np.int32)
        for section in sections if count else ():
            symbols, top, scale = unpack_multiples(section)
            if top:
                total += symbols
                total -= top
                scales.add(scale)
        if not scales:
            return sections[0]
        problem = "frames of different scales cannot be merged; use --strategy shared-scale"
        require(len(scales) == 1, problem)
        (scale,) = scales
        top = int(np.abs(total).max())
        is_finite = top <= MAX_MULTIPLE and top * scale <= LARGEST
        require(
            is_finite,
            f"the sum of the frames exceeds the range of float32, or {MAX_MULTIPLE} times their scale",
        )
        return pack_multiples(total.astype(np.int16), scale)


def _announced(context: Context, own: float) -> float:
    """Return the scale that the server announced for the encoded tensor or chunk, or else `own`. Raises ProtocolError if it is invalid."""
    if "scale" not in context.announced:
        return own
    data, at = context.announced["scale"], context.section
    if len(data) % SCALE.itemsize or len(data) <= at * SCALE.itemsize:
        raise ProtocolError(
            f"the scales that the server announced ({len(data)} bytes, 4 per scale) do not include a scale for tensor or chunk {at}; "
            "server and client need the same model"
        )
    scale = float(np.frombuffer(data, SCALE)[at])
    if not 0 <= scale < math.inf:
        raise ProtocolError(
            f"the scale that the server announced for tensor or chunk {at} is {scale}; a scale must be finite and at least 0"
        )
    return scale
