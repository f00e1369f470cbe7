"""Top-k sparsification.

Aji, Heafield: Sparse communication for distributed gradient descent. EMNLP 2017. With a residual around it this is
MEM-SGD (Stich, Cordonnier, Jaggi: Sparsified SGD with memory. NeurIPS 2018).

    C(x)_i = x_i if |x_i| is among the k largest, else 0

    values   codecs/floats.py; around them codecs/selection.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from . import floats, selection
from .base import Context, expect


@dataclass(frozen=True)
class TopK(selection.Largest):
    """The k largest coordinates with their values."""

    density: float = 1 / 100  # share of coordinates sent
    values: floats.Precision = (
        "fp32"  # precision of what is sent; a memory keeps what rounding loses
    )
    name: ClassVar[str] = "topk"
    id: ClassVar[int] = 3
    source: ClassVar[str] = "Aji & Heafield 2017"

    def contraction(self, numel: int) -> float:
        exact = self.count(numel) / max(numel, 1)
        return exact if self.values == "fp32" else exact * (1 - floats.ROUNDED)

    def value_bytes(self, count: int) -> int:
        return floats.size(count, floats.flag(self.values))

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        return floats.pack_runs(values, counts, self.values)

    def unpack_values(
        self, flag: int, data: memoryview, count: int, seed: int
    ) -> tuple[np.ndarray, int]:
        expect(flag in (floats.FP32, floats.FP16), "a top-k section has an unknown flag")
        return floats.unpack(data, count, flag)
