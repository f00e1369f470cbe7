"""What codecs share that send few coordinates: how many a density means, selecting them, and positions on the wire.

    body   first byte: the Rice parameter b in its low six bits, a flag of the codec in its high two
           values: the codec's own
           gaps: Rice-coded with parameter b (kernels/rice.py)
"""

import math
import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..errors import FrameError, SpecError
from ..kernels import rice
from ..layout import Layout
from . import frame
from .base import Codec, Context, add_finite, expect
from .frame import EMPTY, Section, varint
from .update import Sparse, Update

MEAN = struct.Struct("<f")
RICE, FLAG_SHIFT = 0x3F, 6  # the first byte: Rice parameter below, flag above


@dataclass(frozen=True)
class Selective(Codec):
    """A codec that sends few coordinates, never one that is zero.

    An author writes the rule, `select`, and how values are sent, `pack_values` and `unpack_values`; positions are coded here.
    """

    @abstractmethod
    def select(self, x: Tensor, seed: int) -> Tensor:
        """Positions in a finite vector x [n]: int64, ascending, on its device."""

    def select_added(self, total: Tensor, x: Tensor, seed: int) -> Tensor:
        """`total += x` in place, then `select`; override where one pass can do both. Raises NonFiniteError with `total` untouched."""
        add_finite(total, x)
        return self.select(total, seed)

    def select_rows(self, x: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and positions of what is selected of a finite stack [m, n], in this order, and how many in each row."""
        chosen = [self.select(row, seed) for row, seed in zip(x, seeds, strict=True)]
        counts = torch.tensor([positions.numel() for positions in chosen], device=x.device)
        return torch.arange(len(chosen), device=x.device).repeat_interleave(counts), torch.cat(chosen), counts

    @abstractmethod
    def pack_values(self, values: np.ndarray, seed: int, context: Context) -> tuple[int, bytes]:
        """A flag, 0..3, and the bytes of selected values: float32, at least one, none zero, in the order of their positions."""

    @abstractmethod
    def unpack_values(self, flag: int, data: memoryview, count: int, seed: int) -> tuple[np.ndarray, int]:
        """`count` ≥ 1 values, float32, from the beginning of `data`, and how many bytes they took. Raises FrameError."""

    def pack(self, x: Tensor, seed: int, context: Context) -> Section:
        return self._pack_at(x, self.select(x, seed), seed, context)

    def pack_added(self, total: Tensor, x: Tensor, seed: int, context: Context) -> Section:
        return self._pack_at(total, self.select_added(total, x, seed), seed, context)

    def pack_rows(self, x: Tensor, seeds: Sequence[int], context: Context) -> list[Section]:
        if not len(x):
            return []
        rows, columns, counts = self.select_rows(x, seeds)
        values = x[rows, columns].to(torch.float32).cpu().numpy()
        return self._sections(columns.cpu().numpy(), values, counts.cpu().numpy(), x.shape[1], seeds, context)

    def unpack(self, section: Section, layout: Layout, seed: int) -> Update:
        count, body = section.count, memoryview(section.body)
        if not count:
            return Sparse(layout.numel, np.empty(0, np.int64), np.empty(0, np.float32))
        first, data = take(body, 1)
        values, used = self.unpack_values(first[0] >> FLAG_SHIFT, data, count, seed)
        return Sparse(layout.numel, rice.unpack(data[used:], count, first[0] & RICE, layout.numel), values)

    def open_batch(self, frames: Sequence[bytes], numel: int, layout: Layout | None = None) -> list[Update | FrameError]:
        opened: list[Update | FrameError] = [Sparse(numel, np.empty(0, np.int64), np.empty(0, np.float32))] * len(frames)
        read = []  # of each frame with positions: its place, count, Rice parameter, gaps, values
        for i, data in enumerate(frames):
            try:
                seed, sections = frame.unseal(data, self.id, numel, layout, self.seeded)
                if len(sections) != 1 or sections[0][0] is not frame.WHOLE:
                    opened[i] = self.open(data, numel, layout)
                elif sections[0][1].count:
                    count, body = sections[0][1]
                    first, rest = take(memoryview(body), 1)
                    values, used = self.unpack_values(first[0] >> FLAG_SHIFT, rest, count, seed)
                    read.append((i, count, first[0] & RICE, rest[used:], values))
            except FrameError as error:
                opened[i] = error
        if read:
            places, counts, parameters, gaps, values = zip(*read, strict=True)
            rows = rice.unpack_rows(gaps, np.array(counts), np.array(parameters), numel)
            for i, row, sent in zip(places, rows, values, strict=True):
                opened[i] = row if isinstance(row, FrameError) else Sparse(numel, row, sent)
        return opened

    def _pack_at(self, x: Tensor, positions: Tensor, seed: int, context: Context) -> Section:
        values = _at(x, positions).to(torch.float32).cpu().numpy()
        (section,) = self._sections(positions.cpu().numpy(), values, np.array([values.size]), x.numel(), [seed], context)
        return section

    def _sections(
        self, positions: np.ndarray, values: np.ndarray, counts: np.ndarray, numel: int, seeds: Sequence[int], context: Context
    ) -> list[Section]:
        """A section for each of the runs, counts [m] long, of which positions and values are made."""
        parameters = rice.best_parameters(positions, counts, numel)
        gaps = rice.pack_rows(positions, counts, parameters) if len(counts) > 1 else [rice.pack(positions, int(parameters[0]))]
        runs = zip(np.split(values, np.cumsum(counts)[:-1]), parameters.tolist(), gaps, seeds, strict=True)
        return [self._section(*run, context) if run[0].size else EMPTY for run in runs]

    def _section(self, values: np.ndarray, b: int, gaps: bytes, seed: int, context: Context) -> Section:
        flag, data = self.pack_values(values, seed, context)
        return Section(values.size, bytes([b | flag << FLAG_SHIFT]) + data + gaps)


@dataclass(frozen=True)
class Largest(Selective):
    """A codec that sends the k largest magnitudes, k = max(1, floor(density · n + ½)), ties cut by position."""

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
    def value_bytes(self, count: int) -> int:
        """How many bytes `pack_values` makes of `count` values, at most."""

    def longest_section(self, numel: int) -> int:
        k = self.count(numel)
        b = rice.parameter(k, numel)
        gaps = (k * (b + 1) + ((numel - k) >> b) + 7) // 8  # the shifted gaps add up to no more than the shifted sum
        return len(varint(k)) + 2 + self.value_bytes(k) + gaps

    def select(self, x: Tensor, seed: int) -> Tensor:
        return kernels.top_k(x, self.count(x.numel()))

    def select_added(self, total: Tensor, x: Tensor, seed: int) -> Tensor:
        return kernels.top_k_added(total, x, self.count(x.numel()))

    def select_rows(self, x: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        return kernels.top_k_rows(x, self.count(x.shape[1]))


def _at(x: Tensor, positions: Tensor) -> Tensor:
    """x[positions]; through numpy where that works, which does not wait for torch's threads."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return torch.from_numpy(x.numpy()[positions.numpy()])
    return x[positions]


def take(data: memoryview, length: int) -> tuple[memoryview, memoryview]:
    """The first `length` bytes and the rest. Raises FrameError when there are fewer."""
    expect(len(data) >= length, "a section is cut short")
    return data[:length], data[length:]


def pack_mean(values: np.ndarray) -> bytes:
    """The mean of |values| as float32, summed in float64 in the order given and rounded once."""
    return MEAN.pack(kernels.mean(np.abs(values)))


def unpack_mean(data: memoryview) -> np.float32:
    """A mean magnitude. Raises FrameError unless it is finite and above zero."""
    (mean,) = MEAN.unpack(data)
    expect(0 < mean < math.inf, f"a section has the mean magnitude {mean}")
    return np.float32(mean)
