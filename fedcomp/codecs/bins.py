"""Values in two bits each: every value is sent as the mean of its bin, one of four per chunk.

This is the quantizer of the public implementation of SparseLoCo (Sarfi et al. 2025), taken from hivemind. In a chunk with mean m and
standard deviation σ, a value v belongs to bin ⌊(v − m)/(1.5σ) + 2⌉, rounded half to even and clipped to 0..3. Unlike in SparseLoCo, the
means are rounded to bfloat16.

    symbols   length of the following code (LEB128); the bins of all values, coded by codecs/levels.py
    means     of all nonempty bins of each chunk, in order, as bfloat16
"""

import numpy as np
import torch

from .. import kernels
from . import levels
from .base import expect
from .floats import upper_halves
from .frame import read_varint, varint

BINS, WIDTH, MIDDLE = 4, 1.5, 2  # number of bins, their width in σ, the bin around m
MEAN = np.dtype("<u2")


def pack(values: np.ndarray, counts: np.ndarray) -> bytes:
    """Return the bytes of the values of m chunks, in order. `counts` [m] ≥ 1: number of values of each chunk."""
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
    return varint(len(code)) + code + upper_halves(torch.from_numpy(means)).tobytes()


def unpack(data: memoryview, counts: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the values of m chunks, float32, and the number of bytes read. `counts`: as in `pack`. Raises FrameError."""
    length, start = read_varint(data)
    expect(length <= len(data) - start, "the bins of values are cut short")
    total = int(counts.sum())
    symbols = levels.unpack(data[start : start + length], total, BINS)
    bins = np.arange(counts.size).repeat(counts) * BINS + symbols
    occurs = np.bincount(bins, minlength=counts.size * BINS) > 0
    used = start + length + MEAN.itemsize * int(np.count_nonzero(occurs))
    expect(len(data) >= used, "the means of bins are cut short")
    means = np.zeros(occurs.size, np.uint32)
    means[occurs] = np.frombuffer(data[start + length : used], MEAN).astype(np.uint32) << 16
    expect(kernels.all_finite(means.view(np.float32)), "the mean of a bin is NaN or infinity")
    return means.view(np.float32)[bins], used


def max_bytes(count: int) -> int:
    """Return the largest size in bytes of `count` values of one chunk."""
    size = levels.packed_bytes(count, BINS)
    return len(varint(size)) + size + min(count, BINS) * MEAN.itemsize
