"""Loops over stacks [m, n], compiled by Triton for CUDA; under TRITON_INTERPRET=1 they run on the CPU, for tests.

Each program works on BLOCK elements of one row: the grid is (blocks of a row, rows); of a sketch, on a vector for one row of cells, or all.
Keys are those of kernels/loops.py: `(bits ^ flip) & mask` of a float32, candidates from 1 up. Results do not depend on the order in which
programs run.
"""

import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def collect(
    e_ptr, x_ptr, floor_ptr, found_ptr, count_ptr, strange_ptr, n, room, flip, mask, WITH_E: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of each row of e + x, or of x, write the keys >= floor[row] to found[row], in any order, as key << 32 | (2^32 − 1 − position).

    count[row] += how many there are, found or not; strange[row] = 1 if one is not finite. found is int64 [m, room].
    """
    row = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    at = row.to(tl.int64) * n + i
    total = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if WITH_E:
        total += tl.load(e_ptr + at, mask=inside, other=0.0)
    bits = total.to(tl.int32, bitcast=True)
    if tl.max(bits & 0x7FFFFFFF) >= 0x7F800000:
        tl.store(strange_ptr + row, 1)
    key = (bits ^ flip) & mask
    kept = (inside & (key >= tl.load(floor_ptr + row))).to(tl.int32)
    several = tl.sum(kept)
    if several > 0:
        slot = tl.atomic_add(count_ptr + row, several) + tl.cumsum(kept) - kept
        named = (key.to(tl.int64) << 32) | (0xFFFFFFFF - i.to(tl.int64))
        tl.store(found_ptr + row.to(tl.int64) * room + slot, named, mask=(kept > 0) & (slot < room))


@triton.jit
def pack_signs(x_ptr, out_ptr, n, width, BLOCK: tl.constexpr):
    """out[row, j] = the eight bits x >= 0 of elements 8j … 8j+7, the first in the highest bit, 0 past the end. out is uint8 [m, width]."""
    row = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    byte = tl.zeros([BLOCK // 8], tl.int32)
    for bit in tl.static_range(8):
        i = j * 8 + bit
        x = tl.load(x_ptr + row * n + i, mask=i < n, other=-1.0).to(tl.float32)
        byte = (byte << 1) | (x >= 0).to(tl.int32)
    tl.store(out_ptr + row * width + j, byte.to(tl.uint8), mask=j < width)


@triton.jit
def philox(low, high, c0, c1, c2, c3):
    """A block of four words (kernels/philox.py), elementwise over uint32 tensors."""
    first, second = (
        tl.full(c0.shape, 0xD2511F53, tl.uint32),
        tl.full(c0.shape, 0xCD9E8D57, tl.uint32),
    )
    for _ in tl.static_range(10):
        a, c = c0, c2
        c0, c1 = tl.umulhi(c, second) ^ c1 ^ low, c * second
        c2, c3 = tl.umulhi(a, first) ^ c3 ^ high, a * first
        low, high = (
            low + tl.full(c0.shape, 0x9E3779B9, tl.uint32),
            high + tl.full(c0.shape, 0xBB67AE85, tl.uint32),
        )
    return c0, c1, c2, c3


@triton.jit
def _words(key_ptr, row, first, stream, BLOCK: tl.constexpr):
    """Four words for each of BLOCK blocks from `first` on, of the seed whose halves, the low one first, are key[row]."""
    j = first + tl.arange(0, BLOCK)
    zero = (j * 0).to(tl.uint32)
    low, high = (
        zero + tl.load(key_ptr + 2 * row).to(tl.uint32),
        zero + tl.load(key_ptr + 2 * row + 1).to(tl.uint32),
    )
    return philox(low, high, j.to(tl.uint32), zero, zero + stream, zero)


@triton.jit
def fill_words(key_ptr, out_ptr, count, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = the first `count` words of a stream of the seed key[row]. out is int32 [m, count]."""
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * (BLOCK // 4)
    a, b, c, d = _words(key_ptr, row, first, STREAM, BLOCK // 4)
    i = 4 * (first + tl.arange(0, BLOCK // 4))
    place = out_ptr + row * count + i
    tl.store(place, a.to(tl.int32, bitcast=True), mask=i < count)
    tl.store(place + 1, b.to(tl.int32, bitcast=True), mask=i + 1 < count)
    tl.store(place + 2, c.to(tl.int32, bitcast=True), mask=i + 2 < count)
    tl.store(place + 3, d.to(tl.int32, bitcast=True), mask=i + 3 < count)


@triton.jit
def _multiple(x, scale, limit, word):
    """kernels/rounding.py: an integer multiple of a unit, 1/scale of it in fixed point with 32 bits after the point."""
    size = tl.minimum(tl.abs(x.to(tl.float64)), limit)
    level = ((size * scale + 0.5).to(tl.int64) + word.to(tl.int64)) >> 32
    return tl.where(x < 0, -level, level)


@triton.jit
def multiples(x_ptr, scale_ptr, limit_ptr, key_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out[row] = x[row] as multiples, up or down by the words of the seed key[row]; scale and limit are float64 [m]. No fused additions."""
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * (BLOCK // 4)
    a, b, c, d = _words(key_ptr, row, first, 0, BLOCK // 4)
    scale, limit = tl.load(scale_ptr + row), tl.load(limit_ptr + row)
    i = 4 * (first + tl.arange(0, BLOCK // 4))
    x, out = x_ptr + row * n + i, out_ptr + row * n + i
    tl.store(
        out,
        _multiple(tl.load(x, mask=i < n, other=0.0).to(tl.float32), scale, limit, a),
        mask=i < n,
    )
    tl.store(
        out + 1,
        _multiple(tl.load(x + 1, mask=i + 1 < n, other=0.0).to(tl.float32), scale, limit, b),
        mask=i + 1 < n,
    )
    tl.store(
        out + 2,
        _multiple(tl.load(x + 2, mask=i + 2 < n, other=0.0).to(tl.float32), scale, limit, c),
        mask=i + 2 < n,
    )
    tl.store(
        out + 3,
        _multiple(tl.load(x + 3, mask=i + 3 < n, other=0.0).to(tl.float32), scale, limit, d),
        mask=i + 3 < n,
    )


@triton.jit
def _power(x, factor, word):
    """kernels/rounding.py: the exponent of a power of two."""
    bits = tl.abs(x * factor).to(tl.uint32, bitcast=True)
    return (bits + (word >> 9)) >> 23


@triton.jit
def powers(x_ptr, factor_ptr, key_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out[row] = the codes of powers of two of x[row]·factor[row], up or down by the words of the seed key[row]. out is uint8 [m, n]."""
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * (BLOCK // 4)
    a, b, c, d = _words(key_ptr, row, first, 0, BLOCK // 4)
    factor = tl.load(factor_ptr + row)
    i = 4 * (first + tl.arange(0, BLOCK // 4))
    x, out = x_ptr + row * n + i, out_ptr + row * n + i
    tl.store(
        out,
        _power(tl.load(x, mask=i < n, other=0.0).to(tl.float32), factor, a).to(tl.uint8),
        mask=i < n,
    )
    tl.store(
        out + 1,
        _power(tl.load(x + 1, mask=i + 1 < n, other=0.0).to(tl.float32), factor, b).to(tl.uint8),
        mask=i + 1 < n,
    )
    tl.store(
        out + 2,
        _power(tl.load(x + 2, mask=i + 2 < n, other=0.0).to(tl.float32), factor, c).to(tl.uint8),
        mask=i + 2 < n,
    )
    tl.store(
        out + 3,
        _power(tl.load(x + 3, mask=i + 3 < n, other=0.0).to(tl.float32), factor, d).to(tl.uint8),
        mask=i + 3 < n,
    )


@triton.jit
def _add_to_cell(x_ptr, i, n, scale, word, cells_ptr, first, columns):
    """kernels/count_sketch.py: an element in fixed point, to half a unit, into the cell of its word in the row that begins at first."""
    fixed = tl.floor(tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float64) * scale + 0.5).to(
        tl.int64
    )
    bucket = tl.umulhi(word, (word * 0 + columns).to(tl.uint32)).to(tl.int64)
    tl.atomic_add(
        cells_ptr + first + bucket,
        tl.where((word & 1) == 1, -fixed, fixed),
        mask=i < n,
        sem="relaxed",
    )


@triton.jit
def sketch(
    x_ptr, scale_ptr, key_ptr, cells_ptr, n, columns, STREAM: tl.constexpr, BLOCK: tl.constexpr
):
    """cells[r, bucket] += ±x·scale, rounded, for all of x [n], in each row r: integers, which add up in any order. scale is float64 [1],
    cells int64 [rows, columns]."""
    row, first = tl.program_id(1), tl.program_id(0) * (BLOCK // 4)
    a, b, c, d = _words(key_ptr, 0, first, STREAM + row, BLOCK // 4)
    i, scale, begin = (
        4 * (first + tl.arange(0, BLOCK // 4)),
        tl.load(scale_ptr),
        row.to(tl.int64) * columns,
    )
    _add_to_cell(x_ptr, i, n, scale, a, cells_ptr, begin, columns)
    _add_to_cell(x_ptr, i + 1, n, scale, b, cells_ptr, begin, columns)
    _add_to_cell(x_ptr, i + 2, n, scale, c, cells_ptr, begin, columns)
    _add_to_cell(x_ptr, i + 3, n, scale, d, cells_ptr, begin, columns)


@triton.jit
def _tell(cells_ptr, first, columns, word):
    """What the cell of a word says, in the row that begins at first."""
    bucket = tl.umulhi(word, (word * 0 + columns).to(tl.uint32)).to(tl.int64)
    cell = tl.load(cells_ptr + first + bucket)
    return tl.where((word & 1) == 1, -cell, cell)


@triton.jit
def _median(found, ROWS: tl.constexpr):
    """The middle one of ROWS tensors, by exchanging neighbours; +0 for −0."""
    for last in tl.static_range(ROWS - 1, 0, -1):
        for r in tl.static_range(last):
            low, high = tl.minimum(found[r], found[r + 1]), tl.maximum(found[r], found[r + 1])
            found = found[:r] + (low, high) + found[r + 2 :]
    return found[ROWS // 2] + 0.0


@triton.jit
def estimate(
    cells_ptr,
    key_ptr,
    out_ptr,
    n,
    columns,
    ROWS: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [n] = the medians over the rows of cells, float32 [ROWS, columns]."""
    first = tl.program_id(0) * (BLOCK // 4)
    i, told = 4 * (first + tl.arange(0, BLOCK // 4)), ((), (), (), ())
    for r in tl.static_range(ROWS):
        a, b, c, d = _words(key_ptr, 0, first, STREAM + r, BLOCK // 4)
        begin = tl.full([], r, tl.int64) * columns
        told = (
            told[0] + (_tell(cells_ptr, begin, columns, a),),
            told[1] + (_tell(cells_ptr, begin, columns, b),),
            told[2] + (_tell(cells_ptr, begin, columns, c),),
            told[3] + (_tell(cells_ptr, begin, columns, d),),
        )
    tl.store(out_ptr + i, _median(told[0], ROWS), mask=i < n)
    tl.store(out_ptr + i + 1, _median(told[1], ROWS), mask=i + 1 < n)
    tl.store(out_ptr + i + 2, _median(told[2], ROWS), mask=i + 2 < n)
    tl.store(out_ptr + i + 3, _median(told[3], ROWS), mask=i + 3 < n)
