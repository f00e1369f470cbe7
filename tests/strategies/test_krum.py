"""Krum and multi-Krum equal byzfl's, except for the number of neighbours, and exclude distant Byzantine updates."""

import numpy as np
import pytest
from cases import for_each
from robust_rules import KINDS, aggregated, clouds, oracle, rule

from fedcomp.errors import SpecError
from fedcomp.strategies.krum import scores

SIZES = [(5, 1), (7, 2), (12, 4), (20, 8)]


@for_each("kind", KINDS)
@for_each("m, byzantine", SIZES)
def test_the_chosen_updates_equal_those_of_byzfl(kind, m, byzantine):
    """The paper sums over n − f − 2 neighbours, and byzfl averages over n − f − 1. So f here corresponds to f + 1 in byzfl."""
    x = clouds(kind, m, 200, byzantine)
    assert np.array_equal(
        aggregated(rule(f"krum:{byzantine}", 200), x),
        oracle().Krum(byzantine + 1)(x.astype(np.float64)).astype(np.float32),
    )
    expected = oracle().MultiKrum(byzantine + 1)(x.astype(np.float64))  # the mean of n − (f + 1)
    made = rule(f"multi-krum:{byzantine},keep={m - byzantine - 1}", 200)
    np.testing.assert_allclose(aggregated(made, x), expected, rtol=1e-5, atol=1e-6)


@for_each("m, byzantine", SIZES)
@for_each("kind", ["far", "inverted", "largest"])
def test_distant_byzantine_updates_are_not_chosen(kind, m, byzantine):
    x = clouds(kind, m, 200, byzantine)
    assert any(
        np.array_equal(aggregated(rule(f"krum:{byzantine}", 200), x), row)
        for row in x[: m - byzantine]
    )
    mean = x[: m - byzantine].astype(np.float64).mean(0)
    np.testing.assert_allclose(
        aggregated(rule(f"multi-krum:{byzantine}", 200), x), mean, rtol=1e-5, atol=1e-6
    )


def test_scores_equal_those_of_the_paper():
    x = np.array([[0.0], [1.0], [3.0], [6.0], [100.0]])
    assert scores(x @ x.T, 1).tolist() == [1 + 9, 1 + 4, 4 + 9, 9 + 25, 94**2 + 97**2]


def test_the_first_of_equal_scores_is_chosen():
    x = np.array([[1.0, 0], [0, 1], [1, 1], [0, 0], [5, 5]])
    assert aggregated(rule("krum:1", 2), x).tolist() == [1, 0]


def test_keep_1_is_krum_and_the_default_keeps_all_but_f():
    x = clouds("honest", 9, 60, 0)
    assert np.array_equal(
        aggregated(rule("multi-krum:2,keep=1", 60), x), aggregated(rule("krum:2", 60), x)
    )
    assert np.array_equal(
        aggregated(rule("multi-krum:2,keep=7", 60), x), aggregated(rule("multi-krum:2", 60), x)
    )


def test_a_negative_keep_is_refused():
    with pytest.raises(SpecError, match="keep is -1; give at least 0"):
        rule("multi-krum:keep=-1", 3)
