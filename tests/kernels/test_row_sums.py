"""Sums of rows in registers are those of numpy, whatever is left over beside whole vectors."""

import numba
import numpy as np
from cases import for_each

from fedcomp.kernels.row_sums import LANES, MOST, add_rows


@numba.njit
def added(sums, source, starts, factors, count):
    add_rows(sums, source, starts, factors, count)


@for_each("count", [0, 2, 40])
@for_each(
    "row",
    [
        0,
        1,
        LANES - 1,
        LANES,
        LANES + 1,
        *(LANES * v for v in range(2, MOST + 2)),
        5 * LANES * MOST + 3,
    ],
)
def test_sums_are_numpys(row, count):
    drawn = np.random.default_rng(row)
    around = drawn.standard_normal(row + 2, np.float32)
    source, starts = (
        drawn.standard_normal(4 * row + 1, np.float32),
        drawn.integers(0, 3 * row + 1, 41),
    )
    factors = drawn.standard_normal(41, np.float32)
    wanted = around.astype(np.float64)
    for start, factor in zip(starts[:count], factors[:count], strict=True):
        wanted[1:-1] += np.float64(factor) * source[start : start + row]
    added(around[1:-1], source, starts, factors, count)
    np.testing.assert_allclose(around, wanted, rtol=1e-5, atol=1e-5)
    assert (around[0], around[-1]) == (wanted[0], wanted[-1])
