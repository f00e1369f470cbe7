"""Base classes of codecs that send few coordinates: the count that a density means, the selection, and positions on the wire.

    body   first byte: the form of the positions in its low six bits, a flag of the codec in its high two
           values: the codec's own
           positions: in the form that is the shortest, a Rice code as a rule (kernels/positions.py)

Positions that were drawn from the seed are not sent. Their section counts every coordinate, so that frames of one seed add; it has form 63,
which no other section that counts them all has, then how many are sent (LEB128), then the values.

Under @chunk, unless positions are drawn, all chunks have one body, so that the positions are one code:

    body   how many coordinates are sent (LEB128); if any: a byte as above, length of the positions (LEB128), positions; and of the chunks
           with coordinates the codec's flags, two bits each, padded with zero bits, and the values, one chunk after the other

The flag in the first byte is 0, or says that the codec has values for all chunks together.
"""

import math
import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from .. import kernels
from ..errors import FrameError, SpecError
from ..kernels import Chosen, Rows, rice
from ..kernels import positions as wire
from ..kernels.parallel import starmap
from ..layout import Layout
from .base import SEEDS, Codec, Context, chunk_seeds, expect, stacks
from .frame import EMPTY, Section, read_varint, varint
from .update import Sparse, Update

MEAN = struct.Struct("<f")
FORM, FLAG_SHIFT, FLAG_BITS = 0x3F, 6, 2  # the first byte: form of the positions below, flag above
IMPLIED = 63  # form of a section that counts every coordinate
NO_POSITIONS, NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float32)


@dataclass(frozen=True)
class Selective(Codec):
    """A codec that sends few coordinates, never one that is zero unless its positions are drawn.

    An author writes the rule, `select`, and how values are sent, `pack_values` and `unpack_values`; positions are coded here.
    """

    draws: ClassVar[bool] = False  # positions follow from the seed and are not sent: `implied`

    @abstractmethod
    def select(self, rows: Rows, seeds: Sequence[int]) -> Chosen:
        """Choose coordinates of m ≥ 1 finite vectors."""

    def choose(self, rows: Rows, seeds: Sequence[int]) -> tuple[Chosen, Tensor]:
        """Choose coordinates, and return also the values that are sent, float32: those of the vectors, unless a value stands for others
        that are not sent."""
        chosen = self.select(rows, seeds)
        return chosen, kernels.values_at(rows, chosen)

    def most(self, numel: int) -> int:
        """Return how many coordinates of a vector [numel] are sent at most."""
        return numel

    def implied(self, numel: int, count: int, seed: int) -> np.ndarray:
        """Return the `count` positions, int64, ascending, that a codec which `draws` chooses of numel."""
        raise FrameError(f"{self.name} does not draw positions from a seed")

    @abstractmethod
    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        """Return a flag, 0..3, and the bytes of each of m runs of selected values, counts [m] long; anything for an empty run.

        Values are float32, none zero, in the order of their positions, one run after the other.
        """

    @abstractmethod
    def unpack_values(
        self, flag: int, data: memoryview, count: int, seed: int
    ) -> tuple[np.ndarray | kernels.Signs, int]:
        """Return `count` ≥ 1 values, float32 or signs, from the beginning of `data`, and how many bytes they took. Raise FrameError."""

    def _encode_rows(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[Section]:
        (positions, counts), values = self.choose(rows, seeds)
        numel = rows[0].numel()
        sent = self.pack_values(values.cpu().numpy(), counts, seeds, context)
        if self.draws:
            return [
                _section(numel, IMPLIED, flag, varint(count), data) if count else EMPTY
                for count, (flag, data) in zip(counts.tolist(), sent, strict=True)
            ]
        forms, codes = wire.pack_rows(positions.cpu().numpy(), counts, numel)
        return [
            _section(count, form, flag, data, code) if count else EMPTY
            for count, (flag, data), form, code in zip(
                counts.tolist(), sent, forms, codes, strict=True
            )
        ]

    def _decode_rows(
        self, sections: Sequence[Section], layout: Layout, seeds: Sequence[int]
    ) -> list[Update | FrameError]:
        numel = layout.numel
        opened: list[Update | FrameError] = [Sparse(numel, NO_POSITIONS, NO_VALUES)] * len(sections)
        read = []  # place, count, form, code and values of each section with positions
        for i, ((count, body), seed) in enumerate(zip(sections, seeds, strict=True)):
            if not count:
                continue
            try:
                first, data = take(memoryview(body), 1)
                form, flag = first[0] & FORM, first[0] >> FLAG_SHIFT
                if count == numel and form == IMPLIED:
                    opened[i] = self._decode_drawn(flag, data, numel, seed)
                    continue
                values, used = self.unpack_values(flag, data, count, seed)
                read.append((i, count, form, data[used:], values))
            except FrameError as error:
                opened[i] = error
        if read:
            places, counts, forms, codes, values = zip(*read, strict=True)
            rows = wire.unpack_rows(codes, counts, forms, numel)
            for i, row, sent in zip(places, rows, values, strict=True):
                opened[i] = row if isinstance(row, FrameError) else Sparse(numel, row, sent)
        return opened

    def _encode_chunks(self, x: Tensor, size: int, seed: int, context: Context) -> bytes:
        if self.draws:
            return super()._encode_chunks(x, size, seed, context)

        def work(first: int, rows: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            (positions, counts), values = self.choose(rows, chunk_seeds(seed, first, len(rows)))
            starts = np.arange(first, first + len(rows)).repeat(counts) * size
            return positions.cpu().numpy() + starts, counts, values.cpu().numpy()

        found = starmap(work, stacks(x, size))
        if not sum(counts.sum() for _, counts, _ in found):
            return varint(0)
        positions, counts, values = map(np.concatenate, zip(*found, strict=True))
        form, code = wire.pack(positions, x.numel())
        some = np.flatnonzero(counts)
        seeds = [(seed + i) % SEEDS for i in some.tolist()]
        flag, sent = self.pack_chunks(values, counts[some], seeds, context)
        head = varint(positions.size) + bytes([form | flag << FLAG_SHIFT])
        return b"".join([head, varint(len(code)), code, sent])

    def _decode_chunks(self, data: memoryview, numel: int, size: int, seed: int) -> Update:
        if self.draws:
            return super()._decode_chunks(data, numel, size, seed)
        count, start = read_varint(data)
        if not count:
            expect(len(data) == start, "bytes follow chunks without coordinates")
            return Sparse(numel, NO_POSITIONS, NO_VALUES)
        expect(count <= numel, f"a frame claims {count} coordinates of {numel}")
        first, rest = take(data[start:], 1)
        length, start = read_varint(rest)
        code, rest = take(rest[start:], length)
        positions = wire.unpack(code, count, first[0] & FORM, numel)
        some, counts = np.unique(positions // size, return_counts=True)
        seeds = [(seed + i) % SEEDS for i in some.tolist()]
        flag = first[0] >> FLAG_SHIFT
        return Sparse(numel, positions, self.unpack_chunks(flag, rest, counts, seeds))

    def pack_chunks(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> tuple[int, bytes]:
        """Return a flag and the bytes of m runs of selected values, counts [m] ≥ 1 long. Flag 0: the runs' own flags and bytes."""
        flags, sent = zip(*self.pack_values(values, counts, seeds, context), strict=True)
        bits = np.unpackbits(np.array(flags, np.uint8)[:, None], axis=1)[:, -FLAG_BITS:]
        return 0, np.packbits(bits).tobytes() + b"".join(sent)

    def unpack_chunks(
        self, flag: int, data: memoryview, counts: np.ndarray, seeds: Sequence[int]
    ) -> np.ndarray:
        """Return the values of m runs, counts [m] ≥ 1 long, float32. Raise FrameError unless they are all that `data` holds."""
        expect(flag == 0, "chunks have an unknown flag")
        head, rest = take(data, -(-FLAG_BITS * len(counts) // 8))
        bits = kernels.bits.read_bits(head, FLAG_BITS * len(counts))
        flags = np.unpackbits(bits, count=FLAG_BITS * len(counts)).reshape(-1, FLAG_BITS) @ (2, 1)
        runs = []
        for flag, count, seed in zip(flags.tolist(), counts.tolist(), seeds, strict=True):
            values, used = self.unpack_values(flag, rest, count, seed)
            runs.append(values.values() if isinstance(values, kernels.Signs) else values)
            rest = rest[used:]
        expect(not len(rest), f"{len(rest)} bytes follow the values of the last chunk")
        return np.concatenate(runs)

    def _decode_drawn(self, flag: int, data: memoryview, numel: int, seed: int) -> Sparse:
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
        check_density(self.density)

    def count(self, numel: int) -> int:
        """k for a vector [numel]."""
        return share(self.density, numel)

    def most(self, numel: int) -> int:
        return self.count(numel)

    @abstractmethod
    def value_bytes(self, count: int) -> int:
        """Return the most bytes that `pack_values` makes of `count` values."""


@dataclass(frozen=True)
class Largest(Share):
    """A codec that sends the k largest magnitudes, ties cut by position."""

    def longest_section(self, numel: int) -> int:
        k = self.count(numel)
        b = rice.parameter(k, numel)
        # The shifted gaps add up to no more than the shifted sum.
        gaps = (k * (b + 1) + ((numel - k) >> b) + 7) // 8
        return len(varint(k)) + 2 + self.value_bytes(k) + gaps

    def select(self, rows: Rows, seeds: Sequence[int]) -> Chosen:
        return kernels.top_k(rows, self.count(rows[0].numel()))


def check_density(density: float) -> None:
    """Raise SpecError unless it is the share of coordinates that a codec may send."""
    if not 0 < density <= 1:
        raise SpecError("density must be in (0, 1]; try density=1%")


def share(density: float, numel: int) -> int:
    """Return how many coordinates of a vector [numel] a density means."""
    return min(numel, max(1, math.floor(density * numel + 0.5)))


def _section(count: int, form: int, flag: int, first: bytes, second: bytes) -> Section:
    return Section(count, b"".join([bytes([form | flag << FLAG_SHIFT]), first, second]))


def take(data: memoryview, length: int) -> tuple[memoryview, memoryview]:
    """The first `length` bytes and the rest. Raises FrameError when there are fewer."""
    expect(len(data) >= length, "a section is cut short")
    return data[:length], data[length:]


def runs(values: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Split values into runs, counts [m] long."""
    return np.split(values, counts.cumsum()[:-1])


def pack_means(values: np.ndarray, counts: np.ndarray) -> list[bytes]:
    """Return the mean of |values| of each of m runs, counts [m] long, as float32, summed in float64 in the order given and rounded once."""
    packed = kernels.means(np.abs(values), counts).astype("<f4").tobytes()
    return [packed[at : at + MEAN.size] for at in range(0, len(packed), MEAN.size)]


def unpack_magnitude(data: memoryview) -> float:
    """A magnitude that stands for many. Raises FrameError unless it is finite and above zero."""
    (mean,) = MEAN.unpack(data)
    if not 0 < mean < math.inf:
        raise FrameError(f"a section has the magnitude {mean}")
    return mean
