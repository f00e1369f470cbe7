"""Mixing and bucketing equal those of byzfl."""

import numpy as np
import pytest
from cases import for_each
from robust_rules import KINDS, clouds, oracle

from fedcomp import seeds
from fedcomp.strategies import robust


def distances(x: np.ndarray) -> np.ndarray:
    return ((x[:, None].astype(np.float64) - x[None]) ** 2).sum(-1)


@for_each("kind", [*KINDS, "largest"])
@for_each("m, byzantine", [(5, 0), (5, 2), (11, 3), (20, 9)])
def test_neighbours_equal_those_of_byzfl(kind, m, byzantine):
    x = clouds(kind, m, 40, byzantine).astype(np.float64)
    if kind in ("mimic", "zero", "colluding"):
        x += 1e-6 * np.random.default_rng(1).standard_normal(
            x.shape
        )  # byzfl breaks ties of distances arbitrarily
    mixed = robust.nearest(distances(x), byzantine) @ x
    np.testing.assert_allclose(
        mixed, oracle().NNM(byzantine)(x), rtol=1e-9, atol=1e-9 * np.abs(x).max()
    )


def test_the_first_of_equally_distant_neighbours_counts_as_nearer():
    x = np.array([[0.0], [0.0], [1.0], [-1.0]])
    near = robust.nearest(distances(x), 1)
    assert (near * 3).tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert (robust.nearest(distances(x), 3) == np.eye(4)).all()


@pytest.mark.parametrize(("m", "size"), [(1, 1), (6, 2), (7, 2), (7, 3), (5, 9)])
def test_buckets_equal_those_of_byzfl_for_the_same_permutation(m, size, monkeypatch):
    x = np.random.default_rng(0).standard_normal((m, 13))
    monkeypatch.setattr(seeds, "generator", lambda *which: np.random.RandomState(5))
    np.random.seed(5)  # byzfl uses this generator
    np.testing.assert_allclose(
        robust.buckets(m, size, 0, 1) @ x, oracle().Bucketing(size)(x), rtol=1e-12, atol=1e-12
    )


@for_each("m, size", [(6, 2), (7, 3), (20, 4)])
def test_each_vector_is_in_one_bucket_and_each_round_draws_new_ones(m, size):
    drawn = [robust.buckets(m, size, 0, round) for round in (1, 2, 1)]
    for found in drawn:
        assert found.shape == (-(-m // size), m)
        assert ((found > 0).sum(0) == 1).all() and ((found > 0).sum(1)[:-1] == size).all()
        np.testing.assert_allclose(found.sum(1), 1)
    assert np.array_equal(drawn[0], drawn[2]) and not np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], robust.buckets(m, size, 1, 1))
