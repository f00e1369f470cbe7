"""One bit per element: the first is the most significant bit of the first byte, zero bits fill the last.

Bits that are kept to be read are `words`: those bytes, filled up with zeros to a whole number of uint32, read as little-endian.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import FrameError
from . import backend, philox
from .parallel import map_ranges, pieces
from .rows import Rows, are_large, stacked

WORD = np.dtype("<u4")
COINS = 1  # stream of the coins for zeros
UNITS = (
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32) * 2 - 1
)  # of the bits of each byte
PERIOD = 4096  # values that compiled loops read side by side


@dataclass
class Signs:
    """Values of one magnitude, as they are sent: a bit each, 1 for positive."""

    raw: np.ndarray  # uint8 [⌈count/8⌉]
    count: int
    magnitude: float  # of float32

    def values(self) -> np.ndarray:
        """What they stand for: float32 [count]."""
        values = UNITS.take(self.raw, axis=0).reshape(-1)[: self.count]
        values *= np.float32(self.magnitude)
        return values


def values_of(runs: Sequence[Signs]) -> np.ndarray:
    """What runs of one length stand for, m ≥ 1, one after the other: float32 [m·count]."""
    raw, count = np.concatenate([run.raw for run in runs]), runs[0].count
    values = UNITS.take(raw, axis=0).reshape(len(runs), 8 * runs[0].raw.size)[:, :count]
    return (values * np.array([[run.magnitude] for run in runs], np.float32)).reshape(-1)


def pack_signs(positive: np.ndarray | Tensor) -> bytes:
    """The bits of a bool array or tensor [count], on any device: ceil(count/8) bytes."""
    flags = positive.cpu().numpy() if isinstance(positive, Tensor) else positive
    return np.packbits(flags).tobytes()


def pack_signs_runs(positive: np.ndarray, counts: np.ndarray) -> list[bytes]:
    """`pack_signs` of m runs of flags, counts [m] long."""
    if not counts.size:
        return []
    if (counts != counts[0]).any():
        return [pack_signs(run) for run in np.split(positive, counts.cumsum()[:-1])]
    rows = np.packbits(positive.reshape(counts.size, -1), axis=1)
    packed, size = rows.tobytes(), rows.shape[1]
    return [packed[i * size : (i + 1) * size] for i in range(counts.size)]


def unpack_signs(data: bytes | memoryview, count: int) -> np.ndarray:
    """The bool array [count] that `data` holds. Raises FrameError on another length and on padding that is not zero."""
    return np.unpackbits(_checked(data, count), count=count).view(np.bool_)


def read_signs(data: bytes | memoryview, count: int, magnitude: float) -> Signs:
    """`unpack_signs`, left as they are, of values of one magnitude."""
    return Signs(_checked(data, count), count, magnitude)


def signs(x: Tensor, seed: int | None = None) -> bytes:
    """A bit for each element of a finite x [n], of any float dtype, on any device: 1 if it is positive, 0 if it is negative.

    A zero of either sign is 1, or, where a seed is given, a coin: bit i of the words that kernels/philox.py draws for the seed.
    """
    return signs_rows([x], None if seed is None else [seed])[0]


def signs_rows(rows: Rows, seeds: Sequence[int] | None = None) -> list[bytes]:
    """`signs` of each of m ≥ 1 vectors, each with its seed."""
    drawn = [None] * len(rows) if seeds is None else seeds
    if are_large(rows):
        return [_signs_compiled(x.detach(), seed) for x, seed in zip(rows, drawn, strict=True)]
    X = stacked(rows).detach()
    packed, zeros = _pack_rows(X)
    return [
        (
            row & (~zero | _coins(seed, X.shape[1])) if seed is not None and zero.any() else row
        ).tobytes()
        for row, zero, seed in zip(packed, zeros, drawn, strict=True)
    ]


def read_words(data: bytes | memoryview, count: int) -> np.ndarray:
    """The words of the bits [count] that `data` holds, in memory of their own. Raises FrameError like `unpack_signs`."""
    raw = _checked(data, count)
    words = np.zeros((count + 31) // 32, WORD)
    words.view(np.uint8)[: raw.size] = raw
    return words.astype(np.uint32, copy=False)


def flags(words: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Bits start..stop-1 of words: bool [stop - start]."""
    first = start // 32
    raw = words[first : (stop + 31) // 32].astype(WORD, copy=False).view(np.uint8)
    return np.unpackbits(raw, count=stop - 32 * first)[start - 32 * first :].view(np.bool_)


def values(
    words: np.ndarray, start: int, stop: int, high: np.ndarray, low: np.ndarray
) -> np.ndarray:
    """What bits start..stop-1 stand for: in column i mod c a 1 is high[column] and a 0 is low[column]; both float32 [c], c ≥ 1."""
    if backend.compile_vector(stop - start):
        out = np.empty(stop - start, np.float32)
        _spread(words, start, high, low, False, out)
        return out
    at = np.arange(start, stop) % high.size if high.size > 1 else 0
    return np.where(flags(words, start, stop), high[at], low[at])


def add_values(into: Tensor, words: np.ndarray, high: np.ndarray, low: np.ndarray) -> None:
    """into += `values` of all bits; into is float32 [n], on any device."""
    numel = into.numel()
    if into.device.type != "cpu":
        into += _values_torch(
            torch.from_numpy(words.astype(WORD).view(np.uint8)).to(into.device), numel, high, low
        )
    elif backend.compile_vector(numel):
        _spread(words, 0, high, low, True, into.detach().numpy())
    else:
        into.detach().numpy()[...] += values(words, 0, numel, high, low)


def _checked(data: bytes | memoryview, count: int) -> np.ndarray:
    """`data` as uint8, if it is `count` bits and zeros."""
    if count < 0 or len(data) != (count + 7) // 8:
        raise FrameError(
            f"{len(data)} bytes cannot hold {count} signs; the frame is damaged or of another size"
        )
    raw = np.frombuffer(data, np.uint8)
    spare = -count % 8
    if spare and raw[-1] & ((1 << spare) - 1):
        raise FrameError(f"the last {spare} bits of the signs are not zero; the frame is damaged")
    return raw


def _pack_rows(X: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The bits x >= 0 and x == 0 of the rows of X [m, n]: uint8 [m, ⌈n/8⌉]."""
    if X.device.type == "cpu":
        X = X.to(torch.float32).numpy()
        return np.packbits(X >= 0, axis=1), np.packbits(X == 0, axis=1)
    return tuple(_pack_torch(torch.stack([X >= 0, X == 0])).cpu().numpy())


def _pack_torch(flags: Tensor) -> Tensor:
    """np.packbits of a bool tensor along its last dimension, on its device."""
    whole = torch.nn.functional.pad(flags, (0, -flags.shape[-1] % 8)).unflatten(-1, (-1, 8))
    places = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=flags.device)
    return (whole * places).sum(-1, dtype=torch.uint8)


def _values_torch(raw: Tensor, numel: int, high: np.ndarray, low: np.ndarray) -> Tensor:
    """`values` of all bits of uint8 bytes, on their device."""
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=raw.device)
    grid = (raw[:, None] >> places & 1).flatten()[:numel].bool().view(-1, high.size)
    return torch.where(grid, *(torch.from_numpy(v).to(raw.device) for v in (high, low))).flatten()


def _coins(seed: int, count: int) -> np.ndarray:
    """The bytes of `count` coins; bits past the last are coins too."""
    return (
        philox.words(seed, (count + 31) // 32, stream=COINS)
        .astype(WORD, copy=False)
        .view(np.uint8)[: (count + 7) // 8]
    )


def _signs_compiled(x: Tensor, seed: int | None) -> bytes:
    """`signs` of a large x in main memory, by threads."""
    from . import bit_loops

    out = np.zeros((x.numel() + 127) // 128 * 4, np.uint32)
    low, high = (0, 0) if seed is None else philox.halves(seed)

    def work(start: int, stop: int) -> None:
        for piece in pieces(x, start, stop):
            bit_loops.signs(
                piece, seed is not None, low, high, COINS, start // 128, out[start // 32 :]
            )
            start += piece.size

    map_ranges(x.numel(), work)
    return out.astype(WORD, copy=False).view(np.uint8)[: (x.numel() + 7) // 8].tobytes()


def _spread(
    words: np.ndarray, start: int, high: np.ndarray, low: np.ndarray, add: bool, out: np.ndarray
) -> None:
    """Write or add to `out` what the bits from `start` on stand for, by threads."""
    from . import bit_loops

    high, low = (np.tile(v, max(1, PERIOD // high.size)) for v in (high, low))
    map_ranges(out.size, lambda a, b: bit_loops.spread(words, start + a, high, low, add, out[a:b]))
