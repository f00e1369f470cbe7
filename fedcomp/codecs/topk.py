"""Top-k sparsification: only the k coordinates with the largest magnitudes are sent.

Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017. With the memory `residual`, top-k is MEM-SGD (Stich,
Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018).

With values=2bit, the values that are sent for a chunk are divided into four bins, and each value is decoded as the mean of its bin. Without
@chunk, the whole vector is one chunk (with @layer, each tensor). Let m be the mean and σ the standard deviation of the values. A value v
belongs to the bin with the index (v − m)/(1.5σ) + 2, rounded to the nearest integer (ties to even) and clipped to 0..3. The public
implementation of SparseLoCo (Sarfi et al. 2025) uses the same quantizer, from the library hivemind. Unlike there, the means of the bins are
rounded to bfloat16.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from .. import kernels
from . import floats, levels, selection
from .base import Context, expect
from .frame import read_varint, varint
from .selection import Unpacked

BINNED = 2  # Flag of values in bins
# BINS: number of bins. WIDTH: width of a bin in standard deviations. MIDDLE: index of the bin around the mean.
BINS, WIDTH, MIDDLE = 4, 1.5, 2
MEAN = np.dtype("<u2")  # the mean of a bin, as bfloat16


@dataclass(frozen=True)
class TopK(selection.Largest):
    """A codec that sends the positions and values of the k largest coordinates."""

    density: float = 1 / 100  # Fraction of the coordinates sent
    # Precision of the values. With 2bit, values are grouped into four bins, and each value is replaced by the mean of its bin.
    values: Literal["fp32", "fp16", "2bit"] = "fp32"
    name = "topk"
    id = 3
    source = "Aji & Heafield 2017"

    def contraction(self, numel: int) -> float:
        if self.values == "2bit":
            return 0.0  # if only v and −v are sent and both are in one bin, they are decoded as their mean, 0
        exact = self.count(numel) / max(numel, 1)
        return exact if self.values == "fp32" else exact * (1 - floats.FP16_ERROR)

    def value_bytes(self, count: int) -> int:
        if self.values == "2bit":
            size = levels.packed_bytes(count, BINS)
            return len(varint(size)) + size + min(count, BINS) * MEAN.itemsize
        return floats.size(count, floats.flag(self.values))

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        if self.values == "2bit":
            runs = kernels.split_runs(values, counts)
            return [(BINNED, pack_bins(run, np.array([run.size]))) for run in runs]
        return floats.pack_runs(values, counts, self.values)

    def unpack_values(self, flag: int, data: memoryview, count: int, seed: int) -> Unpacked:
        expect(flag <= BINNED, f"the values have the unknown format {flag}")
        if flag == BINNED:
            return unpack_bins(data, np.array([count]))
        return floats.unpack(data, count, flag)

    def pack_chunks(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> tuple[int, bytes]:
        if self.values == "2bit":
            return BINNED, pack_bins(values, counts)
        return super().pack_chunks(values, counts, seeds, context)

    def unpack_chunks(
        self, flag: int, data: memoryview, counts: np.ndarray, seeds: Sequence[int]
    ) -> np.ndarray:
        if flag != BINNED:
            return super().unpack_chunks(flag, data, counts, seeds)
        values, used = unpack_bins(data, counts)
        expect(used == len(data), "bytes follow the values of the last chunk")
        return values


def pack_bins(values: np.ndarray, counts: np.ndarray) -> bytes:
    """Quantize the values of m chunks to the means of bins, and encode the result.

    `counts` [m]: the number of values of each chunk, at least 1.
    """
    chunk = np.arange(counts.size).repeat(counts)
    centered = values - kernels.means(values, counts)[chunk]  # float64
    squares = np.bincount(chunk, centered * centered, counts.size)
    width = WIDTH * np.sqrt(squares / np.maximum(counts - 1, 1))[chunk]
    wide = np.divide(centered, width, out=np.zeros_like(centered), where=width > 0)
    symbols = np.clip(np.rint(wide) + MIDDLE, 0, BINS - 1).astype(np.uint8)
    bins, n_bins = chunk * BINS + symbols, counts.size * BINS
    sizes = np.bincount(bins, minlength=n_bins)
    sums = np.bincount(bins, values, n_bins)
    means = (sums[sizes > 0] / sizes[sizes > 0]).astype(np.float32)
    code = levels.pack(symbols, BINS)
    return varint(len(code)) + code + floats.to_bfloat16(torch.from_numpy(means)).tobytes()


def unpack_bins(data: memoryview, counts: np.ndarray) -> tuple[np.ndarray, int]:
    """Decode the result of `pack_bins`. Return the values, as float32, and the number of bytes read. Raises FrameError."""
    length, start = read_varint(data)
    expect(length <= len(data) - start, "the bins of the values end too early")
    total = int(counts.sum())
    symbols = levels.unpack(data[start : start + length], total, BINS)
    bins = np.arange(counts.size).repeat(counts) * BINS + symbols
    occurs = np.bincount(bins, minlength=counts.size * BINS) > 0
    used = start + length + MEAN.itemsize * int(np.count_nonzero(occurs))
    expect(len(data) >= used, "the means of the bins end too early")
    means = np.zeros(occurs.size, np.float32)
    means[occurs] = floats.from_bfloat16(np.frombuffer(data[start + length : used], MEAN))
    expect(kernels.all_finite(means), "the mean of a bin is NaN or infinity")
    return means[bins], used
