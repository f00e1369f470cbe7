"""Sums of many rows, each with a factor, held in registers until the last of them: what numba's own loops write to memory every time.

sums[j] += Σ_n factors[n] · source[starts[n] + j]        for j in 0 .. row − 1
"""

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .backend import LANES

MOST = 6  # vectors of sums at once: with 16 registers of 8 floats, as AVX2 has, none of them goes to memory
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(ir.FloatType(), LANES)
WORD = ir.IntType(64)
INDEX = ir.IntType(32)
ONCE = ("contract",)  # a product and a sum, rounded once where the processor can


def _block(vectors):
    """The sum of rows of `vectors` vectors. Its arguments are addresses, all but the last: how many rows there are, at least one."""

    @intrinsic
    def add(typingctx, sums, source, starts, factors, count):
        def generate(context, builder, signature, given):
            sums, source, starts, factors, count = given

            def at(base, index, kind):
                return builder.gep(builder.inttoptr(base, kind.as_pointer()), [index])

            def each(base):
                return [at(base, WORD(i), VECTOR) for i in range(vectors)]

            before, loop = builder.block, builder.append_basic_block("rows")
            first = [builder.load(p, align=4) for p in each(sums)]
            builder.branch(loop)

            builder.position_at_end(loop)
            n = builder.phi(WORD)
            totals = [builder.phi(VECTOR) for _ in range(vectors)]
            factor = builder.load(at(factors, n, FLOAT), align=4)
            splat = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), factor, INDEX(0))
            splat = builder.shuffle_vector(
                splat, splat, ir.Constant(ir.VectorType(INDEX, LANES), [0] * LANES)
            )
            row = builder.add(
                source, builder.shl(builder.load(at(starts, n, WORD), align=8), WORD(2))
            )
            added = [
                builder.fadd(
                    total, builder.fmul(splat, builder.load(p, align=4), flags=ONCE), flags=ONCE
                )
                for total, p in zip(totals, each(row), strict=True)
            ]
            following = builder.add(n, WORD(1))
            for phi, start, value in zip(
                [n, *totals], [WORD(0), *first], [following, *added], strict=True
            ):
                phi.add_incoming(start, before)
                phi.add_incoming(value, loop)
            after = builder.append_basic_block("done")
            builder.cbranch(builder.icmp_signed("<", following, count), loop, after)

            builder.position_at_end(after)
            for p, value in zip(each(sums), added, strict=True):
                builder.store(value, p, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), generate

    return add


_one, _two, _three, _four, _five, _six = (_block(vectors) for vectors in range(1, MOST + 1))


@numba.njit(nogil=True, inline="always")
def add_rows(sums, source, starts, factors, count):
    """Add the first `count` rows of `source` that begin at `starts` (int64), times `factors` (float32), to `sums` [row].

    All are contiguous, sums and source float32. No bound is checked.
    """
    if count < 1:
        return
    vectors = sums.size // LANES
    blocks = (vectors + MOST - 1) // MOST
    to, of, at, by = sums.ctypes.data, source.ctypes.data, starts.ctypes.data, factors.ctypes.data
    for block in range(blocks):
        first, last = block * vectors // blocks, (block + 1) * vectors // blocks
        size, skip = last - first, 4 * LANES * first
        if size == 6:
            _six(to + skip, of + skip, at, by, count)
        elif size == 5:
            _five(to + skip, of + skip, at, by, count)
        elif size == 4:
            _four(to + skip, of + skip, at, by, count)
        elif size == 3:
            _three(to + skip, of + skip, at, by, count)
        elif size == 2:
            _two(to + skip, of + skip, at, by, count)
        else:
            _one(to + skip, of + skip, at, by, count)
    for j in range(vectors * LANES, sums.size):
        total = sums[j]
        for n in range(count):
            total += factors[n] * source[starts[n] + j]
        sums[j] = total
