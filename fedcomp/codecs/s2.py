"""S2 Reducer sends the positions of nonzero coordinates and a count sketch of their values.

Ge et al., "S2 Reducer: high-performance sparse communication to accelerate distributed deep learning", 2021.

The support of a vector is the set of positions of its nonzero coordinates. The values of the nonzero coordinates are added to the cells of
a table S. In each row r of the table, a hash selects the cell h_r(i) for coordinate i, and s_r(i) = ±1 is a random sign:

    S[r, h_r(i)] += s_r(i)·x_i for every i with x_i ≠ 0.

Frames can be added: the sum of frames has the union of their supports and the sum of their tables. From the union of the supports and the
table, the receiver recovers the values by peeling (kernels/peeling.py): a cell of only one unknown coordinate gives its value, which is
then subtracted from the other cells of this coordinate. For a union of 10⁴ or more positions, a table with 1.25 cells per position usually
suffices to recover all values exactly. For 10³ positions, about 1.6 cells per position are needed. In about one of a thousand tables, two
coordinates are assigned to the same cell in every row. The values of two such coordinates cannot be recovered exactly and are estimated by
least squares. The attribute `missed` of the decoded update is the number of estimated values.

The codec is useful if many frames with overlapping supports pass through nodes that can only add numbers, such as network switches,
all-reduce, or secure aggregation. Nodes that can decode frames do not need `s2`: they can forward the sum of the decoded values. For each
nonzero, `topk` needs 5.0 bytes, and `s2` 5.4 bytes. For updates of the task `digits`, the sum of 128 frames of `s2` is 86 % smaller than
128 frames of `topk:density=1%` (benchmarks/s2.py). The sum of 8 frames is only 12 % smaller than 8 frames of `topk`, and hardly smaller at
all if the supports are random.

With the spec `topk:density=1%+s2`, `topk` selects coordinates and `s2` encodes these coordinates. Frames can be added only if their tables
have the same shape. The option `columns` sets the number of columns. By default, the table has room for union·k values. Here, k is the
largest number of coordinates that the first codec can select. If `s2` is used alone, k is the number of nonzeros in the vector. The option
`union` is the expected size of the union of all supports, divided by k. If it is too small, some values of the sum are estimated instead of
recovered exactly. The encoder checks that its own values can be recovered from a table with the default number of columns. If they cannot,
it doubles this number. The frame can then only be added to frames with the doubled number of columns.

Unlike in the paper, supports are entropy-coded instead of sent as bitmaps. Cells are integers in units of a power of two 2^e, so that
peeling subtracts values exactly; with float32 cells, rounding errors would accumulate. With values=fp32, the unit 2^e is the largest power
of two that divides all values. A value has at most 48 bits, and fewer bits in a vector with 2¹⁴ or more nonzeros, so that sums do not
overflow. If the largest value needs more bits, the unit is larger, and values are rounded. With values=int24 or int16, values are rounded
to integers of 24 or 16 bits (including the sign), in a unit that suits the largest value. A cell with values=int24 takes about 27 bits; a
float32 cell would take 32 bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import kernels, spec
from ..errors import SpecError
from ..kernels import Rows, peeling, split_runs
from ..kernels import positions as positions_format
from ..layout import Layout
from .base import Codec, Context, expect, require
from .frame import EMPTY, Section, read_varint, varint
from .levels import LARGEST
from .product import Pair
from .selection import take
from .sketch import EXPONENT, add_tables, max_columns
from .update import Sparse, Update

# Number of rows of a table → number of cells per nonzero, in all rows together, that peeling needs if there are many nonzeros.
THRESHOLDS = {3: 1.222, 4: 1.295, 5: 1.425, 6: 1.570, 7: 1.722}
# Option `values` → largest number of bits in the magnitude of a value
BITS = {"fp32": 48, "int24": 23, "int16": 15}
MAX_BITS = 62  # largest number of bits in the magnitude of a sum
MIN_EXPONENT, MAX_EXPONENT = -149, 127  # range of the exponent e of a unit 2^e


@dataclass(frozen=True)
class S2(Codec):
    """A codec that sends all nonzero coordinates in frames that can be added."""

    rows: int = 3  # Number of rows of the table; 3 rows need the fewest cells
    columns: int = 0  # Number of cells per row; 0 = as many as the nonzeros and `union` need
    # Expected number of nonzeros in the sum of all frames, as a multiple of the number of nonzeros in one frame. 1 = all frames have their
    # nonzeros at the same positions.
    union: float = 1.0
    values: Literal["fp32", "int24", "int16"] = "fp32"  # precision of the values
    name = "s2"
    id = 23
    source = "Ge et al. 2021"
    linear = True
    seeded = True
    shares_seed = True
    whole = True

    def __post_init__(self) -> None:
        spec.check_ranges(self, rows=(3, max(THRESHOLDS)), union=(1, math.inf))
        if not 0 <= self.columns < 1 << 28:
            raise SpecError(
                f"columns is {self.columns}; give a number of cells per row from 1 to {(1 << 28) - 1}, or leave columns out"
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
        self, positions: np.ndarray, values: np.ndarray, numel: int, max_count: int, seed: int
    ) -> Section:
        """Encode a sparse vector [numel] with the float32 `values` at the ascending int64 `positions`.

        `max_count`: the number k in the module docstring, which determines the default number of columns.
        """
        exponent, integers = _integers(values, self._bits(positions.size))
        positions, integers = positions[integers != 0], integers[integers != 0]
        if not positions.size:
            return Section(numel, varint(0)) if numel else EMPTY
        needed = self.columns or self.width(math.ceil(min(numel, self.union * max_count)))
        columns = min(needed, _max_columns(numel))
        while True:
            where = peeling.key_cells(positions, self.rows, columns, seed)
            table = peeling.sums(where, integers)
            body = _write(S2Section(positions, exponent, table.reshape(self.rows, columns)), numel)
            if (
                self.columns
                or columns == _max_columns(numel)
                or np.array_equal(peeling.recover(where, table).values, integers)
            ):
                return Section(numel, body)
            columns = min(2 * columns, _max_columns(numel))

    def width(self, keys: int) -> int:
        """Return the number of columns that a table needs so that `keys` values can be recovered."""
        cells = max(1.25 * keys, 1.1 * keys + 15 * math.sqrt(keys))
        return max(1, math.ceil(cells * THRESHOLDS[self.rows] / THRESHOLDS[3] / self.rows))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        numel = layout.numel
        read = _read(section.body, numel)
        if read is None:
            return RecoveredUpdate.zero(numel)
        positions, exponent, table = read
        rows, columns = table.shape
        where = peeling.key_cells(positions, rows, columns, seed)
        recovered = peeling.recover(where, table.reshape(-1))
        values = np.ldexp(recovered.values.astype(np.float64), exponent).clip(-LARGEST, LARGEST)
        missed = positions.size - recovered.peeled - recovered.solved
        return RecoveredUpdate(numel, positions, values.astype(np.float32), missed)

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        sizes = {section.count for section in sections}
        require(len(sizes) == 1, "frames of vectors of different sizes cannot be merged")
        numel = sizes.pop()
        read = [_read(section.body, numel) for section in sections if numel]
        bodies = [body for body in read if body is not None]
        if not bodies:
            return sections[0]
        require(
            len({body.table.shape for body in bodies}) == 1,
            "tables of different sizes cannot be merged; give all clients the same 'columns', or the same 'union' and a first codec "
            "with the same density",
        )
        unit, total = add_tables([(body.exponent, body.table) for body in bodies], MAX_BITS - 1)
        top = math.ldexp(int(np.abs(total).max()), unit)
        is_finite = len(bodies) == 1 or top <= LARGEST and unit <= MAX_EXPONENT
        require(is_finite, "the sum of the frames is not finite")
        union = np.unique(np.concatenate([body.positions for body in bodies]))
        return Section(numel, _write(S2Section(union, unit, total), numel))

    def _bits(self, keys: int) -> int:
        """Return the largest number of bits in the magnitude of a value, so that the sum of `keys` values stays below 2⁶²."""
        return min(BITS[self.values], MAX_BITS - keys.bit_length())


@dataclass(frozen=True)
class SparseS2(Pair):
    """A codec such as `topk:density=1%+s2`: the first codec selects coordinates, and `s2` encodes these coordinates.

    The frames can be decoded by any `s2` codec, whatever its options and its first codec are.
    """

    second: S2
    id = S2.id
    linear = True
    seeded = True
    shares_seed = True
    whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "name", S2.name)
        if self.first.draws:
            raise SpecError(
                f"+s2 is not needed with '{self.first.name}': all clients send the same coordinates, so frames can be added; leave +s2 out"
            )

    def contraction(self, numel: int) -> float | None:
        first = self.first.contraction(numel)
        second = self.second.contraction(self.first.max_count(numel))
        return None if first is None else first * second

    def _encode_rows(self, rows: Rows, seeds: Sequence[int], context: Context) -> list[Section]:
        (positions, counts), values = self.first.choose(rows, seeds)
        numel = rows[0].numel()
        max_count = self.first.max_count(numel)
        runs = [split_runs(v.cpu().numpy(), counts) for v in (positions, values)]
        sent = zip(*runs, seeds, strict=True)
        return [self.second.pack_sparse(at, own, numel, max_count, seed) for at, own, seed in sent]

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        return self.second._decode_row(section, layout, seed)

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        return self.second._merge_sections(sections)


@dataclass
class RecoveredUpdate(Sparse):
    """A sparse update whose values were recovered from a count sketch."""

    missed: int = 0  # number of values that are estimated instead of recovered exactly


class S2Section(NamedTuple):
    """The parsed body of a section with nonzeros."""

    positions: np.ndarray  # positions of the nonzeros, int64, ascending; at least one
    exponent: int  # the exponent e of the unit 2^e
    table: np.ndarray  # cells in units of 2^e, int64 [rows, columns]


def _max_columns(numel: int) -> int:
    """Return the largest permitted number of columns of a table for a vector [numel]."""
    return min(max_columns(numel), (1 << 31) // max(THRESHOLDS) - 1)


def _integers(values: np.ndarray, bits: int) -> tuple[int, np.ndarray]:
    """Round the values [k] to multiples of 2^e. Return the exponent e and the multiples, which are int64 numbers of at most `bits` bits."""
    mantissas, exponents = np.frexp(values.astype(np.float64))
    whole = np.abs(np.ldexp(mantissas, 24)).astype(np.int64)
    zeros = np.frexp((whole & -whole).astype(np.float64))[1] - 1
    filled = whole > 0
    if not filled.any():
        return 0, np.zeros(values.size, np.int64)
    exact = int((exponents - 24 + zeros)[filled].min())
    unit = max(exact, int(exponents[filled].max()) - bits)
    # Multiples are clipped to `top`, so that rounding does not exceed the range of float32.
    top = math.floor(math.ldexp(LARGEST, -unit))
    multiples = np.rint(np.ldexp(values.astype(np.float64), -unit))
    return unit, multiples.clip(-top, top).astype(np.int64)


def _write(body: S2Section, numel: int) -> bytes:
    positions, exponent, table = body
    form, support = positions_format.pack(positions, numel)
    bits = 1 + max(int(table.max()), -1 - int(table.min()), 0).bit_length()
    head = varint(positions.size) + bytes([form, len(table)]) + varint(table.shape[1])
    head += np.array(exponent, EXPONENT).tobytes() + bytes([bits])
    return head + _pack_cells(table, bits) + support


def _read(body: bytes | memoryview, numel: int) -> S2Section | None:
    """Parse the body of a section for a vector [numel]. Return None if all coordinates are zero. Raises FrameError."""
    data = memoryview(body)
    count, used = read_varint(data)
    expect(count <= numel, f"{count} nonzeros are encoded, but the vector has size {numel}")
    if not count:
        expect(used == len(data), "more bytes follow, although all values are zero")
        return None
    (form, rows), data = take(data[used:], 2)
    columns, used = read_varint(data)
    sent, data = take(data[used:], EXPONENT.itemsize)
    exponent = int(np.frombuffer(sent, EXPONENT)[0])
    (bits,), data = take(data, 1)
    fits = rows in THRESHOLDS and 0 < columns <= _max_columns(numel)
    expect(fits, f"a table of {rows} rows of {columns} cells is impossible for {numel} coordinates")
    in_range = MIN_EXPONENT <= exponent <= MAX_EXPONENT and 0 < bits <= MAX_BITS + 1
    expect(in_range, "the exponent or the cell size of the table is out of range")
    cells, support = take(data, _size(rows * columns, bits))
    expect(form < 64, f"the list of positions has the unknown format {form}")
    positions = positions_format.unpack(support, count, form, numel)
    table = _unpack_cells(cells, rows * columns, bits).reshape(rows, columns)
    return S2Section(positions, exponent, table)


def _size(cells: int, bits: int) -> int:
    return cells * (bits // 8) + (cells * (bits % 8) + 7) // 8


def _pack_cells(table: np.ndarray, bits: int) -> bytes:
    whole, rest = divmod(bits, 8)
    octets = np.ascontiguousarray(table, "<i8").view(np.uint8).reshape(-1, 8)
    left = np.unpackbits(octets[:, whole : whole + 1], axis=1)[:, 8 - rest :]
    return octets[:, :whole].tobytes() + np.packbits(left).tobytes()


def _unpack_cells(data: memoryview, cells: int, bits: int) -> np.ndarray:
    """Decode the cells in `data` into int64 [cells]. Raises FrameError if the padding bits are not zero."""
    whole, rest = divmod(bits, 8)
    octets = np.zeros((cells, 8), np.uint8)
    octets[:, :whole] = np.frombuffer(data[: cells * whole], np.uint8).reshape(cells, whole)
    spread = np.zeros((cells, 8), np.uint8)
    left = kernels.unpack_signs(data[cells * whole :], cells * rest)
    spread[:, 8 - rest :] = left.reshape(cells, rest)
    octets[:, whole] = np.packbits(spread, axis=1)[:, 0]
    values = octets.reshape(-1).view("<i8").astype(np.int64, copy=False)
    return values << 64 - bits >> 64 - bits
