"""Natural compression: rounding to powers of two.

Horváth, Ho, Horváth, Sahu, Canini, Richtárik: Natural compression for distributed deep learning. 2019 (arXiv:1905.10988).

    C(x)_i = sign(x_i)·2^a or sign(x_i)·2^(a+1) with 2^a ≤ |x_i| < 2^(a+1), so that the mean is x_i

E C(x) = x and E‖x − C(x)‖² ≤ ‖x‖²/8 (theorem 1), and so ‖x − C(x)‖² ≤ (1 − 7/8)‖x‖² in the mean.

Unlike the paper, denormals have powers of their own, and a code counts from 2^(−149), or from 2^(−126 − h) where the largest |x_i| is above
2^104: what is smaller than that turns to it or to 0. The largest float32 stands for 2^128.

    body    one byte, h: by how many powers of two x could be multiplied, at most 23
            signs (one bit each, 1 = negative, padded to a byte)
            codes c of 2^(c − 127 − h), 0 = zero: codecs/levels.py, at most a byte each
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from ..kernels import rounding
from ..layout import Layout
from . import levels as wire
from .base import Codec, Context, expect
from .frame import Section, varint
from .update import Dense, Update

CODES = 256


@dataclass(frozen=True)
class Natural(Codec):
    """Every coordinate as a sign and an exponent: at most nine bits."""

    name: ClassVar[str] = "natural"
    id: ClassVar[int] = 15
    source: ClassVar[str] = "Horváth et al. 2019"
    whole: ClassVar[bool] = True

    def contraction(self, numel: int) -> float:
        return 7 / 8

    def variance(self, numel: int) -> float:
        return 1 / 8

    def longest_section(self, numel: int) -> int:
        return len(varint(numel)) + 1 + (numel + 7) // 8 + numel

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        x = x.detach()
        shift = rounding.shift_of(rounding.largest(x))
        codes = rounding.to_powers(x, shift, seed)
        signs = rounding.pack_negative(x, codes).tobytes()
        return Section(x.numel(), bytes([shift]) + signs + wire.pack(codes, CODES))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        numel, data = layout.numel, memoryview(section.body)
        end = 1 + (numel + 7) // 8
        expect(
            len(data) >= end and data[0] <= rounding.WIDEST_SHIFT,
            "powers of two are cut short, or of another range",
        )
        signs = np.frombuffer(data[1:end], np.uint8)
        expect(
            not numel % 8 or not signs[-1] & (1 << -numel % 8) - 1,
            "the last bits of the signs are not zero",
        )
        codes = wire.unpack(data[end:], numel, CODES)
        expect(
            data[0] == rounding.WIDEST_SHIFT or int(codes.max()) >= CODES - 2,
            "powers of two are of another range",
        )
        values = rounding.from_powers(codes, signs, data[0])
        expect(values is not None, "a zero has a sign")
        return Dense(values)
