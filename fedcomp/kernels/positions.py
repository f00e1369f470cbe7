"""Strictly increasing positions on the wire, in whichever form is the shortest.

    form 0..40    Rice code (kernels/rice.py) with this parameter; with parameter 0 it is a bitmap, cut off behind the last position
    form 41       Rice code in blocks
    form 42..62   Rice code of the coordinates that are not sent, with parameter form − 42; no bytes where all are sent
    form 63       Rice code of the coordinates that are not sent, in blocks

Blocks follow a density that changes along the vector: from layer to layer, and where large values lie close together. A block is a number
of positions and not a range of coordinates: so dense ranges are cut finer, empty ones cost nothing, and no counts are sent.

    head       one byte: s in its three low bits, w − 2 in the next two
    offsets    w bits for each block of u·2^s positions, the last may have fewer; u = 4, or 16 from 4096 positions on
    code       unary stream, low stream and padding of all blocks; a block's parameter is its offset + max(0, min(b*, 37) + w − 2^w)

The form travels outside. Of equally long codes the first is taken in the order of this page, with the smallest s, then w, then offsets.
Blocks are tried from 32 positions on, and used where they save more than one byte in 64, since codes without them are read faster. The
coordinates that are not sent are tried where they are fewer than half. `unpack` accepts every form, also one that is not the shortest.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import FrameError
from . import rice
from .rice import WIDEST
from .rows import split_runs

BLOCKS, MISSING = WIDEST + 1, WIDEST + 2  # forms; MISSING is the first for what is not sent
LAST = 63  # the form of what is not sent, in blocks
BLOCKED, MANY = 32, 4096  # positions from which blocks are tried, and from which they are larger
UNITS = 4, 16  # u below and from MANY
SIZES, WIDTHS = 8, (2, 3, 4)
COLUMNS = 1 << WIDTHS[-1]  # parameters that blocks choose among
GAIN = 6  # blocks have to save more than one byte in 2^GAIN


class Plan(NamedTuple):
    """The coding of m rows: int64 [m], except `each`."""

    form: np.ndarray  # of 0..41
    size: np.ndarray  # s, 0 without blocks
    width: np.ndarray  # w, 0 without blocks
    each: np.ndarray  # the parameter of every position of all rows


class Cut(NamedTuple):
    """The blocks of all rows: int64 [blocks]."""

    row: np.ndarray
    index: np.ndarray  # within the row
    start: np.ndarray  # the first of its positions
    length: np.ndarray


def pack(positions: np.ndarray, numel: int) -> tuple[int, bytes]:
    """Return the form and the code of positions (int64 [count], strictly increasing, below numel)."""
    (form,), (code,) = pack_rows(positions, np.array([positions.size]), numel)
    return form, code


def pack_rows(
    positions: np.ndarray, counts: np.ndarray, numel: int
) -> tuple[list[int], list[bytes]]:
    """`pack` of m rows whose positions follow one another, counts [m] long."""
    if (2 * counts <= numel).all():
        return _pack(positions, counts, numel)
    rows, made = (
        split_runs(positions, counts),
        [(MISSING, b"")] * len(counts),
    )  # the form of a row with all positions
    some = [i for i, row in enumerate(rows) if row.size < numel]
    for i, one in zip(some, _pack_list([rows[i] for i in some], numel, WIDEST), strict=True):
        made[i] = one
    most = [i for i in some if 2 * rows[i].size > numel]
    others = [_others(rows[i], numel) for i in most]
    for i, (form, code) in zip(most, _pack_list(others, numel, LAST - 1 - MISSING), strict=True):
        if len(code) < len(made[i][1]):
            made[i] = LAST if form == BLOCKS else MISSING + form, code
    return [form for form, _ in made], [code for _, code in made]


def unpack(data: bytes | memoryview, count: int, form: int, numel: int) -> np.ndarray:
    """Return the `count` ≥ 1 positions below numel, int64, of a form and a code. Memory and time are O(numel).

    Raises FrameError unless `data` is a whole code of so many positions.
    """
    (row,) = unpack_rows([data], [count], [form], numel)
    if isinstance(row, FrameError):
        raise row
    return row


def unpack_rows(
    codes: Sequence[bytes | memoryview],
    each_count: Sequence[int],
    each_form: Sequence[int],
    numel: int,
) -> list[np.ndarray | FrameError]:
    """`unpack` of m codes together, each with its count and form; a FrameError in the place of a bad one."""
    if len(codes) == 1 and each_form[0] <= WIDEST:
        try:
            return [rice.unpack(codes[0], each_count[0], each_form[0], numel)]
        except FrameError as error:
            return [error]
    counts, forms = np.array(each_count), np.array(each_form)
    missing = (2 * counts > numel) & (forms >= MISSING) & (counts < numel)
    coded = np.where(missing, numel - counts, counts)
    forms_of_coded = np.where(missing & (forms == LAST), BLOCKS, forms - MISSING * missing)
    full = np.flatnonzero((forms == MISSING) & (counts == numel)).tolist()
    rows = {i: np.arange(numel) for i in full if not len(codes[i])}
    kept = np.flatnonzero(_fits(codes, coded, forms_of_coded, numel))
    if kept.size:
        some = [codes[i] for i in kept.tolist()]
        positions, good = _unpack(some, coded[kept], forms_of_coded[kept], numel)
        read = zip(kept.tolist(), split_runs(positions, coded[kept]), good.tolist(), strict=True)
        rows |= {i: _others(row, numel) if missing[i] else row for i, row, ok in read if ok}
    return [
        rows[i]
        if i in rows
        else FrameError(
            f"{len(code)} bytes are not the code of these positions of a vector of {numel}; the frame is damaged or of another size"
        )
        for i, code in enumerate(codes)
    ]


def _pack_list(rows: list[np.ndarray], numel: int, widest: int) -> list[tuple[int, bytes]]:
    """A form of 0..41 and a code of each row."""
    if not rows:
        return []
    counts = np.array([row.size for row in rows])
    return list(zip(*_pack(np.concatenate(rows), counts, numel, widest), strict=True))


def _others(positions: np.ndarray, numel: int) -> np.ndarray:
    """Return the coordinates of a vector [numel] that are not among the positions."""
    other = np.ones(numel, np.bool_)
    other[positions] = False
    return np.flatnonzero(other)


def _pack(
    positions: np.ndarray, counts: np.ndarray, numel: int, widest: int = WIDEST
) -> tuple[list[int], list[bytes]]:
    """`pack_rows` in forms 0..41, one parameter being at most `widest`."""
    plan, lead = _plan(positions, counts, numel, widest), None
    blocked = np.flatnonzero(plan.width)
    if blocked.size:
        cut = _cut(counts, plan.size, plan.width)
        width = plan.width[cut.row]
        values = plan.each[cut.start] - _begin(rice.parameters(counts, numel)[cut.row], width)
        sent = width > 0
        heads = plan.size[blocked] | plan.width[blocked] - WIDTHS[0] << 3
        head = blocked, np.full(blocked.size, 8), heads
        # A row's head, then its offsets.
        order = np.argsort(np.append(blocked, cut.row[sent]), kind="stable")
        fields = (
            np.append(first, rest[sent])[order]
            for first, rest in zip(head, (cut.row, width, values), strict=True)
        )
        lead = rice.Fields(*fields)
    return plan.form.tolist(), rice.pack_rows(positions, counts, plan.each, lead)


def _fits(
    codes: Sequence[bytes | memoryview], counts: np.ndarray, forms: np.ndarray, numel: int
) -> np.ndarray:
    """Return whether the counts and forms 0..41 of codes are possible, going by their lengths and heads: bool [m]."""
    bits = 8 * np.array([len(code) for code in codes], np.int64)
    most = counts * (WIDEST + WIDTHS[-1] + 1) + numel + 64
    fits = (0 < counts) & (counts <= numel) & (0 <= forms) & (forms <= BLOCKS)
    fits &= (counts <= bits) & (bits < most)
    for i in np.flatnonzero(fits & (forms == BLOCKS)).tolist():
        fits[i] = counts[i] >= BLOCKED and codes[i][0] < SIZES * len(WIDTHS)
    return fits


def _unpack(
    codes: Sequence[bytes | memoryview], counts: np.ndarray, forms: np.ndarray, numel: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of rows that fit, one row after the other, and whether each row is valid, bool [m]."""
    raw, sizes = rice.padded(codes), np.array([len(code) for code in codes], np.int64)
    ends = 8 * sizes.cumsum()
    starts, least, blocked = ends - 8 * sizes, forms, forms == BLOCKS
    parameters, lengths, lows = forms, counts, forms * counts
    if blocked.any():
        heads = np.where(blocked, raw[starts // 8], np.int64(0))
        size, width = heads % SIZES, np.where(blocked, WIDTHS[0] + heads // SIZES, 0)
        cut = _cut(counts, size, width)
        many, first, lengths = width[cut.row], np.flatnonzero(cut.index == 0), cut.length
        at = np.minimum(starts[cut.row] + 8 + cut.index * many, ends[-1])
        begin = _begin(rice.parameters(counts, numel)[cut.row], many)
        parameters = np.where(many > 0, begin + rice.read_bits(raw, many, at), forms[cut.row])
        least = np.minimum.reduceat(parameters, first)
        lows = np.add.reduceat(parameters * lengths, first)
        starts = np.minimum(starts + blocked * 8 + np.add.reduceat(many, first), ends)
    short = ends - starts - counts - lows < (numel >> least) + 8
    positions, good = rice.unpack_rows(raw, starts, ends, counts, parameters, lengths, numel)
    return positions, good & short


def _cut(counts: np.ndarray, size: np.ndarray, width: np.ndarray) -> Cut:
    """Return the blocks of rows with s and w [m]; a row without blocks counts as one block."""
    return _pieces(counts, np.where(width > 0, _unit(counts) << size, np.maximum(counts, 1)))


def _pieces(counts: np.ndarray, length: np.ndarray) -> Cut:
    """Rows, counts [m] long, cut into pieces of length [m]."""
    many = -(-counts // length)
    row = np.arange(counts.size).repeat(many)
    index = np.arange(row.size) - (many.cumsum() - many)[row]
    start = index * length[row]
    return Cut(
        row,
        index,
        (counts.cumsum() - counts)[row] + start,
        np.minimum(length[row], counts[row] - start),
    )


def _unit(counts: np.ndarray) -> np.ndarray:
    """u of each row."""
    return np.where(counts < MANY, *UNITS)


def _begin(b: np.ndarray, width: int | np.ndarray) -> np.ndarray:
    """Return the lowest parameter that offsets of `width` bits reach. More positions lie closer than the average than farther apart."""
    return np.maximum(0, np.minimum(b, WIDEST + 1 - WIDTHS[-1]) + width - (1 << width))


def _plan(positions: np.ndarray, counts: np.ndarray, numel: int, widest: int = WIDEST) -> Plan:
    """Return the coding of each row that takes the fewest bytes."""
    tried = counts >= BLOCKED
    form = rice.best_parameters(positions, counts, numel, widest)
    size, width = np.zeros((2, counts.size), np.int64)
    each = form.repeat(counts)
    if tried.any():
        rest, b, unit = rice.rests(positions, counts), rice.parameters(counts, numel), _unit(counts)
        lengths = (rice.sums((rest >> each) + 1 + each, counts) + 7) // 8
        for alike in sorted(set(zip(b[tried].tolist(), unit[tried].tolist()))):
            rows = tried & (b == alike[0]) & (unit == alike[1])
            inside = rows.repeat(counts)
            size[rows], width[rows], each[inside] = _blocks(
                rest[inside], counts[rows], each[inside], lengths[rows], *alike
            )
    return Plan(np.where(width > 0, BLOCKS, form), size, width, each)


def _blocks(
    rest: np.ndarray, counts: np.ndarray, each: np.ndarray, limit: np.ndarray, b: int, unit: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """s, w and the parameters of rows of one b* and u; 0, 0 and what `each` had where blocks take hardly fewer bytes than limit [m]."""
    cut, first = _pieces(counts, np.full(counts.size, unit)), _begin(b, WIDTHS[-1])
    row, index, reach = cut.row, cut.index, range(first, first + COLUMNS)
    table = np.stack(
        [np.add.reduceat(rest >> column, cut.start) + (column + 1) * cut.length for column in reach]
    )
    tables, lengths = [], []
    for s in range(SIZES):
        if s:
            even = np.flatnonzero(index % 2 == 0)
            row, index, table = row[even], index[even] // 2, np.add.reduceat(table, even, axis=1)
        runs, many = np.flatnonzero(index == 0), np.bincount(row)
        bits = [np.add.reduceat(_window(table, b, w).min(0), runs) + w * many for w in WIDTHS]
        tables.append(table)
        lengths += [1 + (bits_of_width + 7) // 8 for bits_of_width in bits]
        if many.max() == 1:
            break
    shorter = np.min(lengths, axis=0) < limit - (limit >> GAIN)
    choice = np.where(shorter, np.argmin(lengths, axis=0), -1)
    size = np.where(shorter, choice // len(WIDTHS), 0)
    width = np.where(shorter, WIDTHS[0] + choice % len(WIDTHS), 0)
    for chosen in set(choice[shorter].tolist()):
        s, w = chosen // len(WIDTHS), WIDTHS[chosen % len(WIDTHS)]
        parameters = _begin(b, w) + _window(tables[s], b, w).argmin(0)
        spread = parameters.repeat(_pieces(counts, np.full(counts.size, unit << s)).length)
        each = np.where((choice == chosen).repeat(counts), spread, each)
    return size, width, each


def _window(table: np.ndarray, b: int, width: int) -> np.ndarray:
    """Return the rows of a table that offsets of `width` bits reach."""
    first = int(_begin(b, width) - _begin(b, WIDTHS[-1]))
    return table[first : first + (1 << width)]
