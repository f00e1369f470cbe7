"""What codecs share that send few coordinates: how many a density means, selecting them, and positions on the wire.

    body   first byte: the form of the positions in its low six bits, a flag of the codec in its high two
           values: the codec's own
           positions: in the form that is the shortest, a Rice code as a rule (kernels/positions.py)

Positions that were drawn from the seed are not sent. Their section counts every coordinate, so that frames of one seed add; it has form 63,
which no other section that counts them all has, then how many are sent (LEB128), then the values.
"""

import math
import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..errors import FrameError, SpecError
from ..kernels import positions as wire
from ..kernels import rice
from ..layout import Entry, Layout
from . import frame
from .base import SEEDS, Codec, Context, add_finite, expect
from .frame import EMPTY, Section, read_varint, varint
from .update import Sections, Sparse, Update

MEAN = struct.Struct("<f")
FORM, FLAG_SHIFT = 0x3F, 6  # the first byte: form of the positions below, flag above
IMPLIED = 63  # form of a section that counts every coordinate


@dataclass(frozen=True)
class Selective(Codec):
    """A codec that sends few coordinates, never one that is zero unless its positions are drawn.

    An author writes the rule, `select`, and how values are sent, `pack_values` and `unpack_values`; positions are coded here.
    """

    draws: ClassVar[bool] = (
        False  # positions follow from the seed and are not sent; `implied` gives them
    )

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
        return (
            torch.arange(len(chosen), device=x.device).repeat_interleave(counts),
            torch.cat(chosen),
            counts,
        )

    def chosen(self, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Positions, and what is sent there: x itself, unless what was drawn is to stand for what was not."""
        positions = self.select(x, seed)
        return positions, at(x, positions)

    def chosen_added(self, total: Tensor, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """`total += x` in place, then `chosen`. Raises NonFiniteError with `total` untouched."""
        positions = self.select_added(total, x, seed)
        return positions, at(total, positions)

    def chosen_rows(self, x: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """`chosen` for the rows of a finite stack [m, n], m ≥ 1, one after the other, and how many in each row."""
        rows, columns, counts = self.select_rows(x, seeds)
        return columns, x[rows, columns], counts

    def most(self, numel: int) -> int:
        """How many coordinates of a vector [numel] it sends at most."""
        return numel

    def implied(self, numel: int, count: int, seed: int) -> np.ndarray:
        """The `count` positions, int64, ascending, that a codec which `draws` chooses of numel."""
        raise FrameError(f"{self.name} does not draw positions from a seed")

    @abstractmethod
    def pack_values(self, values: np.ndarray, seed: int, context: Context) -> tuple[int, bytes]:
        """A flag, 0..3, and the bytes of selected values: float32, at least one, none zero, in the order of their positions."""

    def pack_values_rows(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        """`pack_values` of m runs of values, counts [m] long, each with its seed; anything for empty ones. Override for one pass."""
        runs = zip(np.split(values, np.cumsum(counts)[:-1]), seeds, strict=True)
        return [
            self.pack_values(run, seed, context) if run.size else (0, b"") for run, seed in runs
        ]

    @abstractmethod
    def unpack_values(
        self, flag: int, data: memoryview, count: int, seed: int
    ) -> tuple[np.ndarray | kernels.Signs, int]:
        """`count` ≥ 1 values, float32 or signs, from the beginning of `data`, and how many bytes they took. Raises FrameError."""

    def unpack_values_rows(
        self,
        flags: Sequence[int],
        data: Sequence[memoryview],
        counts: Sequence[int],
        seeds: Sequence[int],
    ) -> list[tuple[np.ndarray | kernels.Signs, int] | FrameError]:
        """`unpack_values` of m sections; a FrameError in the place of one that is bad. Override for one pass."""
        opened: list[tuple[np.ndarray | kernels.Signs, int] | FrameError] = []
        for given in zip(flags, data, counts, seeds, strict=True):
            try:
                opened.append(self.unpack_values(*given))
            except FrameError as error:
                opened.append(error)
        return opened

    def pack(self, x: Tensor, seed: int, context: Context) -> Section:
        return self._pack_chosen(*self.chosen(x, seed), x.numel(), seed, context)

    def pack_added(self, total: Tensor, x: Tensor, seed: int, context: Context) -> Section:
        return self._pack_chosen(*self.chosen_added(total, x, seed), x.numel(), seed, context)

    def pack_rows(self, x: Tensor, seeds: Sequence[int], context: Context) -> list[Section]:
        if not len(x):
            return []
        positions, values, counts = self.chosen_rows(x, seeds)
        values = values.to(torch.float32).cpu().numpy()
        return self._sections(
            positions.cpu().numpy(), values, counts.cpu().numpy(), x.shape[1], seeds, context
        )

    def unpack(self, section: Section, layout: Layout, seed: int) -> Update:
        count, body = section.count, memoryview(section.body)
        if not count:
            return Sparse(layout.numel, np.empty(0, np.int64), np.empty(0, np.float32))
        expect(len(body) > 0, "a section is cut short")
        numel, first, data = layout.numel, body[0], body[1:]
        if _is_drawn(section, numel):
            return self._unpack_drawn(first >> FLAG_SHIFT, data, numel, seed)
        values, used = self.unpack_values(first >> FLAG_SHIFT, data, count, seed)
        return Sparse(numel, wire.unpack(data[used:], count, first & FORM, numel), values)

    def unpack_rows(
        self, sections: Sequence[Section], numel: int, seeds: Sequence[int]
    ) -> list[Update | FrameError]:
        """`unpack` of many sections for vectors [numel], with their seeds; a FrameError in the place of one that is bad."""
        opened: list[Update | FrameError] = [
            Sparse(numel, np.empty(0, np.int64), np.empty(0, np.float32))
        ] * len(sections)
        given = []  # of each section with positions: its place, first byte, what follows, count, seed
        for i, (section, seed) in enumerate(zip(sections, seeds, strict=True)):
            try:
                if section.count and _is_drawn(section, numel):
                    opened[i] = self.unpack(section, Layout.flat(numel), seed)
                elif section.count:
                    expect(len(section.body) > 0, "a section is cut short")
                    given.append(
                        (i, section.body[0], memoryview(section.body)[1:], section.count, seed)
                    )
            except FrameError as error:
                opened[i] = error
        if not given:
            return opened
        places, firsts, rests, counts, own = zip(*given, strict=True)
        read = []  # of each that has values: its place, count, form, positions, values
        values = self.unpack_values_rows(
            [first >> FLAG_SHIFT for first in firsts], rests, counts, own
        )
        for i, first, rest, count, found in zip(places, firsts, rests, counts, values, strict=True):
            if isinstance(found, FrameError):
                opened[i] = found
            else:
                read.append((i, count, first & FORM, rest[found[1] :], found[0]))
        if read:
            places, counts, forms, codes, values = zip(*read, strict=True)
            rows = wire.unpack_rows(codes, np.array(counts), np.array(forms), numel)
            for i, row, sent in zip(places, rows, values, strict=True):
                opened[i] = row if isinstance(row, FrameError) else Sparse(numel, row, sent)
        return opened

    def open_batch(
        self, frames: Sequence[bytes], numel: int, layout: Layout | None = None
    ) -> list[Update | FrameError]:
        opened: list[Update | FrameError | None] = [None] * len(frames)
        columns = {}  # of each tensor, or of the whole vector: frame, tensor, section, seed
        for i, data in enumerate(frames):
            try:
                seed, sections = frame.unseal(data, self.id, numel, layout, self.seeded)
                for j, (entry, section) in enumerate(sections):
                    columns.setdefault((j, entry is frame.WHOLE), []).append(
                        (i, entry, section, (seed + j) % SEEDS)
                    )
            except FrameError as error:
                opened[i] = error
        parts: list[list[tuple[Entry, Update | FrameError]]] = [[] for _ in frames]
        for column in columns.values():
            places, entries, sections, seeds = zip(*column, strict=True)
            size = numel if entries[0] is frame.WHOLE else entries[0].numel
            for i, entry, update in zip(
                places, entries, self.unpack_rows(sections, size, seeds), strict=True
            ):
                parts[i].append((entry, update))
        return [error or _joined(numel, found) for error, found in zip(opened, parts, strict=True)]

    def add_all(self, updates: Sequence[Update], weights: Sequence[float], into: Tensor) -> None:
        if all(isinstance(update, Sparse) for update in updates):
            return kernels.add_all_at(
                into, [u.positions for u in updates], [u.sent for u in updates], weights
            )
        super().add_all(updates, weights, into)

    def _pack_chosen(
        self, positions: Tensor, values: Tensor, numel: int, seed: int, context: Context
    ) -> Section:
        sent = values.to(torch.float32).cpu().numpy()
        (section,) = self._sections(
            positions.cpu().numpy(), sent, np.array([sent.size]), numel, [seed], context
        )
        return section

    def _sections(
        self,
        positions: np.ndarray,
        values: np.ndarray,
        counts: np.ndarray,
        numel: int,
        seeds: Sequence[int],
        context: Context,
    ) -> list[Section]:
        """A section for each of the runs, counts [m] long, of which positions and values are made."""
        sent = (
            self.pack_values_rows(values, counts, seeds, context)
            if len(counts) > 1 or not values.size
            else [self.pack_values(values, seeds[0], context)]
        )
        packed = zip(counts.tolist(), sent, strict=True)
        if self.draws:
            return [
                _section(numel, IMPLIED, flag, varint(count), data) if count else EMPTY
                for count, (flag, data) in packed
            ]
        found = zip(packed, *wire.pack_rows(positions, counts, numel), strict=True)
        return [
            _section(count, form, flag, data, code) if count else EMPTY
            for (count, (flag, data)), form, code in found
        ]

    def _unpack_drawn(self, flag: int, data: memoryview, numel: int, seed: int) -> Sparse:
        count, start = read_varint(data)
        expect(0 < count <= numel, f"a section claims {count} values for {numel} coordinates")
        values, used = self.unpack_values(flag, data[start:], count, seed)
        expect(start + used == len(data), "bytes follow the last value of a section")
        return Sparse(numel, self.implied(numel, count, seed), values)


@dataclass(frozen=True)
class Share(Selective):
    """A codec that sends k coordinates, k = max(1, floor(density · n + ½))."""

    density: float  # share of coordinates sent

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise SpecError("density must be in (0, 1]; try density=1%")

    def count(self, numel: int) -> int:
        """k for a vector [numel]."""
        return min(numel, max(1, math.floor(self.density * numel + 0.5)))

    def most(self, numel: int) -> int:
        return self.count(numel)

    @abstractmethod
    def value_bytes(self, count: int) -> int:
        """How many bytes `pack_values` makes of `count` values, at most."""


@dataclass(frozen=True)
class Largest(Share):
    """A codec that sends the k largest magnitudes, ties cut by position."""

    def longest_section(self, numel: int) -> int:
        k = self.count(numel)
        b = rice.parameter(k, numel)
        gaps = (
            k * (b + 1) + ((numel - k) >> b) + 7
        ) // 8  # the shifted gaps add up to no more than the shifted sum
        return len(varint(k)) + 2 + self.value_bytes(k) + gaps

    def select(self, x: Tensor, seed: int) -> Tensor:
        return kernels.top_k(x, self.count(x.numel()))

    def select_added(self, total: Tensor, x: Tensor, seed: int) -> Tensor:
        return kernels.top_k_added(total, x, self.count(x.numel()))

    def select_rows(self, x: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        return kernels.top_k_rows(x, self.count(x.shape[1]))


def at(x: Tensor, positions: Tensor) -> Tensor:
    """x[positions]; through numpy where that works, which does not wait for torch's threads."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return torch.from_numpy(x.numpy()[positions.numpy()])
    return x[positions]


def _section(count: int, form: int, flag: int, first: bytes, second: bytes) -> Section:
    return Section(count, b"".join([bytes([form | flag << FLAG_SHIFT]), first, second]))


def _is_drawn(section: Section, numel: int) -> bool:
    """Whether the positions in a section that is not empty follow from the seed."""
    return section.count == numel and len(section.body) > 0 and section.body[0] & FORM == IMPLIED


def _joined(numel: int, parts: Sequence[tuple[Entry, Update | FrameError]]) -> Update | FrameError:
    """The update of a frame's sections, or the first error in them."""
    for entry, update in parts:
        if isinstance(update, FrameError) or entry is frame.WHOLE:
            return update
    return Sections(numel, tuple((entry.span, update) for entry, update in parts))


def take(data: memoryview, length: int) -> tuple[memoryview, memoryview]:
    """The first `length` bytes and the rest. Raises FrameError when there are fewer."""
    expect(len(data) >= length, "a section is cut short")
    return data[:length], data[length:]


def pack_mean(values: np.ndarray) -> bytes:
    """The mean of |values| as float32, summed in float64 in the order given and rounded once."""
    return MEAN.pack(kernels.mean(np.abs(values)))


def pack_means(values: np.ndarray, counts: np.ndarray) -> list[bytes]:
    """`pack_mean` of m runs of values, counts [m] long; anything for an empty one."""
    packed = kernels.means(np.abs(values), counts).astype("<f4").tobytes()
    return [packed[at : at + MEAN.size] for at in range(0, len(packed), MEAN.size)]


def unpack_magnitude(data: memoryview) -> float:
    """A magnitude that stands for many. Raises FrameError unless it is finite and above zero."""
    (mean,) = MEAN.unpack(data)
    if not 0 < mean < math.inf:
        raise FrameError(f"a section has the magnitude {mean}")
    return mean
