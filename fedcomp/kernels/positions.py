"""Encoding of strictly increasing positions, such as the indices of a sparse vector, in one of several formats, called forms:

    Forms 0..40: a Rice code (kernels/rice.py) whose parameter is the form. Form 0 is a bitmap that ends at the last position.
    Form 41: a Rice code in blocks, each of which has its own parameter.
    Forms 42..62: a Rice code of the complement (the coordinates that are not positions) with parameter form − 42. If the complement is
                  empty, the code has no bytes.
    Form 63: a Rice code of the complement in blocks.

Blocks are useful if the density changes along the vector. A code in blocks (docs/reference/frame-format.md) has a block size exponent s
from 0 to 7 and an offset width w from 2 to 4. A block has u·2^s positions, and the last block may have fewer. The unit u is 4 for fewer
than 4096 positions, and 16 otherwise. Each block has an offset, a number of w bits, which selects its Rice parameter.

The encoder chooses the form with the shortest code. The form is not part of the code. Among codes of equal length, the encoder prefers the
smallest form, then the smallest s, the smallest w and the smallest offsets. Because codes without blocks are decoded faster, blocks are
used only for 32 or more positions, and only if they shorten the code by more than 1/64 of its bytes. The complement is tried if it is
smaller than the set of positions. The decoder accepts every form, not only the shortest.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from ..errors import FrameError
from . import rice
from .parallel import split_runs
from .rice import WIDEST

# BLOCKS: form of a Rice code in blocks. COMPLEMENT: first form that encodes the complement. COMPLEMENT_BLOCKED: form of the complement in
# blocks.
BLOCKS, COMPLEMENT, COMPLEMENT_BLOCKED = WIDEST + 1, WIDEST + 2, 63
MIN_BLOCKED_COUNT = 32  # blocks are tried for at least this many positions
LARGE_COUNT, UNITS = 4096, (4, 16)  # the unit u for fewer than LARGE_COUNT positions, and otherwise
SIZES, WIDTHS = 8, (2, 3, 4)  # number of block size exponents s, and the offset widths w
COLUMNS = 1 << WIDTHS[-1]  # number of Rice parameters that are tried for a block
GAIN = 6  # blocks must shorten the code by more than 2^−GAIN of its bytes


class Blocks(NamedTuple):
    """The blocks of m rows, sorted by row. A row contains the positions of one vector. Fields are int64, with one entry per block."""

    row: np.ndarray
    number: np.ndarray  # index of the block within its row
    start: np.ndarray  # index of the first position of the block
    length: np.ndarray


def pack(positions: np.ndarray, numel: int) -> tuple[int, bytes]:
    """Encode positions, int64 [count], strictly increasing and below numel. Return the form and the code."""
    (form,), (code,) = pack_rows(positions, np.array([positions.size]), numel)
    return form, code


def pack_rows(
    positions: np.ndarray, counts: np.ndarray, numel: int
) -> tuple[list[int], list[bytes]]:
    """Encode m rows of `counts` [m] positions, one row per vector. Return the form and the code of each row."""
    if (2 * counts <= numel).all():
        return _pack(positions, counts, numel)
    rows = split_runs(positions, counts)
    # The form and the code of a row with all coordinates. They are replaced below for every row with fewer coordinates.
    packed = [(COMPLEMENT, b"")] * len(counts)
    partial = [i for i, row in enumerate(rows) if row.size < numel]
    codes = _pack_list([rows[i] for i in partial], numel, WIDEST)
    for i, form_and_code in zip(partial, codes, strict=True):
        packed[i] = form_and_code
    dense = [i for i in partial if 2 * rows[i].size > numel]
    complements = [_complement(rows[i], numel) for i in dense]
    codes = _pack_list(complements, numel, COMPLEMENT_BLOCKED - 1 - COMPLEMENT)
    for i, (form, code) in zip(dense, codes, strict=True):
        if len(code) < len(packed[i][1]):
            packed[i] = COMPLEMENT_BLOCKED if form == BLOCKS else COMPLEMENT + form, code
    return [form for form, _ in packed], [code for _, code in packed]


def unpack(data: bytes | memoryview, count: int, form: int, numel: int) -> np.ndarray:
    """Decode `count` ≥ 1 positions below numel into int64. Time and memory are O(numel).

    Raises FrameError unless `data` is exactly one code of `count` positions in this form.
    """
    (row,) = unpack_rows([data], [count], [form], numel)
    if isinstance(row, FrameError):
        raise row
    return row


def unpack_rows(
    codes: Sequence[bytes | memoryview], counts: Sequence[int], forms: Sequence[int], numel: int
) -> list[np.ndarray | FrameError]:
    """Decode m codes into positions, or into a FrameError for an invalid code."""
    if len(codes) == 1 and forms[0] <= WIDEST:
        try:
            return [rice.unpack(codes[0], counts[0], forms[0], numel)]
        except FrameError as error:
            return [error]
    count_array, form_array = np.array(counts), np.array(forms)
    missing = (2 * count_array > numel) & (form_array >= COMPLEMENT) & (count_array < numel)
    coded = np.where(missing, numel - count_array, count_array)
    in_blocks = missing & (form_array == COMPLEMENT_BLOCKED)
    forms_of_coded = np.where(in_blocks, BLOCKS, form_array - COMPLEMENT * missing)
    full = np.flatnonzero((form_array == COMPLEMENT) & (count_array == numel)).tolist()
    rows: dict[int, np.ndarray | FrameError] = {}
    rows |= {i: np.arange(numel) for i in full if not len(codes[i])}
    possible = np.flatnonzero(_is_possible(codes, coded, forms_of_coded, numel))
    if possible.size:
        indices, lengths = possible.tolist(), coded[possible]
        own = [codes[i] for i in indices]
        positions, valid = _unpack(own, lengths, forms_of_coded[possible], numel)
        decoded = zip(indices, split_runs(positions, lengths), valid.tolist(), strict=True)
        rows |= {i: _complement(row, numel) if missing[i] else row for i, row, ok in decoded if ok}
    for i in set(range(len(codes))) - rows.keys():
        rows[i] = FrameError(
            f"damaged frame: the list of positions ({len(codes[i])} bytes) cannot be decoded to {counts[i]} positions below {numel}"
        )
    return [rows[i] for i in range(len(codes))]


def _pack_list(rows: list[np.ndarray], numel: int, widest: int) -> list[tuple[int, bytes]]:
    """Return the form and the code of each row, without trying its complement."""
    if not rows:
        return []
    counts = np.array([row.size for row in rows])
    return list(zip(*_pack(np.concatenate(rows), counts, numel, widest), strict=True))


def _complement(positions: np.ndarray, numel: int) -> np.ndarray:
    """Return the coordinates of a vector [numel] that are not in `positions`."""
    is_other = np.ones(numel, np.bool_)
    is_other[positions] = False
    return np.flatnonzero(is_other)


def _pack(
    positions: np.ndarray, counts: np.ndarray, numel: int, widest: int = WIDEST
) -> tuple[list[int], list[bytes]]:
    """Do the same as `pack_rows`, but with Rice parameters of at most `widest` and without complements."""
    (form, size, width, each), lead = _plan(positions, counts, numel, widest), None
    blocked = np.flatnonzero(width)
    if blocked.size:
        cut = _cut(counts, size, width)
        widths = width[cut.row]
        values = each[cut.start] - _begin(rice.parameters(counts, numel)[cut.row], widths)
        sent = widths > 0
        head = blocked, np.full(blocked.size, 8), size[blocked] | width[blocked] - WIDTHS[0] << 3
        # For each row in blocks: the first byte of its code, and the offset of each block.
        order = np.argsort(np.append(blocked, cut.row[sent]), kind="stable")
        pairs = zip(head, (cut.row, widths, values), strict=True)
        lead = rice.Fields(*(np.append(first, rest[sent])[order] for first, rest in pairs))
    return form.tolist(), rice.pack_rows(positions, counts, each, lead)


def _is_possible(
    codes: Sequence[bytes | memoryview], counts: np.ndarray, forms: np.ndarray, numel: int
) -> np.ndarray:
    """Return whether the length and the first byte of each code suit its form and number of positions, as bool [m]."""
    bits = 8 * np.array([len(code) for code in codes], np.int64)
    max_bits = counts * (WIDEST + WIDTHS[-1] + 1) + numel + 64
    possible = (0 < counts) & (counts <= numel) & (0 <= forms) & (forms <= BLOCKS)
    possible &= (counts <= bits) & (bits < max_bits)
    for i in np.flatnonzero(possible & (forms == BLOCKS)).tolist():
        possible[i] = counts[i] >= MIN_BLOCKED_COUNT and codes[i][0] < SIZES * len(WIDTHS)
    return possible


def _unpack(
    codes: Sequence[bytes | memoryview], counts: np.ndarray, forms: np.ndarray, numel: int
) -> tuple[np.ndarray, np.ndarray]:
    """Decode codes that `_is_possible` accepts.

    Return the positions of all rows, concatenated, and whether each code is valid, bool [m].
    """
    raw, sizes = rice.padded(codes), np.array([len(code) for code in codes], np.int64)
    ends = 8 * sizes.cumsum()
    starts, smallest, blocked = ends - 8 * sizes, forms, forms == BLOCKS
    parameters, lengths, lows = forms, counts, forms * counts
    if blocked.any():
        heads = np.where(blocked, raw[starts // 8], np.int64(0))
        size, width = heads % SIZES, np.where(blocked, WIDTHS[0] + heads // SIZES, 0)
        cut = _cut(counts, size, width)
        widths, first, lengths = width[cut.row], np.flatnonzero(cut.number == 0), cut.length
        at = np.minimum(starts[cut.row] + 8 + cut.number * widths, ends[-1])
        begin = _begin(rice.parameters(counts, numel)[cut.row], widths)
        parameters = np.where(widths > 0, begin + rice.read_bits(raw, widths, at), forms[cut.row])
        smallest = np.minimum.reduceat(parameters, first)
        lows = np.add.reduceat(parameters * lengths, first)
        starts = np.minimum(starts + blocked * 8 + np.add.reduceat(widths, first), ends)
    short_enough = ends - starts - counts - lows < (numel >> smallest) + 8
    positions, valid = rice.unpack_rows(raw, starts, ends, counts, parameters, lengths, numel)
    return positions, valid & short_enough


def _cut(counts: np.ndarray, size: np.ndarray, width: np.ndarray) -> Blocks:
    """Return the blocks of all rows, given their block size exponents and offset widths. An undivided row (width 0) is one block."""
    return _divide(counts, np.where(width > 0, _unit(counts) << size, np.maximum(counts, 1)))


def _divide(counts: np.ndarray, length: np.ndarray) -> Blocks:
    """Divide m rows with `counts` [m] positions into blocks of `length` [m] positions."""
    n_blocks = -(-counts // length)
    row = np.arange(counts.size).repeat(n_blocks)
    number = np.arange(row.size) - (n_blocks.cumsum() - n_blocks)[row]
    start, own = number * length[row], length[row]
    first = (counts.cumsum() - counts)[row]
    return Blocks(row, number, first + start, np.minimum(own, counts[row] - start))


def _unit(counts: np.ndarray) -> np.ndarray:
    return np.where(counts < LARGE_COUNT, *UNITS)


def _begin(b: int | np.ndarray, width: int | np.ndarray) -> np.ndarray:
    """Return the Rice parameter of offset 0 with `width` bits. `b`: parameter for uniformly distributed positions (b* in rice.py)."""
    return np.maximum(0, np.minimum(b, WIDEST + 1 - WIDTHS[-1]) + width - (1 << width))


def _plan(
    positions: np.ndarray, counts: np.ndarray, numel: int, widest: int = WIDEST
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Plan the shortest code of each row. `counts` [m]: number of positions of each row.

    Return four int64 arrays: the forms [m], the block size exponents [m], the offset widths [m] (0 = without blocks), and the Rice
    parameter of each position.
    """
    if compiled := rice.loops(positions.size):
        return _plan_rows(compiled, positions, counts, numel, widest)
    tried = counts >= MIN_BLOCKED_COUNT
    form = rice.best_parameters(positions, counts, numel, widest)
    size, width = np.zeros((2, counts.size), np.int64)
    each = form.repeat(counts)
    if tried.any():
        skips = rice.skip_lengths(positions, counts)
        b, unit = rice.parameters(counts, numel), _unit(counts)
        lengths = (rice.sums((skips >> each) + 1 + each, counts) + 7) // 8
        for group in sorted(set(zip(b[tried].tolist(), unit[tried].tolist()))):
            rows = tried & (b == group[0]) & (unit == group[1])
            inside = rows.repeat(counts)
            own = skips[inside], counts[rows], each[inside], lengths[rows]
            size[rows], width[rows], each[inside] = _blocks(*own, *group)
    return np.where(width > 0, BLOCKS, form), size, width, each


def _plan_rows(
    compiled: ModuleType, positions: np.ndarray, counts: np.ndarray, numel: int, widest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Do the same as `_plan`, row by row, with compiled loops."""
    b, skips = rice.parameters(counts, numel), rice.skip_lengths(positions, counts)
    each, (low, high) = np.empty_like(skips), rice.search_range(b, widest)
    form, (size, width) = low.copy(), np.zeros((2, counts.size), np.int64)
    runs = zip(split_runs(skips, counts), split_runs(each, counts), strict=True)
    for i, (row, own) in enumerate(runs):
        if row.size:
            form[i] = own[:] = compiled.best_parameter(row, low[i], high[i])
        if row.size >= MIN_BLOCKED_COUNT:
            begins, unit = _begin(b[i], np.array(WIDTHS)), UNITS[row.size >= LARGE_COUNT]
            size[i], width[i] = compiled.best_blocks(row, own, begins, unit, SIZES, GAIN)
    return np.where(width > 0, BLOCKS, form), size, width, each


def _blocks(
    skips: np.ndarray, counts: np.ndarray, each: np.ndarray, limit: np.ndarray, b: int, unit: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the block size exponent and the offset width of each row, and the Rice parameter of each position.

    If blocks save too little in a row, its exponent and width are 0, and its parameters are those in `each`, which has the parameters
    without blocks. `skips`: see rice.skip_lengths. `limit` [m]: sizes in bytes of the codes without blocks. All rows have the same `b` (b*
    in rice.py) and the same unit u.
    """
    cut, first = _divide(counts, np.full(counts.size, unit)), int(_begin(b, WIDTHS[-1]))
    row, number = cut.row, cut.number
    bits_of = [
        np.add.reduceat(skips >> parameter, cut.start) + (parameter + 1) * cut.length
        for parameter in range(first, first + COLUMNS)
    ]
    table = np.stack(bits_of)  # code length in bits for each parameter and each block
    tables, lengths = [], []
    for s in range(SIZES):
        if s:
            even = np.flatnonzero(number % 2 == 0)
            row, number, table = row[even], number[even] // 2, np.add.reduceat(table, even, axis=1)
        runs, n_blocks = np.flatnonzero(number == 0), np.bincount(row)
        bits = [np.add.reduceat(_window(table, b, w).min(0), runs) + w * n_blocks for w in WIDTHS]
        tables.append(table)
        lengths += [1 + (bits_of_width + 7) // 8 for bits_of_width in bits]
        if n_blocks.max() == 1:
            break
    shorter = np.min(lengths, axis=0) < limit - (limit >> GAIN)
    choice = np.where(shorter, np.argmin(lengths, axis=0), -1)
    size = np.where(shorter, choice // len(WIDTHS), 0)
    width = np.where(shorter, WIDTHS[0] + choice % len(WIDTHS), 0)
    for chosen in set(choice[shorter].tolist()):
        s, w = chosen // len(WIDTHS), WIDTHS[chosen % len(WIDTHS)]
        parameters = _begin(b, w) + _window(tables[s], b, w).argmin(0)
        repeated = parameters.repeat(_divide(counts, np.full(counts.size, unit << s)).length)
        each = np.where((choice == chosen).repeat(counts), repeated, each)
    return size, width, each


def _window(table: np.ndarray, b: int, width: int) -> np.ndarray:
    """Return the rows of `table` (see `_blocks`) for the Rice parameters that offsets of `width` bits select."""
    first = int(_begin(b, width) - _begin(b, WIDTHS[-1]))
    return table[first : first + (1 << width)]
