"""The mean of a range of ranks equals that of sorted values."""

import numpy as np
import pytest

from fedcomp.kernels import sums


def expected(stack: np.ndarray, first: int, last: int) -> np.ndarray:
    return np.sort(stack, axis=0)[first:last].astype(np.float64).mean(axis=0).astype(np.float32)


@pytest.mark.parametrize("m", [1, 2, 21, 33])
@pytest.mark.parametrize("n", [1, 3 * sums.TILE + 5])
def test_the_mean_of_ranks_equals_that_of_sorted_values(m, n):
    stack = np.random.default_rng(m).standard_normal((m, n)).astype(np.float32)
    before = stack.copy()
    for first, last in {(0, m), ((m - 1) // 2, m // 2 + 1), (m // 3, m - m // 3), (m - 1, m)}:
        np.testing.assert_allclose(
            sums.mean_of_ranks(stack, first, last),
            expected(stack, first, last),
            rtol=2e-7,
            atol=1e-12,
        )
    assert np.array_equal(stack, before)
    middle = sums.mean_of_ranks(stack, (m - 1) // 2, m // 2 + 1)
    assert np.array_equal(middle, np.median(stack.astype(np.float64), axis=0).astype(np.float32))


@pytest.mark.parametrize("m", [5, 8, 21])
def test_the_order_of_the_rows_changes_no_bit(m):
    rng = np.random.default_rng(m)
    stack = (rng.standard_normal((m, 1000)) * 10.0 ** rng.integers(-30, 30, (m, 1000))).astype(
        np.float32
    )
    found = [
        sums.mean_of_ranks(rows, 1, m - 1) for rows in (stack, stack[::-1], rng.permutation(stack))
    ]
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_a_stack_that_is_wider_than_a_tile_is_sorted_in_every_column():
    stack = np.random.default_rng(0).standard_normal((3, (2 << 20) + 77)).astype(np.float32)
    assert np.array_equal(sums.mean_of_ranks(stack, 1, 2), np.median(stack, axis=0))


def test_the_largest_numbers_do_not_overflow():
    largest = np.finfo(np.float32).max
    stack = np.array([[largest, -largest, largest], [largest, -largest, -largest]], np.float32)
    assert sums.mean_of_ranks(stack, 0, 2).tolist() == [largest, -largest, 0]


def test_a_stack_may_be_not_contiguous():
    stack = np.random.default_rng(0).standard_normal((50, 9)).astype(np.float32).T
    assert np.array_equal(sums.mean_of_ranks(stack, 4, 5), np.median(stack, axis=0))
