"""Count Sketch: the frames of many clients are added, and only the sum is decoded.

Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", ICALP 2002. Ivkin et al., "Communication-efficient distributed
SGD with sketching", NeurIPS 2019, apply Count Sketch to gradients.

A vector is encoded as a table S of cells. Coordinate x_i is added to one cell of each row r, and is estimated as a median over the rows.
The hash h_r(i) selects the cell, and s_r(i) = ±1 is a random sign:

    S[r, h_r(i)] += s_r(i)·x_i,
    estimate of x_i = median over r of s_r(i)·S[r, h_r(i)].

The decoded vector contains the k estimates with the largest magnitudes; all other coordinates are 0. Hashes and signs are computed from the
seed (kernels/count_sketch.py). All clients encode with the seed of the round, so that the server can add their tables and decode only the
sum. With density 1 (k = n), the codec is unbiased: the estimate from one row has the variance (‖x‖² − x_i²)/columns, and the median of all
rows has at most 2·rows/(rows + 1) times this variance. The codec is contractive only for vectors in which a few coordinates have most of
the norm ‖x‖. It therefore declares no contraction factor, and the memory `residual` refuses it. The strategies `fetchsgd` and
`sketched-sgd` have their own error feedback for sketches.

With cells=int8, the cells of a frame are rounded stochastically to integer multiples of a unit 2^e, which does not change their expected
values. The sum of such frames has the smallest of their units, and is exact if its cells fit into 30 bits. Otherwise, the sum is rounded to
a larger unit. With cells=bf16, cells are added in float32. The frame of the sum contains float32 cells, or bfloat16 cells if bfloat16
represents every cell exactly.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..errors import SpecError
from ..kernels import count_sketch, philox
from ..layout import Layout
from . import floats
from .base import Codec, Context, expect, require
from .frame import EMPTY, Section, read_varint, varint
from .levels import LARGEST
from .selection import check_density, count_at_density, take
from .update import Dense, Sections, Sparse, Update

RATIO = 10.0  # default of the option `ratio`
MAX_ROWS = 15
MAX_COLUMNS_PER_COORDINATE = 8  # a table has at most 8·numel + 64 columns
# Forms: numbers in a frame that stand for the number formats of cells
FLOAT32, BFLOAT16, INT8, INT16, INT32 = range(5)
FORMS = {"fp32": FLOAT32, "bf16": BFLOAT16, "int8": INT8}
TYPES: dict[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"),
    BFLOAT16: np.dtype("<u2"),
    INT8: np.dtype("i1"),
    INT16: np.dtype("<i2"),
    INT32: np.dtype("<i4"),
}
EXPONENT = np.dtype("<i2")
MIN_EXPONENT, MAX_EXPONENT = -200, 127  # range of the exponent e of a unit 2^e
ROUNDING_STREAM = 1 << 17  # index of the random stream that rounds cells


@dataclass(frozen=True)
class Sketch(Codec):
    """A codec that sends a table of cells, from which the receiver estimates the coordinates. Frames with the same seed can be added."""

    rows: int = 5  # Number of rows, odd. More rows make large errors rarer.
    columns: int = 0  # Number of cells per row; 0 = determined by `ratio`
    ratio: float = RATIO  # size in bytes of the float32 vector divided by the size of the table
    cells: Literal["fp32", "bf16", "int8"] = "fp32"  # Precision of the cells
    # Fraction of the coordinates to decode: those with the largest estimates. With density 1, the codec is unbiased.
    density: float = 1 / 100
    name = "sketch"
    id = 22
    source = "Charikar et al. 2002, Ivkin et al. 2019"
    seeded = True
    shares_seed = True
    linear = True
    whole = True
    portable = False  # sums of cells may differ between CPU and GPU in the last bit

    def __post_init__(self) -> None:
        if not (0 < self.rows <= MAX_ROWS and self.rows % 2):
            raise SpecError(f"rows is {self.rows}; give an odd number from 1 to {MAX_ROWS}")
        if self.columns < 0 or self.columns >= 1 << 32:
            raise SpecError(
                f"columns is {self.columns}; give a number of cells per row from 1 to {(1 << 32) - 1}, or leave columns out"
            )
        if not 0 < self.ratio < math.inf:
            raise SpecError(f"ratio is {self.ratio:g}; give a number above 0, such as 10")
        if self.columns and self.ratio != RATIO:
            raise SpecError("codec 'sketch' has both 'columns' and 'ratio'; give one of them")
        check_density(self.density)

    def width(self, numel: int) -> int:
        """Return the number of columns of the table for a vector [numel]."""
        cell = TYPES[FORMS[self.cells]].itemsize
        columns = self.columns or max(1, 4 * numel / (self.ratio * cell * self.rows))
        return math.floor(min(max_columns(numel), columns))

    def count(self, numel: int) -> int:
        """Return how many coordinates of a vector [numel] are decoded."""
        return count_at_density(self.density, numel)

    def variance(self, numel: int) -> float | None:
        if self.density < 1 or not numel or self.cells != "fp32":
            return None
        return 2 * self.rows / (self.rows + 1) * (numel - 1) / self.width(numel)

    def longest_section(self, numel: int) -> int:
        columns, form = self.width(numel), FORMS[self.cells]
        exponent = EXPONENT.itemsize if form == INT8 else 0
        cells = self.rows * columns * TYPES[form].itemsize
        return len(varint(numel) + self._head(numel)) + 1 + exponent + cells

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        cells = count_sketch.sketch(x, self.rows, self.width(x.numel()), seed)
        return Section(x.numel(), self._head(x.numel()) + _write(cells, FORMS[self.cells], seed))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        numel = layout.numel
        read = _read(section)
        return SketchUpdate(numel, _floats(read), seed, read.count)

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        if not any(section.count for section in sections):
            return EMPTY
        read = [_read(section) for section in sections]
        pairs = zip(sections, read, strict=True)
        alike = {(s.count, one.count, one.form >= INT8, *one.raw.shape) for s, one in pairs}
        problem = (
            "sketches of different sizes, densities or cell types cannot be merged; use one codec"
        )
        require(len(alike) == 1, problem)
        first = read[0]
        if first.form >= INT8:
            filled = [(one.exponent, one.raw) for one in read if one.raw.any()]
            empty = MIN_EXPONENT, np.zeros_like(first.raw)
            exponent, total = add_tables(filled, 30) if filled else empty
            for one in (*read, SketchSection(first.count, INT32, exponent, total)):
                _floats(one)  # Raises FrameError if a cell is not finite
            body = _write_integers(exponent, total)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                total = reduce(np.add, map(_floats, read))
            require(kernels.all_finite(total), "the sum of the frames is not finite")
            short = all(one.form == BFLOAT16 for one in read)
            short = short and not (total.view(np.uint32) & 0xFFFF).any()
            body = _write(total, BFLOAT16 if short else FLOAT32, 0)
        head = b"".join(map(varint, (*first.raw.shape, first.count)))
        return Section(sections[0].count, head + body)

    def _head(self, numel: int) -> bytes:
        return b"".join(map(varint, (self.rows, self.width(numel), self.count(numel))))


class SketchSection(NamedTuple):
    """The parsed body of a nonempty section of `sketch`."""

    count: int  # k, the number of coordinates to decode
    form: int  # number format of the cells
    exponent: int  # exponent e of the unit 2^e; 0 for float32 and bfloat16
    raw: np.ndarray  # cells [rows, columns], as in the frame


@dataclass
class SketchUpdate(Update):
    """An update stored as a count sketch. The sketch is decoded when the update is first added or read."""

    numel: int
    cells: np.ndarray  # float32 [rows, columns]
    seed: int
    count: int  # number of coordinates that are decoded

    @cached_property
    def decoded(self) -> Update:
        """The decoded vector: the `count` estimates with the largest magnitudes, and 0 for all other coordinates."""
        estimates = count_sketch.estimates(self.cells, self.numel, self.seed)
        if self.count == self.numel:
            return Dense(estimates)
        at = kernels.top_k([torch.from_numpy(estimates)], self.count).positions.numpy()
        return Sparse(self.numel, at, estimates[at])

    @property
    def positions(self) -> np.ndarray | None:
        return self.decoded.positions

    @property
    def nonzeros(self) -> int:
        return self.count

    def add_to(self, into: Tensor, weight: float = 1.0) -> None:
        self.decoded.add_to(into, weight)

    def block(self, start: int, stop: int) -> np.ndarray:
        return self.decoded.block(start, stop)

    @classmethod
    def _add_each(
        cls, updates: "Sequence[SketchUpdate]", weights: Sequence[float], into: Tensor
    ) -> None:
        for total in sum_sketches(updates, weights):
            total.add_to(into)


def read_at_density(update: Update, codec: Sketch) -> Update:
    """Return a copy of the update whose sketches are decoded at the density of `codec`, not at the density in their frames."""
    if isinstance(update, Sections):
        parts = ((span, read_at_density(part, codec)) for span, part in update.parts)
        return Sections(update.numel, tuple(parts))
    if isinstance(update, SketchUpdate):
        return replace(update, count=codec.count(update.numel))
    return update


def sum_sketches(updates: Sequence[Update], weights: Sequence[float]) -> list[SketchUpdate]:
    """Return the weighted sums of those updates that are sketches. Ignore all other updates.

    Only sketches with the same seed, table shape, vector size and number of decoded coordinates can be added. The returned list has one sum
    for each combination of these four properties, in the order of first occurrence.
    """
    totals: dict[tuple[Any, ...], SketchUpdate] = {}
    for update, weight in zip(updates, weights, strict=True):
        if not isinstance(update, SketchUpdate):
            continue
        key = update.seed, update.cells.shape, update.numel, update.count
        with np.errstate(over="ignore", invalid="ignore"):
            cells = np.float32(weight) * update.cells
            if key in totals:
                cells = totals[key].cells + cells
        totals[key] = replace(update, cells=cells)
    return list(totals.values())


def max_columns(numel: int) -> int:
    """Return the largest permitted number of columns of a sketch of a vector [numel]."""
    return MAX_COLUMNS_PER_COORDINATE * numel + 64


def _write(cells: np.ndarray, form: int, seed: int) -> bytes:
    """Encode float32 cells [rows, columns]. Return the form (number format) and the encoded cells."""
    if form == FLOAT32:
        return bytes([form]) + cells.astype(TYPES[form], copy=False).tobytes()
    if form == BFLOAT16:
        return bytes([form]) + floats.to_bfloat16(torch.from_numpy(cells)).tobytes()
    exponent = _exponent(float(np.abs(cells).max(initial=0)))
    key = seed ^ zlib.crc32(cells.tobytes()) << 32
    random = philox.words(key, cells.size, 0, ROUNDING_STREAM).reshape(cells.shape)
    # Cells are clipped, so that rounding up does not exceed the largest float32.
    top = min(127, math.floor(math.ldexp(LARGEST, -exponent)))
    rounded = np.floor(cells * np.float64(2.0**-exponent) + random * 2.0**-32)
    return _write_integers(exponent, rounded.clip(-top, top).astype(np.int64))


def _exponent(largest: float) -> int:
    """Return the smallest exponent e for which `largest` is at most 127·2^e."""
    if not largest:
        return MIN_EXPONENT
    e = math.frexp(largest / 127)[1]
    return max(MIN_EXPONENT, e - 1 if largest <= math.ldexp(127, e - 1) else e)


def _write_integers(exponent: int, integers: np.ndarray) -> bytes:
    """Encode cells that are int64 multiples of 2^exponent. Return the form, the exponent and the encoded cells."""
    largest = int(np.abs(integers).max(initial=0))
    form = INT8 if largest <= 127 else INT16 if largest <= 32767 else INT32
    cells = integers.astype(TYPES[form]).tobytes()
    return bytes([form]) + np.array(exponent, EXPONENT).tobytes() + cells


def add_tables(tables: Sequence[tuple[int, np.ndarray]], bits: int) -> tuple[int, np.ndarray]:
    """Add integer tables of one shape.

    `tables`: pairs of an exponent e and a table in units of 2^e. Return such a pair for the sum, with an int64 table. The unit of the sum
    is the smallest unit of the tables, or larger if an entry of the sum could have more than `bits` bits.
    """
    longest = max(e + int(np.abs(table.astype(np.int64)).max()).bit_length() for e, table in tables)
    top = longest + (len(tables) - 1).bit_length()  # every entry of the sum is below 2^top
    unit = max(min(e for e, _ in tables), top - bits)
    total = np.zeros(tables[0][1].shape, np.int64)
    for e, table in tables:
        if e >= unit:
            total += table.astype(np.int64) << e - unit
        else:
            total += np.rint(np.ldexp(table.astype(np.float64), e - unit)).astype(np.int64)
    return unit, total


def _read(section: Section) -> SketchSection:
    """Parse a section that is not empty. Raises FrameError."""
    data, head = memoryview(section.body), []
    for _ in range(3):
        number, used = read_varint(data)
        head.append(number)
        data = data[used:]
    rows, columns, count = head
    first, data = take(data, 1)
    form, exponent = first[0], 0
    valid = 0 < rows <= MAX_ROWS and rows % 2 == 1 and 0 < columns <= max_columns(section.count)
    expect(
        valid,
        f"a sketch of {rows} rows of {columns} cells is impossible for {section.count} coordinates",
    )
    possible = 0 < count <= section.count
    expect(possible, f"{count} of {section.count} coordinates of a sketch are to be decoded")
    expect(form in TYPES, f"the cells of a sketch have the unknown number format {form}")
    if form >= INT8:
        sent, data = take(data, EXPONENT.itemsize)
        exponent = int(np.frombuffer(sent, EXPONENT)[0])
        expect(MIN_EXPONENT <= exponent <= MAX_EXPONENT, "the unit of a sketch is out of range")
    fits = len(data) == rows * columns * TYPES[form].itemsize
    expect(fits, f"the sketch has {len(data)} bytes, which are not {rows} rows of {columns} cells")
    raw = np.frombuffer(data, TYPES[form]).reshape(rows, columns)
    return SketchSection(count, form, exponent, raw)


def _floats(body: SketchSection) -> np.ndarray:
    """Return the cells as float32. Raises FrameError if a cell is not finite."""
    _, form, exponent, raw = body
    if form == FLOAT32:
        cells = raw.astype(np.float32)  # an aligned copy, which is faster to read than the frame
    elif form == BFLOAT16:
        cells = floats.from_bfloat16(raw)
    else:
        with np.errstate(over="ignore"):
            cells = (raw * np.float64(2.0**exponent)).astype(np.float32)
    expect(kernels.all_finite(cells), "a sketch has cells that are not finite")
    return cells
