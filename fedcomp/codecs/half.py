"""Float16 with one power of two for all values, so that neither large updates overflow nor small ones vanish.

exponent   int16, little-endian: e with 2¹⁴ ≤ max|v|·2⁻ᵉ < 2¹⁵, or 0 when every value is zero
values     float16, little-endian: v·2⁻ᵉ rounded to nearest
"""

import numpy as np

from .. import kernels
from .base import expect

HALF, EXPONENT = np.dtype("<f2"), np.dtype("<i2")
LARGEST = np.float32(32752)  # the float16 below 2¹⁵: rounding up to 2¹⁵ could leave float32's range


def size(count: int) -> int:
    """Bytes of `count` values."""
    return EXPONENT.itemsize + HALF.itemsize * count


def pack(values: np.ndarray) -> bytes:
    """float32 values [k] as 2 + 2k bytes; each is off by at most 2⁻¹¹ of itself, or 2⁻³⁹ of the largest."""
    largest = float(np.abs(values).max(initial=0.0))
    exponent = int(np.frexp(largest)[1]) - 15 if largest else 0
    scaled = np.clip(np.ldexp(values, -exponent), -LARGEST, LARGEST)
    return np.array(exponent, EXPONENT).tobytes() + scaled.astype(HALF).tobytes()


def unpack(data: memoryview, count: int) -> np.ndarray:
    """float32 values [count]. Raises FrameError unless `data` holds exactly these, all finite."""
    expect(len(data) == size(count), "values in float16 have another length")
    exponent = int(np.frombuffer(data, EXPONENT, 1)[0])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = np.ldexp(
            np.frombuffer(data, HALF, offset=EXPONENT.itemsize).astype(np.float32), exponent
        )
    expect(kernels.all_finite(values), "values in float16 hold NaN or infinity")
    return values
