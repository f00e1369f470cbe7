"""Natural compression: rounding to powers of two.

Horváth et al., "Natural compression for distributed deep learning", 2019 (arXiv:1905.10988).

A magnitude |x_i| between 2^a and 2^(a+1) is rounded at random to one of these two powers, so that the expected value of the decoded
coordinate is x_i. The codec is unbiased, with the variance bound ω = 1/8 (theorem 1) and the contraction factor δ = 7/8.

Unlike in the paper, subnormal numbers are also rounded to powers of two. For this purpose, all values are first multiplied by 2^h, and the
frame contains h. The exponent h is the largest integer of at most 23 for which all products x_i·2^h are in the range of float32. The
products are rounded to powers from 2^(−126) to 2^128, or to 0. The decoder divides them by 2^h. The smallest decoded power is therefore
2^(−126 − h), for example 2^(−149) if all magnitudes are at most 2^104. The result 2^128, which float32 cannot represent, is decoded as the
largest float32.
"""

from dataclasses import dataclass

from torch import Tensor

from .. import kernels
from ..kernels import rounding
from ..layout import Layout
from . import levels
from .base import Codec, Context, expect
from .frame import Section
from .update import Dense, Update

CODES = 256


@dataclass(frozen=True)
class Natural(Codec):
    """A codec that sends every coordinate as a sign and an exponent, in at most nine bits."""

    name = "natural"
    id = 15
    source = "Horváth et al. 2019"
    whole = True
    delta, omega = 7 / 8, 1 / 8
    body_size = 1, 9

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        x = x.detach()
        shift = rounding.max_shift(rounding.largest(x))
        codes = rounding.to_powers(x, shift, seed)
        signs = kernels.pack_signs((x < 0).cpu().numpy() & (codes != 0))
        return Section(x.numel(), bytes([shift]) + signs + levels.pack(codes, CODES))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        numel, data = layout.numel, memoryview(section.body)
        end = 1 + (numel + 7) // 8
        valid = len(data) >= end and data[0] <= rounding.MAX_SHIFT
        expect(valid, "the list of powers of two ends too early, or has an invalid exponent shift")
        signs = kernels.bits.read_bits(data[1:end], numel)
        codes = levels.unpack(data[end:], numel, CODES)
        in_range = data[0] == rounding.MAX_SHIFT or int(codes.max()) >= CODES - 2
        expect(in_range, "the powers of two have an invalid exponent shift")
        return Dense(rounding.from_powers(codes, signs, data[0]))
