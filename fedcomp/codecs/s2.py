"""S2 Reducer: a sparse vector as its support and a count sketch of its values, which add up on the way and come out exact.

Ge, Zhang, Zhang, Sun, Ma, Wang, Zhu, Chen: S2 Reducer: high-performance sparse communication to accelerate distributed deep learning. 2021.

    S[r, h_r(i)] += s_r(i)·x_i for every i with x_i ≠ 0;    support and S are sent;    Σ of frames: union of supports, Σ of S

Who knows the union reads the values back by peeling (kernels/peeling.py). In all, S has 1.25 cells for each coordinate of the union from
10⁴ on, 1.6 at 10³, more below; in tables of that size all of them come out exactly, but for one table in about a thousand, in which two
keys share all of their cells. What is not exact is the closest that least squares finds, and the update says of how many (`Found.missed`).

It pays where many frames are added by those who only add, and their supports overlap: all-reduce, switches, sums over masked values. It
does not pay in a star, where a `topk` frame of the same values is smaller: a nonzero takes 5.4 bytes here, 5.1 in int24, 3.8 in int16, and
5.0 there, 3.0 in float16; and by far smaller where each table has room for the union, so that the links from clients to the first who adds
carry more, not less. Nor does it pay where a relay may look into frames: it could pass on the values of the union themselves.
benchmarks/s2.py has the figures: at 1 % of updates of digits in training, the sum of 128 frames takes 86 % less than the frames of topk
that go into it, that of 32 61 %, of 8 12 %; where supports are random 46 %, 11 % to 17 %, and −23 % to 1 %. The paper claims 81 %.

`topk:density=1%+s2` sends what topk chooses, in frames of `s2`. Frames add if their tables have one shape. So a table is made for `union`
times as many coordinates as the first half sends at most, which is the same for all clients; or as x has nonzeros, where there is no first
half; or it has the `columns` that are given. Where `union` falls short, nothing is lost but what `missed` says. An encoder that could not
read its own frame takes twice the columns: such a frame stands alone, and does not add.

Unlike the paper, supports are coded, where it sends a bitmap, and cells are integers of a unit 2^e, so that subtracting them loses nothing:

    values=fp32    the largest 2^e of which all values are multiples, so that all of their bits arrive; a value below 2⁻⁴⁷ of the largest,
                   2⁻³⁵ among 10⁸, may lose some. values=int24, int16: the values are rounded to so many bits of the largest.

Cells in float32 would take 32 bits, where those of int24 take about 27, and what they round goes from key to key as they peel: up to 3e-6
of the largest value at 10⁴ keys, where int24 is off by 1e-7.

    body    how many nonzeros (LEB128); unless there are none: form of the support (kernels/positions.py) and rows, one byte each; columns
            (LEB128); e (int16); bits of a cell, one byte; cells; the support
    cells   integers in two's complement of as few bits as hold them all: the low bytes of each, then what is left of all, packed
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from ..kernels import Rows, peeling
from ..kernels import positions as wire
from ..layout import Layout
from .base import Codec, Context, expect
from .frame import EMPTY, Section, read_varint, varint
from .levels import LARGEST
from .selection import Selective, runs, take
from .update import Sparse, Update

# Rows → cells a key from which many keys peel.
THRESHOLDS = {3: 1.222, 4: 1.295, 5: 1.425, 6: 1.570, 7: 1.722}
BITS = {"fp32": 48, "int24": 23, "int16": 15}  # of a magnitude
MOST_BITS = 62  # of a sum
WIDEST = 8  # columns a coordinate, and as many more as a vector of a few needs
EXPONENT = np.dtype("<i2")
LOWEST, HIGHEST = -149, 127  # exponents of units


@dataclass(frozen=True)
class S2(Codec):
    """All coordinates that are not zero, in frames that add."""

    rows: int = 3  # of the table: with 3, it needs the fewest cells
    columns: int = 0  # cells in a row; 0 = what the nonzeros need
    union: float = 1.0  # coordinates of all frames that are added, as a multiple of one frame's: their number, or less where they overlap
    values: Literal["fp32", "int24", "int16"] = "fp32"  # precision of what is added
    name: ClassVar[str] = "s2"
    id: ClassVar[int] = 23
    source: ClassVar[str] = "Ge et al. 2021"
    linear: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    shares_seed: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rows not in THRESHOLDS:
            raise SpecError(f"rows is {self.rows}; give 3 to {max(THRESHOLDS)}")
        if not 0 <= self.columns < 1 << 28:
            raise SpecError(f"columns is {self.columns}; give a number of cells, or leave it out")
        if not 1 <= self.union < math.inf:
            raise SpecError(
                f"union is {self.union:g}; give the number of frames that are added, or less, from 1 on"
            )
        if self.columns and self.union != 1:
            raise SpecError("codec 's2' has both 'columns' and 'union'; give one of them")

    def contraction(self, numel: int) -> float:
        return 0.0 if self.columns else max(0.0, 1 - numel * 4.0 ** (1 - self._bits(numel)))

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        dense = x.to(torch.float32).cpu().numpy()
        at = np.flatnonzero(dense)
        return self.pack_sparse(at, dense[at], x.numel(), at.size, seed)

    def pack_sparse(
        self, positions: np.ndarray, values: np.ndarray, numel: int, most: int, seed: int
    ) -> Section:
        """A section for the vector [numel] with values, float32, at positions, int64, ascending, of which frames have `most` at most."""
        exponent, integers = _integers(values, self._bits(positions.size))
        positions, integers = positions[integers != 0], integers[integers != 0]
        if not positions.size:
            return Section(numel, varint(0)) if numel else EMPTY
        needed = self.columns or self.width(math.ceil(min(numel, self.union * most)))
        columns = min(needed, _widest(numel))
        while True:
            where = peeling.places(positions, self.rows, columns, seed)
            table = peeling.sums(where, integers)
            body = _write(Body(positions, exponent, table.reshape(self.rows, columns)), numel)
            if (
                self.columns
                or columns == _widest(numel)
                or np.array_equal(peeling.recover(where, table).values, integers)
            ):
                return Section(numel, body)
            columns = min(2 * columns, _widest(numel))

    def width(self, keys: int) -> int:
        """Columns of a table in which so many keys are found."""
        cells = max(1.25 * keys, 1.1 * keys + 15 * math.sqrt(keys))
        return max(1, math.ceil(cells * THRESHOLDS[self.rows] / THRESHOLDS[3] / self.rows))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        numel = layout.numel
        read = _read(section.body, numel)
        if read is None:
            return Found(numel, np.empty(0, np.int64), np.empty(0, np.float32))
        positions, exponent, table = read
        where = peeling.places(positions, *table.shape, seed)
        found = peeling.recover(where, table.reshape(-1))
        values = np.ldexp(found.values.astype(np.float64), exponent).clip(-LARGEST, LARGEST)
        missed = positions.size - found.peeled - found.solved
        return Found(numel, positions, values.astype(np.float32), missed)

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        sizes = {section.count for section in sections}
        expect(len(sizes) == 1, "frames of different sizes cannot be merged")
        numel = sizes.pop()
        found = [_read(section.body, numel) for section in sections if numel]
        read = [body for body in found if body is not None]
        if not read:
            return sections[0]
        expect(
            len({body.table.shape for body in read}) == 1,
            "tables of different sizes cannot be merged; give all clients the same 'columns', or 'union' behind a codec with a density",
        )
        unit, total = _sum(read)
        top = math.ldexp(int(np.abs(total).max()), unit)
        expect(
            len(read) == 1 or top <= LARGEST and unit <= HIGHEST,
            "the sum of the frames is not finite",
        )
        union = np.unique(np.concatenate([body.positions for body in read]))
        return Section(numel, _write(Body(union, unit, total), numel))

    def _bits(self, keys: int) -> int:
        """Return the bits of the largest magnitude among so many keys, whose sum is then below 2⁶²."""
        return min(BITS[self.values], MOST_BITS - keys.bit_length())


@dataclass(frozen=True)
class Selected(Codec):
    """Coordinates of the first codec in frames of the second: `topk:density=1%+s2`. Any `s2` reads them."""

    first: Selective
    second: S2
    id: ClassVar[int] = S2.id
    linear: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    shares_seed: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.first, Selective):
            raise SpecError(
                f"a product begins with a codec that selects, and '{self.first.name}' does not; write topk:density=1%+s2"
            )
        if self.first.draws:
            raise SpecError(
                f"the coordinates of '{self.first.name}' follow from the seed, and its frames add by themselves; leave +s2 out"
            )
        object.__setattr__(self, "name", S2.name)
        object.__setattr__(self, "source", f"{self.first.source}; {self.second.source}")
        object.__setattr__(self, "portable", self.first.portable)

    def __str__(self) -> str:
        return f"{self.first}+{self.second}"

    @property
    def density(self) -> float:
        return self.first.density

    def contraction(self, numel: int) -> float | None:
        chosen = self.first.contraction(numel)
        return None if chosen is None else chosen * self.second.contraction(self.first.most(numel))

    def _encode_rows(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[Section]:
        (positions, counts), values = self.first.choose(rows, seeds)
        numel = rows[0].numel()
        sent = zip(
            *(runs(v.cpu().numpy(), counts) for v in (positions, values)), seeds, strict=True
        )
        return [
            self.second.pack_sparse(at, held, numel, self.first.most(numel), seed)
            for at, held, seed in sent
        ]

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        return self.second._decode_row(section, layout, seed)

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        return self.second._merge_sections(sections)


@dataclass
class Found(Sparse):
    """Values that were read from a table."""

    missed: int = 0  # coordinates that are not exact, but estimated


class Body(NamedTuple):
    positions: np.ndarray  # int64, ascending, at least one
    exponent: int
    table: np.ndarray  # int64 [rows, columns]


def _widest(numel: int) -> int:
    """Columns beyond which a table for a vector [numel] is not read."""
    return min(WIDEST * numel + 64, (1 << 31) // max(THRESHOLDS) - 1)


def _integers(values: np.ndarray, bits: int) -> tuple[int, np.ndarray]:
    """The exponent of a unit and values, float32 [k], as multiples of it, int64, of so many bits: exact if these suffice, else rounded."""
    mantissas, exponents = np.frexp(values.astype(np.float64))
    whole = np.abs(np.ldexp(mantissas, 24)).astype(np.int64)
    zeros = np.frexp((whole & -whole).astype(np.float64))[1] - 1
    filled = whole > 0
    if not filled.any():
        return 0, np.zeros(values.size, np.int64)
    exact = int((exponents - 24 + zeros)[filled].min())
    unit = max(exact, int(exponents[filled].max()) - bits)
    most = math.floor(math.ldexp(LARGEST, -unit))  # no value is rounded up to infinity
    return unit, np.rint(np.ldexp(values.astype(np.float64), -unit)).clip(-most, most).astype(
        np.int64
    )


def _sum(read: Sequence[Body]) -> tuple[int, np.ndarray]:
    """Exponent and sum of tables, in the smallest unit of theirs; where sizes lie too far apart, in the smallest that 62 bits allow."""
    tops = [body.exponent + int(np.abs(body.table).max()).bit_length() for body in read]
    unit = max(
        min(body.exponent for body in read),
        max(tops) + (len(read) - 1).bit_length() + 1 - MOST_BITS,
    )
    total = np.zeros(read[0].table.shape, np.int64)
    for _, exponent, table in read:
        if not table.any():
            continue
        if exponent < unit:
            total += np.rint(np.ldexp(table.astype(np.float64), exponent - unit)).astype(np.int64)
        else:
            total += table << exponent - unit
    return unit, total


def _write(body: Body, numel: int) -> bytes:
    positions, exponent, table = body
    form, support = wire.pack(positions, numel)
    bits = 1 + max(int(table.max()), -1 - int(table.min()), 0).bit_length()
    head = varint(positions.size) + bytes([form, len(table)]) + varint(table.shape[1])
    head += np.array(exponent, EXPONENT).tobytes() + bytes([bits])
    return head + _pack_cells(table, bits) + support


def _read(body: bytes | memoryview, numel: int) -> Body | None:
    """Return the body of a section for a vector [numel], None where all of it is zero. Raises FrameError. Memory and time are O(numel)."""
    data = memoryview(body)
    count, used = read_varint(data)
    expect(count <= numel, f"a section claims {count} nonzeros of {numel}")
    if not count:
        expect(used == len(data), "bytes follow a section without nonzeros")
        return None
    (form, rows), data = take(data[used:], 2)
    columns, used = read_varint(data)
    sent, data = take(data[used:], EXPONENT.itemsize)
    exponent = int(np.frombuffer(sent, EXPONENT)[0])
    (bits,), data = take(data, 1)
    expect(
        rows in THRESHOLDS and 0 < columns <= _widest(numel),
        f"a section has {rows} rows of {columns} cells for {numel} coordinates",
    )
    expect(
        LOWEST <= exponent <= HIGHEST and 0 < bits <= MOST_BITS + 1,
        "a section has a unit or cells out of range",
    )
    cells, support = take(data, _size(rows * columns, bits))
    expect(form < 64, "a section has a support of an unknown form")
    positions = wire.unpack(support, count, form, numel)
    table = _unpack_cells(cells, rows * columns, bits).reshape(rows, columns)
    return Body(positions, exponent, table)


def _size(cells: int, bits: int) -> int:
    """Bytes of so many cells."""
    return cells * (bits // 8) + (cells * (bits % 8) + 7) // 8


def _pack_cells(table: np.ndarray, bits: int) -> bytes:
    whole, rest = divmod(bits, 8)
    octets = np.ascontiguousarray(table, "<i8").view(np.uint8).reshape(-1, 8)
    low = octets[:, :whole].tobytes()
    if not rest:
        return low
    left = np.unpackbits(octets[:, whole : whole + 1], axis=1)[:, 8 - rest :]
    return low + np.packbits(left).tobytes()


def _unpack_cells(data: memoryview, cells: int, bits: int) -> np.ndarray:
    """int64 [cells]. Raises FrameError where the padding is not zero."""
    whole, rest = divmod(bits, 8)
    octets = np.zeros((cells, 8), np.uint8)
    octets[:, :whole] = np.frombuffer(data[: cells * whole], np.uint8).reshape(cells, whole)
    if rest:
        left = np.unpackbits(np.frombuffer(data[cells * whole :], np.uint8))
        expect(not left[cells * rest :].any(), "cells are padded with something")
        spread = np.zeros((cells, 8), np.uint8)
        spread[:, 8 - rest :] = left[: cells * rest].reshape(cells, rest)
        octets[:, whole] = np.packbits(spread, axis=1)[:, 0]
    values = octets.reshape(-1).view("<i8").astype(np.int64, copy=False)
    return values << 64 - bits >> 64 - bits
