"""Peeling recovers the values of a table exactly, or reports that they are estimates."""

import numpy as np
import pytest
from cases import for_each

from fedcomp.kernels import peeling

rng = np.random.default_rng(3)


def keys(count: int, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).choice(100 * count, count, replace=False))


def integers(count: int, bits: int = 47) -> np.ndarray:
    return rng.integers(-(1 << bits), 1 << bits, count)


def recovered(
    count: int, cells: int, seed: int, rows: int = 3
) -> tuple[np.ndarray, peeling.Recovered, np.ndarray]:
    """Return the original values, the recovered values, and the rest of the table."""
    where, values = peeling.key_cells(keys(count, seed), rows, cells // rows, seed), integers(count)
    table = peeling.sums(where, values)
    return values, peeling.recover(where, table), table


def test_a_key_that_is_alone_in_a_cell_is_peeled():
    """Keys a, b and c in three rows of two cells: at first only a is alone in a cell, then b, then c."""
    cells = np.array([[0, 2, 4], [1, 2, 4], [1, 2, 5]], np.int32)
    where = peeling.KeyCells(cells, np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0]], bool), 6)
    table = np.array([7, -20 + 5, 7 + 20 - 5, 0, 7 + 20, 5])
    assert peeling.sums(where, np.array([7, 20, 5])).tolist() == table.tolist()
    values, found = peeling.peel(where, table)
    assert values.tolist() == [7, 20, 5] and found.all() and not table.any()


def test_cells_and_signs_are_those_of_the_sketch():
    at = keys(50, 1)
    where = peeling.key_cells(at, 3, 40, 9)
    for r, (buckets, negative) in enumerate(peeling.count_sketch.buckets_and_signs(at, 3, 40, 9)):
        assert np.array_equal(where.cells[:, r], buckets + 40 * r) and np.array_equal(
            where.negative[:, r], negative
        )
    assert where.size == 120


@for_each("count, cells_a_key, seeds", [(1000, 1.6, 50), (10_000, 1.25, 50), (100_000, 1.25, 1)])
def test_nearly_every_table_of_sufficient_size_is_recovered(count, cells_a_key, seeds):
    exact = 0
    for seed in range(seeds):
        values, found, left = recovered(count, int(cells_a_key * count), seed)
        whole = found.peeled + found.solved == count
        assert not whole or np.array_equal(found.values, values) and not left.any()
        exact += whole
    assert exact >= 0.99 * seeds


def test_the_number_of_rows_determines_the_threshold_of_peeling():
    for rows, above, below in ((3, 1.25, 1.19), (4, 1.33, 1.26), (5, 1.46, 1.39)):
        for cells_a_key, all_peel in ((above, True), (below, False)):
            where = peeling.key_cells(
                keys(20_000, rows), rows, int(cells_a_key * 20_000 / rows), rows
            )
            found = peeling.peel(where, peeling.sums(where, integers(20_000)))[1]
            assert found.all() == all_peel, (rows, cells_a_key)


def test_keys_that_cannot_be_peeled_are_solved():
    """Hundreds of keys that cannot be peeled are solved exactly, since the table has more cells than keys."""
    values, found, left = recovered(2000, 2400, 1)
    assert found.peeled < 1100 and found.peeled + found.solved == 2000
    assert np.array_equal(found.values, values) and not left.any()


def test_keys_with_the_same_cells_are_reported_as_estimates():
    cells = np.array([[0, 2, 4]] * 2 + [[1, 3, 5]] * 2, np.int32)
    where = peeling.KeyCells(cells, np.array([[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0]], bool), 6)
    found = peeling.recover(where, peeling.sums(where, np.array([10, 30, 5, 8])))
    assert found.values.tolist() == [20, 20, 5, 8] and (found.peeled, found.solved) == (0, 2)


@pytest.mark.parametrize("cells_a_key", [0.1, 0.6, 0.95, 1.1])
def test_estimates_from_a_small_table_have_at_most_the_error_of_zeros(cells_a_key):
    for count in (30, 1000):
        for seed in range(2):
            values, found, _ = recovered(count, int(cells_a_key * count) + 3, seed)
            lost = (found.values - values).astype(np.float64)
            assert lost @ lost <= (1 + 1e-9) * (values.astype(np.float64) @ values)
            assert np.count_nonzero(found.values != values) <= count - found.peeled - found.solved


def test_tables_of_random_numbers_are_peeled_without_an_error():
    """Found values are subtracted from the table, also if it holds random numbers. Sums wrap around at 2⁶⁴."""
    for count, cells in ((4000, 5600), (4000, 3900), (5000, 30_000)):
        where = peeling.key_cells(keys(count, 7), 3, cells // 3, 11)
        before = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, where.size)
        left = before.copy()
        values, found = peeling.peel(where, left)
        assert found.any() and np.array_equal(left + peeling.sums(where, values), before)


def test_a_table_without_keys_is_recovered():
    where = peeling.key_cells(np.empty(0, np.int64), 3, 4, 1)
    found = peeling.recover(where, peeling.sums(where, np.empty(0, np.int64)))
    assert found.values.size == found.peeled == found.solved == 0
