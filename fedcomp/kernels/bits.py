"""One bit per element: the first is the most significant bit of the first byte, zero bits fill the last."""

import numpy as np
from torch import Tensor

from ..errors import FrameError


def pack_signs(positive: np.ndarray | Tensor) -> bytes:
    """The bits of a bool array or tensor [count], on any device: ceil(count/8) bytes."""
    flags = positive.cpu().numpy() if isinstance(positive, Tensor) else positive
    return np.packbits(flags).tobytes()


def unpack_signs(data: bytes | memoryview, count: int) -> np.ndarray:
    """The bool array [count] that `data` holds. Raises FrameError on another length and on padding that is not zero."""
    if count < 0 or len(data) != (count + 7) // 8:
        raise FrameError(f"{len(data)} bytes cannot hold {count} signs; the frame is damaged or of another size")
    raw = np.frombuffer(data, np.uint8)
    spare = -count % 8
    if spare and raw[-1] & ((1 << spare) - 1):
        raise FrameError(f"the last {spare} bits of the signs are not zero; the frame is damaged")
    return np.unpackbits(raw, count=count).view(np.bool_)
