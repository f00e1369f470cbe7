"""Top-k sparsification.

Aji, Heafield: Sparse communication for distributed gradient descent. EMNLP 2017. With a residual around it this is
MEM-SGD (Stich, Cordonnier, Jaggi: Sparsified SGD with memory. NeurIPS 2018).

    C(x)_i = x_i if |x_i| is among the k largest, else 0

    values   float32 (flag 0) or codecs/half.py (flag 1); around them codecs/selection.py
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from .. import kernels
from . import half, selection
from .base import Context, expect
from .frame import CodecId

FP32, FP16 = 0, 1  # flags


@dataclass(frozen=True)
class TopK(selection.Largest):
    """The k largest coordinates with their values."""

    density: float = 1 / 100  # share of coordinates sent
    values: Literal["fp32", "fp16"] = "fp32"  # precision of what is sent; a memory keeps what rounding loses
    name: ClassVar[str] = "topk"
    id: ClassVar[CodecId] = CodecId.TOPK
    source: ClassVar[str] = "Aji & Heafield 2017"

    def contraction(self, numel: int) -> float:
        exact = self.count(numel) / max(numel, 1)
        return exact if self.values == "fp32" else exact * (1 - 2.0**-21)

    def value_bytes(self, count: int) -> int:
        return half.size(count) if self.values == "fp16" else 4 * count

    def pack_values(self, values: np.ndarray, seed: int, context: Context) -> tuple[int, bytes]:
        return (FP16, half.pack(values)) if self.values == "fp16" else (FP32, values.astype("<f4", copy=False).tobytes())

    def unpack_values(self, flag: int, data: memoryview, count: int, seed: int) -> tuple[np.ndarray, int]:
        expect(flag in (FP32, FP16), "a top-k section has an unknown flag")
        sent, _ = selection.take(data, half.size(count) if flag == FP16 else 4 * count)
        values = half.unpack(sent, count) if flag == FP16 else np.frombuffer(sent, "<f4")
        expect(kernels.all_finite(values), "a top-k section holds NaN or infinity")
        return values, len(sent)
