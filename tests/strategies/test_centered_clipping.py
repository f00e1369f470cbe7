"""Centered clipping equals byzfl's. Its center is kept between rounds and stored in checkpoints."""

import numpy as np
import pytest
import torch
from cases import for_each
from robust_rules import KINDS, aggregated, clouds, oracle, rule

from fedcomp.errors import SpecError

MOVED, STAYED = (1, b"a frame"), (1, None)  # the end of a round


@for_each("kind", KINDS)
@for_each("m, byzantine", [(3, 1), (7, 3), (20, 4)])
@for_each("steps, radius", [(1, 3.0), (4, 0.5), (2, 1000.0)])
def test_rounds_equal_those_of_byzfl(kind, m, byzantine, steps, radius):
    other, made = (
        oracle().CenteredClipping(L=steps, tau=radius),
        rule(f"centered-clipping:{byzantine},iterations={steps},radius={radius}", 200),
    )
    for round in range(1, 5):
        x = clouds(kind, m, 200, byzantine, seed=round)
        with np.errstate(divide="ignore"):
            expected = other(x.astype(np.float64))
        y = aggregated(made, x, round=round)
        made.on_round_end(*MOVED)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_with_a_radius_above_all_distances_the_result_is_the_mean():
    x = clouds("honest", 6, 50, 0)
    np.testing.assert_allclose(
        aggregated(rule("centered-clipping:0,radius=1e30", 50), x), x.mean(0), rtol=1e-5, atol=1e-6
    )


@for_each("m, byzantine", [(3, 1), (9, 4), (20, 4)])
@for_each("kind", ["far", "largest"])
def test_with_the_default_radius_a_step_is_no_longer_than_an_honest_one(kind, m, byzantine):
    made, longest = rule(f"centered-clipping:{byzantine}", 80), 0.0
    for round in range(1, 6):
        before = np.zeros(80) if made.center is None else made.center.numpy().copy()
        x = clouds(kind, m, 80, byzantine, seed=round)
        y = aggregated(made, x, round=round)
        made.on_round_end(*MOVED)
        longest = np.linalg.norm(x[: m - byzantine] - before, axis=1).max()
        assert np.linalg.norm(y - before) <= longest * (1 + 1e-6)


def test_updates_equal_to_the_center_leave_it_unchanged():
    made, x = rule("centered-clipping:1", 20), np.ones((5, 20))
    x[4] = 7
    for round in (1, 2, 3):
        y = aggregated(made, x, round=round)
        made.on_round_end(*MOVED)
    np.testing.assert_allclose(y, 1, rtol=1e-6)


def test_a_round_that_does_not_move_the_model_leaves_the_center():
    made = rule("centered-clipping:1", 20)
    aggregated(made, clouds("honest", 5, 20, 0))
    made.on_round_end(*STAYED)
    assert made.center is None and made.take_changes() == ({}, {})
    y = aggregated(made, clouds("honest", 5, 20, 0))
    made.on_round_end(*MOVED)
    assert np.array_equal(made.center.numpy(), y)
    aggregated(made, clouds("honest", 5, 20, 0, seed=1))
    made.on_round_end(*STAYED)
    assert np.array_equal(made.center.numpy(), y)


def test_a_checkpoint_restores_the_center():
    made, again = rule("centered-clipping:1,radius=2", 20), rule("centered-clipping:1,radius=2", 20)
    x = clouds("honest", 5, 20, 0)
    aggregated(made, x)
    made.on_round_end(*MOVED)
    vectors, values = made.take_changes()
    assert set(vectors) == {"center"} and values == {}
    again.restore({name: vector.clone() for name, vector in vectors.items()}.get, values.get)
    assert torch.equal(again.center, made.center)
    assert np.array_equal(aggregated(made, x, round=2), aggregated(again, x, round=2))
    again.restore({}.get, {}.get)
    assert again.center is None


@for_each("option", ["radius=-1", "radius=1e40", "iterations=0"])
def test_options_out_of_range_are_refused(option):
    with pytest.raises(SpecError, match=f"{option.partition('=')[0]} is .*; give"):
        rule(f"centered-clipping:{option}", 3)
