"""Encoding of strictly increasing positions, such as the indices of a sparse vector. There are several formats, called forms; the encoder
chooses the form with the shortest code.

    Forms 0..40: the Rice code (kernels/rice.py) whose parameter is the form. The code of form 0 is a bitmap that ends at the last position.
    Form 41: the Rice code of blocks of positions; each block has its own parameter.
    Forms 42..62: the Rice code of the complement (all other coordinates) with parameter form − 42. An empty complement has an empty code.
    Form 63: the Rice code of blocks of the complement; each block has its own parameter.

Blocks have different Rice parameters, because the density can change along the vector. A block has a fixed number of positions, not a fixed
range of coordinates, so dense ranges of the vector have more blocks. A code in blocks (docs/reference/frame-format.md) has a block size
exponent s from 0 to 7 and an offset width w from 2 to 4. A block has u·2^s positions, and the last block may have fewer. The unit u is 4
for fewer than 4096 positions, and 16 otherwise. Each block has an offset, a number of w bits, which selects its Rice parameter.

The form is sent separately. If several codes have the same length, the encoder chooses the code with the smallest form. If the forms are
also equal, it chooses the smallest s, then the smallest w, and then the smallest offsets. For 32 or more positions, blocks are used if they
shorten the code by more than 1/64 of its bytes. Blocks are not used for smaller savings, because codes without blocks are decoded faster.
The encoder tries the complement if it is smaller than the set of positions. The decoder, `unpack`, accepts every form, not only the
shortest.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from ..errors import FrameError
from . import rice
from .parallel import split_runs
from .rice import WIDEST

# BLOCKS: the form of a Rice code in blocks. COMPLEMENT: the first form that encodes the complement (all other coordinates).
BLOCKS, COMPLEMENT = WIDEST + 1, WIDEST + 2
COMPLEMENT_BLOCKED = 63  # the form of a Rice code of the complement in blocks
MIN_BLOCKED_COUNT = 32  # blocks are tried if there are at least this many positions
LARGE_COUNT = 4096  # blocks are larger (UNITS) if there are at least this many positions
# Number u of positions in the smallest possible block: 4 for fewer than LARGE_COUNT positions, and 16 otherwise.
UNITS = 4, 16
SIZES, WIDTHS = 8, (2, 3, 4)  # number of block size exponents s, and the offset widths w
COLUMNS = 1 << WIDTHS[-1]  # number of Rice parameters that are tried for a block
GAIN = 6  # blocks are used if they shorten the code by more than 2^−GAIN of its bytes


class Blocks(NamedTuple):
    """The blocks of m rows. A row holds the positions of one vector, and the blocks are sorted by row.

    Each field is an int64 array with one entry per block.
    """

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
    """Encode m rows of positions, one row per vector.

    Return the form of each row and the code of each row. `counts` [m]: number of positions in each row.
    """
    if (2 * counts <= numel).all():
        return _pack(positions, counts, numel)
    rows = split_runs(positions, counts)
    # The form and code of a row that contains all coordinates. All other rows get their own form and code below.
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
    """Decode m codes into positions. For an invalid code, the list contains a FrameError."""
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
    """For each row of positions, return the form and the shortest Rice code of the row itself (not of its complement)."""
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
    """Do the same as `pack_rows`, but do not try complements, and use Rice parameters of at most `widest`."""
    (form, size, width, each), lead = _plan(positions, counts, numel, widest), None
    blocked = np.flatnonzero(width)
    if blocked.size:
        cut = _cut(counts, size, width)
        widths = width[cut.row]
        values = each[cut.start] - _begin(rice.parameters(counts, numel)[cut.row], widths)
        sent = widths > 0
        head = blocked, np.full(blocked.size, 8), size[blocked] | width[blocked] - WIDTHS[0] << 3
        # `lead`: for each row that is divided into blocks, the first byte of its code, and then the offset of each block.
        order = np.argsort(np.append(blocked, cut.row[sent]), kind="stable")
        pairs = zip(head, (cut.row, widths, values), strict=True)
        lead = rice.Fields(*(np.append(first, rest[sent])[order] for first, rest in pairs))
    return form.tolist(), rice.pack_rows(positions, counts, each, lead)


def _is_possible(
    codes: Sequence[bytes | memoryview], counts: np.ndarray, forms: np.ndarray, numel: int
) -> np.ndarray:
    """Return whether the length and the first byte of each code are possible for its form and number of positions, as bool [m]."""
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
    """Return the blocks of all rows, given the block size exponents (`size`) and offset widths. An undivided row is one block."""
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
    """Return the smallest Rice parameter that an offset of `width` bits can select: the parameter for offset 0.

    `b`: the parameter for uniformly distributed positions (b* in rice.py).
    """
    return np.maximum(0, np.minimum(b, WIDEST + 1 - WIDTHS[-1]) + width - (1 << width))


def _plan(
    positions: np.ndarray, counts: np.ndarray, numel: int, widest: int = WIDEST
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Find the shortest code of each row.

    Return the form, block size exponent and offset width (0 = no blocks) of each row. The last array has the Rice parameter of each
    position.
    """
    if compiled := rice.loops(positions.size):
        return _plan_rows(compiled, positions, counts, numel, widest)
    tried = counts >= MIN_BLOCKED_COUNT
    form = rice.best_parameters(positions, counts, numel, widest)
    size, width = np.zeros((2, counts.size), np.int64)
    each = form.repeat(counts)
    if tried.any():
        rest, b, unit = rice.rests(positions, counts), rice.parameters(counts, numel), _unit(counts)
        lengths = (rice.sums((rest >> each) + 1 + each, counts) + 7) // 8
        for group in sorted(set(zip(b[tried].tolist(), unit[tried].tolist()))):
            rows = tried & (b == group[0]) & (unit == group[1])
            inside = rows.repeat(counts)
            own = rest[inside], counts[rows], each[inside], lengths[rows]
            size[rows], width[rows], each[inside] = _blocks(*own, *group)
    return np.where(width > 0, BLOCKS, form), size, width, each


def _plan_rows(
    compiled: ModuleType, positions: np.ndarray, counts: np.ndarray, numel: int, widest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Implement `_plan` row by row, with compiled loops."""
    b, rest = rice.parameters(counts, numel), rice.rests(positions, counts)
    each, (low, high) = np.empty_like(rest), rice.near(b, widest)
    form, (size, width) = low.copy(), np.zeros((2, counts.size), np.int64)
    runs = zip(split_runs(rest, counts), split_runs(each, counts), strict=True)
    for i, (row, own) in enumerate(runs):
        if row.size:
            form[i] = own[:] = compiled.best_parameter(row, low[i], high[i])
        if row.size >= MIN_BLOCKED_COUNT:
            begins, unit = _begin(b[i], np.array(WIDTHS)), UNITS[row.size >= LARGE_COUNT]
            size[i], width[i] = compiled.best_blocks(row, own, begins, unit, SIZES, GAIN)
    return np.where(width > 0, BLOCKS, form), size, width, each


def _blocks(
    rest: np.ndarray, counts: np.ndarray, each: np.ndarray, limit: np.ndarray, b: int, unit: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the block size exponent and the offset width of each row, and the Rice parameter of each position.

    If blocks save too little in a row, its exponent and its width are 0, and its Rice parameters are copied from `each`. `limit` [m]: for
    each row, the size in bytes of the code without blocks.
    """
    cut, first = _divide(counts, np.full(counts.size, unit)), int(_begin(b, WIDTHS[-1]))
    row, number = cut.row, cut.number
    bits_of = [
        np.add.reduceat(rest >> parameter, cut.start) + (parameter + 1) * cut.length
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
    """Return the rows of `table` for the Rice parameters that an offset of `width` bits can select."""
    first = int(_begin(b, width) - _begin(b, WIDTHS[-1]))
    return table[first : first + (1 << width)]
