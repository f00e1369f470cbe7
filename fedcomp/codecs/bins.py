"""Values on the wire as one of four means each.

The quantizer of the public implementation of SparseLoCo (Sarfi et al. 2025), which has it from hivemind: of the values of a chunk with mean
m and standard deviation σ, a value v is in bin ⌊(v − m)/(1.5σ) + 2⌉, halves to even, at least 0 and at most 3; all of a bin are sent as its
mean. Unlike there, the means are rounded to bfloat16.

    symbols   length (LEB128) of the bins of all values, and these as in codecs/levels.py: two bits each, or entropy-coded
    means     of the bins of each chunk that have values, in order: the upper halves of float32
"""

import numpy as np
import torch

from .. import kernels
from . import levels
from .base import expect
from .floats import upper_halves
from .frame import read_varint, varint

BINS, WIDTH, MIDDLE = 4, 1.5, 2  # bins, their width in σ, and the one around m
MEAN = np.dtype("<u2")


def pack(values: np.ndarray, counts: np.ndarray) -> bytes:
    """Return the bytes of m chunks of values, counts [m] ≥ 1 long."""
    chunk = np.arange(counts.size).repeat(counts)
    centered = values - kernels.means(values, counts)[chunk]  # float64
    squares = np.bincount(chunk, centered * centered, counts.size)
    width = WIDTH * np.sqrt(squares / np.maximum(counts - 1, 1))[chunk]
    wide = np.divide(centered, width, out=np.zeros_like(centered), where=width > 0)
    symbols = np.clip(np.rint(wide) + MIDDLE, 0, BINS - 1).astype(np.uint8)
    place, size = chunk * BINS + symbols, counts.size * BINS
    many = np.bincount(place, minlength=size)
    sums = np.bincount(place, values, size)
    means = (sums[many > 0] / many[many > 0]).astype(np.float32)
    code = levels.pack(symbols, BINS)
    return varint(len(code)) + code + upper_halves(torch.from_numpy(means)).tobytes()


def unpack(data: memoryview, counts: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the values, float32, of m chunks, counts [m] ≥ 1 long, and how many bytes they took. Raises FrameError."""
    length, start = read_varint(data)
    expect(length <= len(data) - start, "the bins of values are cut short")
    total = int(counts.sum())
    symbols = levels.unpack(data[start : start + length], total, BINS)
    place = np.arange(counts.size).repeat(counts) * BINS + symbols
    occurs = np.bincount(place, minlength=counts.size * BINS) > 0
    used = start + length + MEAN.itemsize * int(np.count_nonzero(occurs))
    expect(len(data) >= used, "the means of bins are cut short")
    means = np.zeros(occurs.size, np.uint32)
    means[occurs] = np.frombuffer(data[start + length : used], MEAN).astype(np.uint32) << 16
    expect(kernels.all_finite(means.view(np.float32)), "a bin has the mean NaN or infinity")
    return means.view(np.float32)[place], used


def longest(count: int) -> int:
    """Return a number of bytes that no `count` values of one chunk exceed."""
    size = levels.packed_bytes(count, BINS)
    return len(varint(size)) + size + min(count, BINS) * MEAN.itemsize
