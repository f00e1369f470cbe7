"""Codecs that send every coordinate as float32 (`identity`), float16 (`fp16`) or bfloat16 (`bf16`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels import rounding
from ..layout import Layout
from . import floats
from .base import Codec, Context, expect
from .frame import Section
from .update import Dense, Update


@dataclass(frozen=True)
class Identity(Codec):
    """A codec that sends every coordinate as float32, without loss."""

    name = "identity"
    id = 1
    linear = True
    lossless = True
    whole = True
    delta, omega = 1.0, 0.0
    body_size = 0, 32

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        values = np.ascontiguousarray(x.to(torch.float32).cpu().numpy(), floats.FLOAT)
        return Section(values.size, values.data.cast("B"))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        return Dense(floats.unpack_all(section.body, layout.numel, floats.FP32))

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        count = sections[0].count
        total = floats.add([floats.unpack_all(s.body, count, floats.FP32) for s in sections])
        return Section(count, floats.pack(total, floats.FP32))


@dataclass(frozen=True)
class Half(Codec):
    """A codec that sends every coordinate as float16, scaled by a common power of two."""

    name = "fp16"
    id = 2
    whole = True
    delta = 1 - floats.FP16_ERROR
    body_size = 2, 16

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        return Section(x.numel(), floats.pack(x.to(torch.float32).cpu().numpy(), floats.FP16))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        return Dense(floats.unpack_all(section.body, layout.numel, floats.FP16))


@dataclass(frozen=True)
class BFloat16(Codec):
    """A codec that sends every coordinate as bfloat16, rounded to nearest, ties to even.

    Values that would round to infinity become the largest finite bfloat16. Before rounding, the values are multiplied by 2^h, so that small
    values do not become zero. The frame contains h, the largest integer of at most 23 for which all products are in the range of float32.
    """

    name = "bf16"
    id = 6
    whole = True
    delta = 1 - 2.0**-16
    body_size = 1, 16

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        shift = rounding.max_shift(rounding.largest(x))
        bits = floats.to_bfloat16(x.cpu().to(torch.float32) * 2.0**shift)
        return Section(x.numel(), bytes([shift]) + bits.tobytes())

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        count, data = layout.numel, section.body
        expect(len(data) == 1 + 2 * count, "the bfloat16 values have the wrong length")
        bits = np.frombuffer(data, "<u2", offset=1)
        top = int((bits & 0x7FFF).max()) >> 7  # the largest exponent
        expect(top < 255, "a value is NaN or infinity")
        in_range = data[0] == rounding.MAX_SHIFT or data[0] < rounding.MAX_SHIFT and top == 254
        expect(in_range, "the bfloat16 values have an invalid exponent shift")
        values = floats.from_bfloat16(bits)
        values *= np.float32(2.0 ** -data[0])
        return Dense(values)
