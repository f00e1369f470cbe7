"""Blocks of updates have the values of the updates, and fit into a memory that does not depend on the size of the model."""

import tracemalloc

import numpy as np
import pytest
import torch
from every_codec import ONE_EACH, layout_of

from fedcomp import codec
from fedcomp.codecs.update import Dense, Sparse
from fedcomp.memories.shift import Estimate
from fedcomp.strategies import robust
from fedcomp.strategies.robust import UpdateMatrix, distances_to_mean, squared_distances

NUMEL = 300


def opened(spec: str, m: int = 4) -> list:
    made, layout = codec(spec), layout_of(NUMEL)
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.standard_normal((m, NUMEL)).astype(np.float32))
    return [made.open(made.encode(row, seed=3, layout=layout), NUMEL, layout) for row in x]


@pytest.mark.parametrize("spec", ONE_EACH)
def test_blocks_of_every_codec_equal_the_decoded_vectors(spec, monkeypatch):
    monkeypatch.setattr(UpdateMatrix, "block", 64)
    updates = opened(spec)
    whole = np.stack([update.dense().numpy() for update in updates])
    read = np.concatenate(
        [values.copy() for _, values in UpdateMatrix(updates, NUMEL).blocks()], axis=1
    )
    assert np.array_equal(read, whole)
    into, weights = torch.zeros(NUMEL), np.array([0.5, 0, -2, 1.25])
    UpdateMatrix(updates, NUMEL).combine(weights, into)
    np.testing.assert_allclose(
        into.numpy(), weights @ whole.astype(np.float64), rtol=1e-6, atol=1e-6
    )
    products = UpdateMatrix(updates, NUMEL).products()
    np.testing.assert_allclose(
        products, whole.astype(np.float64) @ whole.T.astype(np.float64), rtol=1e-12, atol=1e-12
    )
    assert np.array_equal(products, products.T)


def test_the_block_size_does_not_change_the_result(monkeypatch):
    n = 5 * robust.CHUNK + 123
    x = np.random.default_rng(0).standard_normal((7, n)).astype(np.float32)
    rows, found = [Dense(row) for row in x], []
    for chunks in (1, 2, 3, 100):
        monkeypatch.setattr(UpdateMatrix, "block", chunks * robust.CHUNK)
        into = torch.zeros(n)
        UpdateMatrix(rows, n).combine(np.arange(7) / 9, into)
        found.append((UpdateMatrix(rows, n).products(), into.numpy()))
    assert all(np.array_equal(found[0][i], other[i]) for other in found[1:] for i in (0, 1))


def test_distances_equal_those_of_the_vectors():
    x = np.random.default_rng(0).standard_normal((6, 900)).astype(np.float32)
    x[5] = x[2]
    products = UpdateMatrix([Dense(row) for row in x], 900).products()
    exact = ((x[:, None].astype(np.float64) - x[None]) ** 2).sum(-1)
    np.testing.assert_allclose(squared_distances(products), exact, rtol=1e-12, atol=1e-11)
    weights = np.array([0.2, 0.3, 0, 0, 0.4, 0.1])
    np.testing.assert_allclose(
        distances_to_mean(products, weights), np.linalg.norm(x - weights @ x, axis=1), rtol=1e-6
    )


def test_distant_vectors_do_not_change_the_distances_of_others():
    x = np.random.default_rng(0).standard_normal((5, 900)).astype(np.float32)
    alone = squared_distances(UpdateMatrix([Dense(row) for row in x], 900).products())
    far = np.full(900, np.finfo(np.float32).max, np.float32)
    beside = squared_distances(
        UpdateMatrix([*(Dense(row) for row in x), Dense(far), Dense(-far)], 900).products()
    )
    assert np.array_equal(alone, beside[:5, :5]) and np.isfinite(beside).all()


def test_a_client_without_a_frame_counts_as_a_zero_update():
    into = torch.ones(10)
    rows = UpdateMatrix([None, Dense(np.ones(10, np.float32))], 10)
    assert rows.products().tolist() == [[0, 0], [0, 10]]
    rows.combine(np.array([0.5, 0.5]), into)
    assert into.tolist() == [0.5] * 10
    UpdateMatrix([None, None], 10).combine(np.array([0.5, 0.5]), into)
    assert not into.any()


def test_sums_are_clipped_to_the_range_of_float32():
    largest = float(np.finfo(np.float32).max)
    over = Estimate(torch.full((4,), largest), Dense(np.full(4, largest, np.float32)))
    rows, into = UpdateMatrix([over, over, over], 4), torch.zeros(4)
    assert np.isfinite(rows.products()).all()
    rows.combine(np.array([0.5, 0.3, 0.2]), into)
    assert into.tolist() == [largest] * 4
    rows.combine(np.array([3.0, 3.0, 3.0]), into)
    assert into.tolist() == [largest] * 4


def test_an_update_with_weight_0_is_not_read():
    class Unreadable(Dense):
        def block(self, start, stop):
            raise AssertionError("read")

    into = torch.zeros(3)
    UpdateMatrix([Unreadable(np.ones(3, np.float32)), Dense(np.ones(3, np.float32))], 3).combine(
        np.array([0, 1]), into
    )
    assert into.tolist() == [1, 1, 1]


def test_memory_holds_at_most_two_blocks():
    """20 sparse updates of 4 M coordinates, which would take 320 MB if they were dense."""
    m, n, k = 20, 4_000_000, 4000
    rng = np.random.default_rng(0)
    updates = [
        Sparse(
            n, np.sort(rng.choice(n, k, replace=False)), rng.standard_normal(k).astype(np.float32)
        )
        for _ in range(m)
    ]
    into = torch.zeros(n)
    tracemalloc.start()
    try:
        rows = UpdateMatrix(updates, n)
        products = rows.products()
        rows.combine(np.full(m, 1 / m), into)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    block, chunk = 4 * m * robust.BLOCK, 8 * m * robust.CHUNK
    assert block <= peak < 2 * block + 2 * chunk < 4 * m * n / 12
    assert np.isclose(
        products.trace(), sum(float((u.values.astype(np.float64) ** 2).sum()) for u in updates)
    )
