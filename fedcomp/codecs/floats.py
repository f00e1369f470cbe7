"""Values on the wire as float32 or, half as long, as float16; a flag says which.

Float16 has one power of two for all values, so that neither large updates overflow nor small ones vanish:

    exponent   int16, little-endian: e with 2¹⁴ ≤ max|v|·2⁻ᵉ < 2¹⁵, or 0 when every value is zero
    values     float16, little-endian: v·2⁻ᵉ rounded to nearest
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from .base import expect

Precision = Literal["fp32", "fp16"]
FP32, FP16 = 0, 1  # flags
FLOAT, HALF, EXPONENT = np.dtype("<f4"), np.dtype("<f2"), np.dtype("<i2")
LARGEST = np.float32(32752)  # the float16 below 2¹⁵: rounding up to 2¹⁵ could leave float32's range
ROUNDED = 2.0**-21  # of the squared length is lost in float16, at most


def flag(precision: Precision) -> int:
    return FP16 if precision == "fp16" else FP32


def size(count: int, flag: int) -> int:
    """Bytes of `count` values."""
    return EXPONENT.itemsize + HALF.itemsize * count if flag == FP16 else 4 * count


def pack(values: np.ndarray, flag: int) -> bytes:
    """The bytes of finite float32 values [count]."""
    return pack_half(values) if flag == FP16 else values.astype("<f4", copy=False).tobytes()


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
    values = unpack_half(data[:used], count) if flag == FP16 else np.frombuffer(data, FLOAT, count)
    expect(kernels.all_finite(values), "a section holds NaN or infinity")
    return values, used


def upper_halves(x: Tensor) -> np.ndarray:
    """A finite vector as bfloat16, rounded to nearest, ties to even; what would become infinity is the largest finite number: uint16."""
    bits = x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return (bits - (bits & 0x7FFF == 0x7F80)).astype("<u2", copy=False)


def pack_half(values: np.ndarray) -> bytes:
    """float32 values [k] as 2 + 2k bytes; each is off by at most 2⁻¹¹ of itself, or 2⁻³⁹ of the largest."""
    largest = float(np.abs(values).max(initial=0.0))
    exponent = int(np.frexp(largest)[1]) - 15 if largest else 0
    scaled = np.clip(np.ldexp(values, -exponent), -LARGEST, LARGEST)
    return np.array(exponent, EXPONENT).tobytes() + scaled.astype(HALF).tobytes()


def unpack_half(data: memoryview, count: int) -> np.ndarray:
    """float32 values [count]. Raises FrameError unless `data` holds exactly these, all finite."""
    expect(len(data) == size(count, FP16), "values in float16 have another length")
    exponent = int(np.frombuffer(data, EXPONENT, 1)[0])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = np.ldexp(
            np.frombuffer(data, HALF, offset=EXPONENT.itemsize).astype(np.float32), exponent
        )
    expect(kernels.all_finite(values), "values in float16 hold NaN or infinity")
    return values
