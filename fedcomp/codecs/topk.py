"""Top-k sparsification.

Aji, Heafield: Sparse communication for distributed gradient descent. EMNLP 2017. With a residual around it this is MEM-SGD (Stich, Cordonnier,
Jaggi: Sparsified SGD with memory. NeurIPS 2018).

    C(x)_i = x_i if |x_i| is among the k largest, else 0

    body   first byte (codecs/selection.py; 0x40 = values in float16), values, gaps
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from . import half, selection
from .base import expect
from .frame import CodecId, Section

FP16 = 0x40


@dataclass(frozen=True)
class TopK(selection.Selective):
    """The k largest coordinates with their values."""

    density: float = 1 / 100  # share of coordinates sent
    values: Literal["fp32", "fp16"] = "fp32"  # precision of what is sent; a memory keeps what rounding loses
    name: ClassVar[str] = "topk"
    id: ClassVar[CodecId] = CodecId.TOPK
    source: ClassVar[str] = "Aji & Heafield 2017"

    def contraction(self, numel: int) -> float:
        exact = self.count(numel) / max(numel, 1)
        return exact if self.values == "fp32" else exact * (1 - 2.0**-21)

    def section(self, positions: np.ndarray, values: np.ndarray, numel: int) -> Section:
        flag, sent = (FP16, half.pack(values)) if self.values == "fp16" else (0, values.astype("<f4", copy=False).tobytes())
        first, gaps = selection.pack_positions(positions, numel, flag)
        return Section(positions.size, first + sent + gaps)

    def read(self, count: int, body: memoryview, numel: int) -> tuple[np.ndarray, np.ndarray]:
        first, rest = selection.split(body, 1)
        expect(first[0] < 0x80, "a top-k section has an unknown flag")
        sent, gaps = selection.split(rest, 2 + 2 * count if first[0] & FP16 else 4 * count)
        values = half.unpack(sent, count) if first[0] & FP16 else np.frombuffer(sent, "<f4")
        expect(bool(np.isfinite(values).all()), "a top-k section holds NaN or infinity")
        return selection.unpack_positions(first[0], gaps, count, numel), values
