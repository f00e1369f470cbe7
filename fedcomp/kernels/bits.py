"""Packed bits: eight elements per byte, the first element in the most significant bit. The last byte is padded with zeros."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import FrameError
from . import philox
from .parallel import Rows, stacked

WORD = np.dtype("<u4")
ZERO_STREAM = 1  # index of the random stream from which the signs of zeros are drawn
# For each byte, its bits as values ±1, float32 [256, 8].
SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32) * 2 - 1


def pack_signs(positive: np.ndarray | Tensor) -> bytes:
    """Pack a bool array or tensor [count], on any device, into ceil(count/8) bytes."""
    flags = positive.cpu().numpy() if isinstance(positive, Tensor) else positive
    return np.packbits(flags).tobytes()


def unpack_signs(data: bytes | memoryview, count: int) -> np.ndarray:
    """Unpack bits into a bool array [count]. Raises FrameError if the length or the padding of `data` is wrong."""
    return np.unpackbits(read_bits(data, count), count=count).view(np.bool_)


def sign_values(raw: np.ndarray, count: int, magnitude: float) -> np.ndarray:
    """Return `magnitude` for each 1 and −`magnitude` for each 0 in the packed bits `raw`, as float32 [count]."""
    values = SIGNS.take(raw, axis=0).reshape(-1)[:count]
    values *= np.float32(magnitude)
    return values


def signs(x: Tensor, seed: int | None = None) -> bytes:
    """Return the packed signs of a finite x [n], of any float dtype, on any device: 1 for positive, 0 for negative.

    A zero has the bit 1 without a seed. With a seed, a zero at index i has bit i of the random words of the seed (philox.py).
    """
    return signs_rows([x], None if seed is None else [seed])[0]


def signs_rows(rows: Rows, seeds: Sequence[int] | None = None) -> list[bytes]:
    """Return `signs` of each of m ≥ 1 vectors, with one seed per vector."""
    row_seeds = [None] * len(rows) if seeds is None else seeds
    X = stacked(rows).detach()
    packed, zeros = _pack_rows(X)
    out = []
    for row, zero, seed in zip(packed, zeros, row_seeds, strict=True):
        if seed is not None and zero.any():
            row = row & (~zero | random_bits(seed, X.shape[1], ZERO_STREAM))
        out.append(row.tobytes())
    return out


def flags(raw: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return the bits start..stop-1 of packed bits, as bool [stop - start]."""
    first = start // 8
    part = raw[first : (stop + 7) // 8]
    return np.unpackbits(part, count=stop - 8 * first)[start - 8 * first :].view(np.bool_)


def values(raw: np.ndarray, start: int, stop: int, high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Decode the bits start..stop-1 of packed bits to float32 [stop - start]: bit i to high[i mod c] if it is 1, else to low[i mod c].

    `high`, `low`: float32 [c], c ≥ 1.
    """
    if high.size > 1:
        high, low = (np.resize(np.roll(v, -start), stop - start) for v in (high, low))
    return np.where(flags(raw, start, stop), high, low)


def read_bits(data: bytes | memoryview, count: int) -> np.ndarray:
    """View `data` as a uint8 array. Raises FrameError unless it consists of `count` bits and zeros as padding."""
    if count < 0 or len(data) != (count + 7) // 8:
        raise FrameError(
            f"damaged frame: the sign bits have {len(data)} bytes; expected {count} bits"
        )
    raw = np.frombuffer(data, np.uint8)
    spare = -count % 8
    if spare and raw[-1] & ((1 << spare) - 1):
        raise FrameError(f"damaged frame: the {spare} padding bits after {count} bits are not zero")
    return raw


def _pack_rows(X: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return X >= 0 and X == 0 of X [m, n] as packed bits, uint8 [m, ⌈n/8⌉]."""
    if X.device.type == "cpu":
        values = X.to(torch.float32).numpy()
        return np.packbits(values >= 0, axis=1), np.packbits(values == 0, axis=1)
    positive, zero = pack_torch(torch.stack([X >= 0, X == 0])).cpu().numpy()
    return positive, zero


def pack_torch(flags: Tensor) -> Tensor:
    """Pack a bool tensor along its last dimension on its device, as np.packbits does."""
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=flags.device)
    return (padded * weights).sum(-1, dtype=torch.uint8)


def random_bits(seed: int, count: int, stream: int) -> np.ndarray:
    """Return the first bits of the random words of a seed and a stream (philox.py) as packed bits, uint8 [⌈count/8⌉]."""
    words = philox.words(seed, (count + 31) // 32, stream=stream).astype(WORD, copy=False)
    packed = words.view(np.uint8)[: (count + 7) // 8]
    if count % 8:
        packed[-1] &= 256 - (1 << -count % 8)
    return packed
