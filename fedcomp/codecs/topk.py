"""Top-k sparsification.

Aji, Heafield: Sparse communication for distributed gradient descent. EMNLP 2017. With the memory `residual` this is MEM-SGD (Stich,
Cordonnier, Jaggi: Sparsified SGD with memory. NeurIPS 2018).

    C(x)_i = x_i if |x_i| is among the k largest, else 0

    values   as in codecs/floats.py, or in codecs/bins.py (flag 2); the rest as in codecs/selection.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from .. import kernels
from . import bins, floats, selection
from .base import Context, expect

BINS = 2  # flag


@dataclass(frozen=True)
class TopK(selection.Largest):
    """The k largest coordinates with their values."""

    density: float = 1 / 100  # fraction of the coordinates sent
    # Precision of the values; 2bit: the mean of one of four bins.
    values: Literal["fp32", "fp16", "2bit"] = "fp32"
    name: ClassVar[str] = "topk"
    id: ClassVar[int] = 3
    source: ClassVar[str] = "Aji & Heafield 2017"

    def contraction(self, numel: int) -> float:
        if self.values == "2bit":
            return 0.0  # the mean of two values v and −v in one bin is 0
        exact = self.count(numel) / max(numel, 1)
        return exact if self.values == "fp32" else exact * (1 - floats.FP16_ERROR)

    def value_bytes(self, count: int) -> int:
        if self.values == "2bit":
            return bins.max_bytes(count)
        return floats.size(count, floats.flag(self.values))

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        if self.values == "2bit":
            runs = kernels.split_runs(values, counts)
            return [
                (BINS, bins.pack(run, np.array([run.size])) if run.size else b"") for run in runs
            ]
        return floats.pack_runs(values, counts, self.values)

    def unpack_values(
        self, flag: int, data: memoryview, count: int, seed: int
    ) -> tuple[np.ndarray, int]:
        expect(flag in (floats.FP32, floats.FP16, BINS), "a top-k section has an unknown flag")
        if flag == BINS:
            return bins.unpack(data, np.array([count]))
        return floats.unpack(data, count, flag)

    def pack_chunks(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> tuple[int, bytes]:
        if self.values == "2bit":
            return BINS, bins.pack(values, counts)
        return super().pack_chunks(values, counts, seeds, context)

    def unpack_chunks(
        self, flag: int, data: memoryview, counts: np.ndarray, seeds: Sequence[int]
    ) -> np.ndarray:
        if flag != BINS:
            return super().unpack_chunks(flag, data, counts, seeds)
        values, used = bins.unpack(data, counts)
        expect(used == len(data), "bytes follow the values of the last chunk")
        return values
