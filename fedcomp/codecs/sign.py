"""signSGD: one sign bit per coordinate.

Bernstein et al., "signSGD: compressed optimisation for non-convex problems", ICML 2018.

Every coordinate is decoded as its sign, 1 or −1. The sign of a zero is a random bit that depends on the seed and the coordinate. If every
client has its own seed, the random signs of many clients cancel in a majority vote. The codec is neither contractive nor unbiased.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import kernels
from ..kernels import Rows
from ..layout import Layout
from .base import Codec, Context
from .frame import Section
from .update import Bits, Update

ONE = np.ones(1, np.float32)


@dataclass(frozen=True)
class Sign(Codec):
    """A codec that sends every coordinate as 1 or −1, in one bit."""

    name = "sign"
    id = 9
    source = "Bernstein et al. 2018"
    whole = True
    body_size = 0, 1

    def _encode_rows(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[Section]:
        numel = rows[0].numel()
        return [Section(numel, data) for data in kernels.bits.signs_rows(rows, seeds)]

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        return Bits(layout.numel, kernels.bits.read_bits(section.body, layout.numel), ONE, -ONE)
