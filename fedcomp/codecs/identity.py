"""Dense codecs: float32, float16 and bfloat16. The codec `identity` is the uncompressed baseline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..kernels import rounding
from ..layout import Layout
from . import floats
from .base import Codec, Context, expect
from .frame import Section, varint
from .update import Dense, Update


def _bytes_of(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")


@dataclass(frozen=True)
class Identity(Codec):
    """A codec that sends every coordinate as float32, without loss."""

    name: ClassVar[str] = "identity"
    id: ClassVar[int] = 1
    linear: ClassVar[bool] = True
    lossless: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    def contraction(self, numel: int) -> float:
        return 1.0

    def longest_section(self, numel: int) -> int:
        return len(varint(numel)) + 4 * numel

    def variance(self, numel: int) -> float:
        return 0.0

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        values = x.to(torch.float32).cpu().numpy().astype("<f4", copy=False)
        return Section(values.size, _bytes_of(values))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        expect(len(section.body) == 4 * layout.numel, "the float32 values have the wrong length")
        values = np.frombuffer(section.body, "<f4")
        expect(kernels.all_finite(values), "a value is NaN or infinity")
        return Dense(values)

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        fits = all(len(s.body) == 4 * s.count == 4 * sections[0].count for s in sections)
        expect(fits, "the float32 values have the wrong length")
        total = floats.add([np.frombuffer(s.body, "<f4") for s in sections])
        return Section(total.size, _bytes_of(total.astype("<f4", copy=False)))


@dataclass(frozen=True)
class Half(Codec):
    """A codec that sends every coordinate as float16, scaled by a common power of two."""

    name: ClassVar[str] = "fp16"
    id: ClassVar[int] = 2
    whole: ClassVar[bool] = True

    def contraction(self, numel: int) -> float:
        return 1 - 2.0**-21

    def longest_section(self, numel: int) -> int:
        return len(varint(numel)) + floats.size(numel, floats.FP16)

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        return Section(x.numel(), floats.pack_half(x.to(torch.float32).cpu().numpy()))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        return Dense(floats.unpack_half(memoryview(section.body), layout.numel))


@dataclass(frozen=True)
class BFloat16(Codec):
    """A codec that sends every coordinate as bfloat16, rounded to nearest, ties to even.

    Values that would round to infinity become the largest finite bfloat16. The body contains a shift h (one byte) and the bfloat16 values
    of x·2^h. The shift is the largest h ≤ 23 for which x·2^h is in the range of float32, so no subnormal becomes zero.
    """

    name: ClassVar[str] = "bf16"
    id: ClassVar[int] = 6
    whole: ClassVar[bool] = True

    def contraction(self, numel: int) -> float:
        return 1 - 2.0**-16

    def longest_section(self, numel: int) -> int:
        return len(varint(numel)) + 1 + 2 * numel

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        shift = rounding.max_shift(rounding.largest(x))
        bits = floats.upper_halves(x.cpu().to(torch.float32) * 2.0**shift)
        return Section(x.numel(), bytes([shift]) + bits.tobytes())

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        count, data = layout.numel, section.body
        expect(len(data) == 1 + 2 * count, "the bfloat16 values have the wrong length")
        bits = np.frombuffer(data, "<u2", offset=1)
        top = int((bits & 0x7FFF).max()) >> 7  # the largest exponent
        expect(top < 255, "a value is NaN or infinity")
        in_range = data[0] == rounding.MAX_SHIFT or data[0] < rounding.MAX_SHIFT and top == 254
        expect(in_range, "the bfloat16 values have an invalid exponent shift")
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        values *= np.float32(2.0 ** -data[0])
        return Dense(values)
