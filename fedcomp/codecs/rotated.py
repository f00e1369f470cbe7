"""The base of codecs that quantize a rotated vector (kernels/hadamard.py), and the wire of their numbers and codes.

    body   one byte, the codec's own; 0 = float32 values instead, of a vector whose largest magnitude is above 0 and below 2⁻¹⁰⁰
           for each block a, then for each block b where the codec has one: the upper half of a float64
           codes: the codec's own

A block's û·2^e/d is a·v + b/d, with v what its codes stand for; then it is turned back. A vector below 2⁻¹⁰⁰ is sent as it is: of what
comes back, float32 could not hold the bits. What comes back beyond float32's range becomes its end.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels import bit_planes, hadamard
from ..kernels.hadamard import Turned
from ..kernels.parallel import map_ranges
from ..layout import Layout
from . import selection
from .base import Codec, Context, expect
from .frame import Section, varint
from .update import Dense, Update

PLAIN = 0  # the first byte before float32 values
TINY = -100  # exponent of two below which a vector is sent as it is
HALF = np.dtype("<u4")  # the upper half of a float64
LEAST, MOST = 2.0**-400, 2.0**160  # range of the scales of float32 vectors


class Codes(Protocol):
    """Codes as they came, one for each coordinate and each zero behind the vector."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the values of codes start..stop-1, float32 in memory of their own; both are edges of blocks."""


@dataclass(frozen=True)
class RotatedCodec(Codec):
    """A codec for what a rotation makes of a vector."""

    seeded: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    shifts: ClassVar[bool] = False  # whether blocks have a b
    kind: ClassVar[type] = np.uint8  # type of the codes

    @abstractmethod
    def head(self) -> int:
        """The first byte: 1..255."""

    @abstractmethod
    def quantize(self, turned: Turned) -> tuple[np.ndarray, list[np.ndarray]]:
        """Codes [N] and the numbers, float64 [blocks], whose lower halves are zero: û = numbers[0]·v + numbers[1]."""

    @abstractmethod
    def pack_codes(self, codes: np.ndarray) -> bytes:
        """The bytes of codes [N]."""

    @abstractmethod
    def unpack_codes(self, head: int, data: memoryview, count: int, idle: np.ndarray) -> Codes:
        """`count` codes; where `idle` [count/8] is true, eight of them stand for 0. Raises FrameError unless `pack_codes` made `data`."""

    def width(self) -> int | None:
        """Bits of a code; None where codes differ in length."""
        return None

    def longest_section(self, numel: int) -> int | None:
        marks, width = hadamard.edges(numel), self.width()
        if width is None:
            return None
        coded = HALF.itemsize * (marks.size - 1) * (1 + self.shifts) + width * int(marks[-1]) // 8
        return len(varint(numel)) + 1 + max(4 * numel, coded)

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        marks = hadamard.edges(x.numel())
        sent = np.empty((1 + self.shifts, marks.size - 1))
        exponents = np.empty(marks.size - 1, np.int64)
        codes = np.empty(marks[-1], self.kind)

        def use(turned: Turned) -> None:
            codes[turned.span], numbers = self.quantize(turned)
            exponents[turned.blocks] = turned.exponents
            sent[:, turned.blocks] = _unscaled(numbers, turned)

        hadamard.turn(x, seed, use)
        held = sent.any(0)
        if held.any() and exponents[held].max() <= TINY:
            values = x.to(torch.float32).cpu().numpy().astype("<f4", copy=False)
            return Section(x.numel(), bytes([PLAIN]) + values.tobytes())
        numbers = (sent.view(np.int64) >> 32).astype(HALF).tobytes()
        return Section(x.numel(), bytes([self.head()]) + numbers + self.pack_codes(codes))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        count, body = section
        first, data = selection.take(memoryview(body), 1)
        if first[0] == PLAIN:
            return _plain(data, count)
        sizes = np.diff(hadamard.edges(count))
        sent, data = selection.take(data, HALF.itemsize * sizes.size * (1 + self.shifts))
        scale, shift = _read_numbers(np.frombuffer(sent, HALF).reshape(-1, sizes.size))
        codes = self.unpack_codes(first[0], data, int(sizes.sum()), (scale == 0).repeat(sizes // 8))
        return Rotated(count, seed, scale, shift, codes)


@dataclass(frozen=True)
class Rotated(Update):
    """An update that is turned back when it is read."""

    numel: int
    seed: int
    scale: np.ndarray  # a, float64 [blocks]
    shift: np.ndarray  # b
    codes: Codes
    positions: ClassVar[None] = None

    def add_to(self, into: Tensor, weight: float = 1.0) -> None:
        factor = np.float32(weight)
        if into.device.type != "cpu":
            into.add_(self.dense(into.device) * factor)
            return
        target = into.detach().numpy()

        def add(start: int, stop: int, values: np.ndarray) -> None:
            target[start:stop] += factor * values

        self._each(0, self.numel, add)

    def block(self, start: int, stop: int) -> np.ndarray:
        out = np.empty(stop - start, np.float32)

        def put(first: int, last: int, values: np.ndarray) -> None:
            a, b = max(start, first), min(stop, last)
            out[a - start : b - start] = values[a - first : b - first]

        self._each(start, stop, put)
        return out

    def _each(self, start: int, stop: int, use: Callable[[int, int, np.ndarray], None]) -> None:
        """use(first, last, values) for all blocks that hold coordinates start..stop-1, by threads."""
        if start == stop:
            return
        marks = hadamard.edges(self.numel)
        begin = int(np.searchsorted(marks, start, "right")) - 1
        end = int(np.searchsorted(marks, stop))

        def work(a: int, b: int) -> None:
            for at in range(a, b, hadamard.CHUNK):
                i, j = (
                    int(np.searchsorted(marks, marks[begin] + edge))
                    for edge in (at, min(at + hadamard.CHUNK, b))
                )
                values = self.codes.read(int(marks[i]), int(marks[j]))
                turned = hadamard.turn_back(
                    values, self.seed, self.numel, i, self.scale[i:j], self.shift[i:j]
                )
                use(int(marks[i]), int(marks[i]) + turned.size, turned)

        map_ranges(int(marks[end] - marks[begin]), work, hadamard.CHUNK)


@dataclass(frozen=True)
class Planes:
    """Codes as bit planes (kernels/bit_planes.py), a view of the frame."""

    bits: np.ndarray  # uint8 [w, N/8]
    table: np.ndarray  # float32 [2^w]

    def read(self, start: int, stop: int) -> np.ndarray:
        return bit_planes.read(self.bits, start, stop, self.table)


def unpack_planes(data: memoryview, count: int, table: np.ndarray, idle: np.ndarray) -> Planes:
    """Codes of as many bits as the table has. Raises FrameError unless each is one of its entries, and 0 where `idle`."""
    bits = bit_planes.unpack(data, count, table.size)
    expect(not (idle.any() and bits[:, idle].any()), "a block of equal values has codes")
    return Planes(bits, np.resize(table, 1 << len(bits)))


def nearest(numbers: np.ndarray) -> np.ndarray:
    """Return the nearest float64 whose lower halves are zero, of numbers ≥ 0."""
    return ((numbers.view(np.int64) + (1 << 31)) >> 32 << 32).view(np.float64)


def above(numbers: np.ndarray) -> np.ndarray:
    """Return the smallest float64 that are not below the numbers and whose lower halves are zero."""
    bits = numbers.view(np.int64)
    return (np.where(bits < 0, bits, bits + 0xFFFFFFFF) >> 32 << 32).view(np.float64)


def _unscaled(numbers: list[np.ndarray], turned: Turned) -> list[np.ndarray]:
    """a and b."""
    exponents = turned.exponents.astype(np.int32)
    return [np.ldexp(v, exponents) / (1 if i else turned.sizes) for i, v in enumerate(numbers)]


def _read_numbers(halves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a and b, [blocks] each. Raises FrameError for what no vector of float32 turns to."""
    numbers = (halves.astype(np.int64) << 32).view(np.float64)
    sizes = np.abs(numbers)
    with np.errstate(invalid="ignore"):
        fit = (halves == 0) | (sizes >= LEAST) & (sizes <= MOST)
    expect(
        bool(fit.all() and (numbers[0] >= 0).all()),
        "the scale of a block is not finite, negative, or out of range",
    )
    return numbers[0], numbers[1] if len(numbers) > 1 else np.zeros(numbers.shape[1])


def _plain(data: memoryview, count: int) -> Dense:
    expect(len(data) == 4 * count, "float32 values have another length")
    values = np.frombuffer(data, "<f4")
    largest = float(np.abs(values).max())
    expect(0 < largest < 2.0**TINY, "values are sent as they are that should have been turned")
    return Dense(values)
