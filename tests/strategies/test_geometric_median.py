"""The geometric median equals byzfl's, minimizes the sum of distances, and stays within the published bound."""

import numpy as np
import pytest
from cases import for_each
from robust_rules import KINDS, aggregated, clouds, oracle, rule

from fedcomp.errors import SpecError

SIZES = [(3, 1), (7, 3), (20, 4)]


@for_each("kind", KINDS)
@for_each("m, byzantine", SIZES)
@for_each("steps", [1, 3, 20])
def test_steps_equal_those_of_byzfl(kind, m, byzantine, steps):
    x = clouds(kind, m, 200, byzantine)
    expected = oracle().GeometricMedian(nu=0.1, T=steps)(x.astype(np.float64))
    y = aggregated(
        rule(f"geometric-median:{byzantine},iterations={steps},tolerance=0,smoothing=0.1", 200), x
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def cost(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64) - y, axis=1).sum())


@for_each("kind", KINDS)
def test_no_nearby_point_has_a_smaller_sum_of_distances(kind):
    x = clouds(kind, 11, 50, 3)
    y, rng = (
        aggregated(rule("geometric-median:3,tolerance=0", 50), x).astype(np.float64),
        np.random.default_rng(2),
    )
    for length in (1e-3, 1e-2, 0.1, 1):
        for _ in range(50):
            step = rng.standard_normal(50)
            assert cost(x, y) <= cost(x, y + length * step / np.linalg.norm(step)) * (1 + 1e-7)
    assert cost(x, y) <= min(cost(x, other) for other in (*x, x.mean(0), np.median(x, axis=0))) * (
        1 + 1e-7
    )


@for_each("kind", [*KINDS, "largest"])
def test_a_coarse_tolerance_stops_close_to_the_median(kind):
    x = clouds(kind, 11, 50, 3)
    coarse, fine = (
        aggregated(rule(f"geometric-median:3,tolerance={t}", 50), x) for t in ("1e-3", "0")
    )
    spread = np.median(np.linalg.norm(x[:8] - fine, axis=1))
    assert 0 < np.linalg.norm(coarse - fine) < 0.02 * spread


@for_each("m, byzantine", SIZES)
def test_the_distance_of_byzantine_updates_does_not_affect_the_bound(m, byzantine):
    """‖y − c‖ ≤ 2(1 − f/n)/(1 − 2f/n) · the largest distance of an honest vector from c (Lopuhaä, Rousseeuw 1991)."""
    for kind in ("far", "largest"):
        x = clouds(kind, m, 80, byzantine)
        center = x[: m - byzantine].astype(np.float64).mean(0)
        y = aggregated(rule(f"geometric-median:{byzantine}", 80), x)
        bound = (
            2
            * (m - byzantine)
            / (m - 2 * byzantine)
            * np.linalg.norm(x[: m - byzantine] - center, axis=1).max()
        )
        assert np.linalg.norm(y - center) <= bound


def test_the_median_of_equal_vectors_is_that_vector():
    x = np.repeat(clouds("honest", 1, 30, 0), 5, axis=0)
    np.testing.assert_allclose(aggregated(rule("geometric-median:2", 30), x), x[0], rtol=1e-6)


@for_each("option", ["iterations=0", "tolerance=-1", "smoothing=0", "f=-1", "buckets=0"])
def test_options_out_of_range_are_refused(option):
    with pytest.raises(SpecError, match=f"{option.partition('=')[0]} is .*give"):
        rule(f"geometric-median:{option}", 3)
