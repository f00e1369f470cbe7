"""What codecs share that send few coordinates: how many a density means, selecting them, and positions on the wire.

    positions   first byte: the Rice parameter b in its low six bits, the codec's own flags above
                gaps: Rice-coded with parameter b (kernels/rice.py)
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..errors import SpecError
from ..kernels import rice
from .base import Codec, Context, expect
from .frame import EMPTY, Section
from .update import Sparse, Update

RICE = 0x3F  # bits of the first byte that hold the Rice parameter


@dataclass(frozen=True)
class Selective(Codec):
    """A codec that sends at most k coordinates, k = max(1, floor(density · n + ½)), never one that is zero.

    An author writes `section` and `read`; selection on one vector, fused with error feedback, or on a stack, is here.
    """

    density: float  # share of coordinates sent

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise SpecError(
                f"option 'density' of codec '{self.name}' is {self.density:g}; give a share above 0 and at most 1, such as 1% or 1/400"
            )

    def count(self, numel: int) -> int:
        """k for a vector [numel]."""
        return min(numel, max(1, math.floor(self.density * numel + 0.5)))

    @abstractmethod
    def section(self, positions: np.ndarray, values: np.ndarray, numel: int) -> Section:
        """The section for selected coordinates: positions int64, ascending, at least one; values float32, none zero."""

    @abstractmethod
    def read(self, count: int, body: memoryview, numel: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions and values in the body of a section with count ≥ 1. Raises FrameError."""

    # The k largest magnitudes; a codec with another rule overrides these three.

    def select(self, x: Tensor) -> Tensor:
        return kernels.top_k(x, self.count(x.numel()))

    def select_added(self, total: Tensor, x: Tensor) -> Tensor:
        return kernels.top_k_added(total, x, self.count(x.numel()))

    def select_rows(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and positions of what is selected of a stack [m, n], in this order, and how many in each row."""
        return kernels.top_k_rows(x, self.count(x.shape[1]))

    def pack(self, x: Tensor, seed: int, context: Context) -> Section:
        return self._pack_at(x, self.select(x))

    def pack_added(self, total: Tensor, x: Tensor, seed: int, context: Context) -> Section:
        return self._pack_at(total, self.select_added(total, x))

    def pack_rows(self, x: Tensor, seeds: Sequence[int], context: Context) -> list[Section]:
        rows, columns, counts = self.select_rows(x)
        ends = np.cumsum(counts.cpu().numpy())[:-1]
        values = np.split(x[rows, columns].to(torch.float32).cpu().numpy(), ends)
        positions = np.split(columns.cpu().numpy(), ends)
        return [self.section(p, v, x.shape[1]) if p.size else EMPTY for p, v in zip(positions, values, strict=True)]

    def _pack_at(self, x: Tensor, positions: Tensor) -> Section:
        if not positions.numel():
            return EMPTY
        return self.section(positions.cpu().numpy(), x[positions].to(torch.float32).cpu().numpy(), x.numel())

    def unpack(self, section: Section, numel: int) -> Update:
        if not section.count:
            return Sparse(numel, np.empty(0, np.int64), np.empty(0, np.float32))
        return Sparse(numel, *self.read(section.count, memoryview(section.body), numel))


def pack_positions(positions: np.ndarray, numel: int, flags: int = 0) -> tuple[bytes, bytes]:
    """The first byte, and the Rice-coded gaps of ascending positions in 0..numel-1."""
    b = rice.best_parameter(positions, numel)
    return bytes([b | flags]), rice.pack(positions, b)


def unpack_positions(first: int, gaps: memoryview, count: int, numel: int) -> np.ndarray:
    """The positions, int64, ascending. Raises FrameError on anything that `pack_positions` cannot have made."""
    return rice.unpack(gaps, count, first & RICE, numel)


def split(body: memoryview, *lengths: int) -> list[memoryview]:
    """The body cut into leading pieces of these lengths and the rest. Raises FrameError when it is too short."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(body[start : start + length])
        start += length
    expect(len(body) >= start, "a section is cut short")
    return [*pieces, body[start:]]


def pack_mean(values: np.ndarray) -> bytes:
    """The mean of |values| as float32, summed in float64 in the order given and rounded once."""
    return np.array(kernels.mean(np.abs(values)), "<f4").tobytes()


def unpack_mean(data: memoryview) -> np.float32:
    """A mean magnitude. Raises FrameError unless it is finite and above zero."""
    mean = np.frombuffer(data, "<f4")[0].astype(np.float32)
    expect(bool(np.isfinite(mean)) and mean > 0, f"a section has the mean magnitude {mean}")
    return mean
