"""The encoding of values as float32 or float16. A flag in the frame gives the precision.

Float16 values are scaled by one common power of two, so that large updates do not overflow and small updates do not become zero. Instead of
the values v, the values v·2⁻ᵉ are encoded, with the exponent e for which 2¹⁴ ≤ max|v|·2⁻ᵉ < 2¹⁵.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from .base import expect, require

Precision = Literal["fp32", "fp16"]
FP32, FP16 = 0, 1  # flags
FLOAT, HALF, EXPONENT = np.dtype("<f4"), np.dtype("<f2"), np.dtype("<i2")
# Scaled values are clipped to the largest float16 below 2¹⁵. Otherwise, a scaled value could be rounded up to 2¹⁵ and decoded as 2¹⁵·2ᵉ,
# which can exceed the range of float32.
LARGEST_HALF = np.float32(32752)
FP16_ERROR = 2.0**-21  # upper bound of the relative squared error ‖v − float16(v)‖²/‖v‖²


def flag(precision: Precision) -> int:
    return FP16 if precision == "fp16" else FP32


def size(count: int, flag: int) -> int:
    """Return the size in bytes of `count` encoded values. `flag`: FP32 or FP16."""
    return EXPONENT.itemsize + HALF.itemsize * count if flag == FP16 else 4 * count


def pack(values: np.ndarray, flag: int) -> bytes:
    """Encode finite float32 values [count] as bytes. `flag`: FP32 or FP16.

    The error of a float16 value is at most 2⁻¹¹ times this value, or 2⁻³⁹ times the largest magnitude of all values, whichever is larger.
    """
    if flag == FP32:
        return values.astype(FLOAT, copy=False).tobytes()
    largest = float(np.abs(values).max(initial=0.0))
    exponent = int(np.frexp(largest)[1]) - 15 if largest else 0
    scaled = np.clip(np.ldexp(values, -exponent), -LARGEST_HALF, LARGEST_HALF)
    return np.array(exponent, EXPONENT).tobytes() + scaled.astype(HALF).tobytes()


def pack_runs(
    values: np.ndarray, counts: np.ndarray, precision: Precision
) -> list[tuple[int, bytes]]:
    """Split finite float32 values into m consecutive runs, and encode each run. `counts` [m]: the length of each run.

    Return a (flag, bytes) pair for each run.
    """
    which = flag(precision)
    return [(which, pack(run, which)) for run in kernels.split_runs(values, counts)]


def unpack(data: memoryview, count: int, flag: int) -> tuple[np.ndarray, int]:
    """Read `count` finite values from the start of `data`.

    Return the values, as float32, and the number of bytes read. Raises FrameError.
    """
    used = size(count, flag)
    expect(len(data) >= used, "the encoded values end too early")
    if flag == FP32:
        values = np.frombuffer(data, FLOAT, count)
    else:
        exponent = int(np.frombuffer(data, EXPONENT, 1)[0])
        halves = np.frombuffer(data, HALF, count, EXPONENT.itemsize)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            values = np.ldexp(halves.astype(np.float32), exponent)
    expect(kernels.all_finite(values), "a value is NaN or infinity")
    return values, used


def unpack_all(data: bytes | memoryview, count: int, flag: int) -> np.ndarray:
    """Decode `data` into `count` finite float32 values. Raises FrameError for a wrong length, NaN or infinity."""
    expect(len(data) == size(count, flag), "the values have the wrong length")
    values, _ = unpack(memoryview(data), count, flag)
    return values


def add(runs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of float32 arrays of one shape. Raises FrameError if the sum is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.asarray(np.sum(runs, axis=0, dtype=np.float32))
    require(kernels.all_finite(total), "the sum of the frames is not finite")
    return total


def to_bfloat16(x: Tensor) -> np.ndarray:
    """Round a finite vector to bfloat16, to nearest, ties to even. Return the bits as uint16.

    Values that would round to infinity become the largest finite bfloat16.
    """
    bits = x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return (bits - (bits & 0x7FFF == 0x7F80)).astype("<u2", copy=False)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bfloat16 numbers, whose bits are given as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
