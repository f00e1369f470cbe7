"""Loops of kernels/winograd.py, compiled by numba. INPUTS, WEIGHTS and OUTPUTS are Bᵀ, G and Aᵀ."""

from fractions import Fraction as F

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .backend import LANES
from .loops import compiled
from .row_sums import ONCE, VECTOR, WORD, add_rows

FLOATS = 4  # bytes
INPUTS = [
    [4, 0, -5, 0, 1, 0],
    [0, -4, -4, 1, 1, 0],
    [0, 4, -4, -1, 1, 0],
    [0, -2, -1, 2, 1, 0],
    [0, 2, -1, -2, 1, 0],
    [0, 4, 0, -5, 0, 1],
]
WEIGHTS = [
    [F(1, 4), 0, 0, 0, 0],
    [F(-1, 6)] * 5,
    [F(-s, 6) for s in (1, -1, 1, -1, 1)],
    [F(2**p, 24) for p in range(5)],
    [F((-2) ** p, 24) for p in range(5)],
    [0, 0, 0, 0, 1],
]
OUTPUTS = [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 1]]
TILE, KERNEL = len(INPUTS), len(WEIGHTS[0])


def _times(matrix):
    """target_j = Σ_q matrix[j][q]·source_q for rows of `vectors` vectors; sources and targets, by address, lie so many bytes apart."""

    @intrinsic
    def multiply(typingctx, source, source_step, target, target_step, vectors):
        def generate(context, builder, signature, given):
            source, source_step, target, target_step, vectors = given
            before, loop = builder.block, builder.append_basic_block("vectors")
            builder.branch(loop)

            builder.position_at_end(loop)
            n = builder.phi(WORD)
            skip = builder.mul(n, WORD(FLOATS * LANES))

            def at(base, step, row):
                return builder.inttoptr(
                    builder.add(builder.add(base, skip), builder.mul(step, WORD(row))),
                    VECTOR.as_pointer(),
                )

            used = [q for q in range(len(matrix[0])) if any(row[q] for row in matrix)]
            values = {q: builder.load(at(source, source_step, q), align=4) for q in used}
            for j, row in enumerate(matrix):
                total = None
                for q in filter(row.__getitem__, used):
                    factor = ir.Constant(VECTOR, [float(row[q])] * LANES)
                    term = values[q] if row[q] == 1 else builder.fmul(values[q], factor, flags=ONCE)
                    total = term if total is None else builder.fadd(total, term, flags=ONCE)
                builder.store(total, at(target, target_step, j), align=4)
            following = builder.add(n, WORD(1))
            n.add_incoming(WORD(0), before)
            n.add_incoming(following, loop)
            after = builder.append_basic_block("done")
            builder.cbranch(builder.icmp_signed("<", following, vectors), loop, after)

            builder.position_at_end(after)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), generate

    return multiply


_inputs, _weights, _outputs = map(_times, (INPUTS, WEIGHTS, OUTPUTS))


@compiled
def spread_weights(weight, spread):
    """G g Gᵀ of weight [5, 5, c·k] into spread [6, 6, c·k]."""
    row = weight.shape[2]
    half, size, vectors = np.empty((TILE, KERNEL, row), np.float32), FLOATS * row, row // LANES
    _weights(weight.ctypes.data, KERNEL * size, half.ctypes.data, KERNEL * size, KERNEL * vectors)
    for p in range(TILE):
        _weights(half[p].ctypes.data, size, spread[p].ctypes.data, size, vectors)


@compiled
def maxima(x, kernels, biases, results, places):
    """relu(max over 2×2 of x ∗ weight + bias) of x [b, h, w, c] into results [b, i, j, k], and where in a plane of outputs, into places.

    `kernels` [36, c, k] are those of spread_weights. A row of tiles is worked on at a time, in memory that stays near.
    """
    (squares, c, k), (examples, high, wide, _), w = kernels.shape, results.shape, x.shape[2]
    down, tiles = np.empty((TILE, w, c), np.float32), np.empty((squares, wide, c), np.float32)
    products, starts, width = (
        np.empty((squares, wide, k), np.float32),
        np.arange(c) * k,
        w - KERNEL + 1,
    )
    across, outputs = np.empty((TILE, 2, k), np.float32), np.empty((2, 2, k), np.float32)
    for b in range(examples):
        for i in range(high):
            _inputs(
                x[b, 2 * i].ctypes.data,
                FLOATS * w * c,
                down.ctypes.data,
                FLOATS * w * c,
                w * c // LANES,
            )
            for j in range(wide):
                for p in range(TILE):
                    _inputs(
                        down[p, 2 * j].ctypes.data,
                        FLOATS * c,
                        tiles[p * TILE, j].ctypes.data,
                        FLOATS * wide * c,
                        c // LANES,
                    )
            for p in range(squares):
                flat = kernels[p].reshape(-1)
                for j in range(wide):
                    for o in range(k):
                        products[p, j, o] = 0
                    add_rows(products[p, j], flat, starts, tiles[p, j], c)
            for j in range(wide):
                for p in range(TILE):
                    _outputs(
                        products[p * TILE, j].ctypes.data,
                        FLOATS * wide * k,
                        across[p].ctypes.data,
                        FLOATS * k,
                        k // LANES,
                    )
                _outputs(
                    across.ctypes.data,
                    FLOATS * 2 * k,
                    outputs.ctypes.data,
                    FLOATS * 2 * k,
                    2 * k // LANES,
                )
                best, at, corner = results[b, i, j], places[b, i, j], 2 * i * width + 2 * j
                for o in range(k):
                    best[o], at[o] = outputs[0, 0, o], corner
                _keep_larger(outputs[0, 1], corner + 1, best, at)
                _keep_larger(outputs[1, 0], corner + width, best, at)
                _keep_larger(outputs[1, 1], corner + width + 1, best, at)
                for o in range(k):
                    total = best[o] + biases[o]
                    best[o] = np.float32(0) if total <= 0 else total  # what is no number stays none


@numba.njit(nogil=True, inline="always")
def _keep_larger(values, place, best, at):
    """Let `best` [k] be values [k] where these are larger, or no numbers, and `at` their place."""
    for o in range(best.size):
        larger = values[o] > best[o] or values[o] != values[o]
        best[o] = values[o] if larger else best[o]
        at[o] = place if larger else at[o]
