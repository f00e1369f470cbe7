"""Values on the wire as float32 or, half as long, as codecs/half.py; a flag says which."""

from typing import Literal

import numpy as np

from .. import kernels
from . import half
from .base import expect

Precision = Literal["fp32", "fp16"]
FP32, FP16 = 0, 1  # flags
FLOAT = np.dtype("<f4")
ROUNDED = 2.0**-21  # of the squared length is lost in float16, at most


def flag(precision: Precision) -> int:
    return FP16 if precision == "fp16" else FP32


def size(count: int, flag: int) -> int:
    """Bytes of `count` values."""
    return half.size(count) if flag == FP16 else 4 * count


def pack(values: np.ndarray, flag: int) -> bytes:
    """The bytes of finite float32 values [count]."""
    return half.pack(values) if flag == FP16 else values.astype("<f4", copy=False).tobytes()


def pack_runs(
    values: np.ndarray, counts: np.ndarray, precision: Precision
) -> list[tuple[int, bytes]]:
    """Return the flag and the bytes of each of m runs of finite float32 values, counts [m] long."""
    which = flag(precision)
    return [(which, pack(run, which)) for run in np.split(values, counts.cumsum()[:-1])]


def unpack(data: memoryview, count: int, flag: int) -> tuple[np.ndarray, int]:
    """`count` finite values, float32, from the beginning of `data`, and how many bytes they took. Raises FrameError."""
    used = size(count, flag)
    expect(len(data) >= used, "a section is cut short")
    values = half.unpack(data[:used], count) if flag == FP16 else np.frombuffer(data, FLOAT, count)
    expect(kernels.all_finite(values), "a section holds NaN or infinity")
    return values, used
