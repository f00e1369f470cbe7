"""Coordinate-wise median and trimmed mean equal byzfl's and lie within the range of honest values."""

import numpy as np
from cases import for_each
from robust_rules import KINDS, aggregated, clouds, oracle, rule

from fedcomp import RunConfig
from fedcomp.layout import Layout
from fedcomp.strategies import StrategyConfig, resolved, strategy

SIZES = [(3, 1), (5, 2), (10, 4), (11, 3), (20, 2)]


@for_each("kind", KINDS)
@for_each("m, byzantine", SIZES)
def test_results_equal_those_of_byzfl(kind, m, byzantine):
    x = clouds(kind, m, 500, byzantine)
    # For an even number of vectors, byzfl's median of arrays is the mean of the middle two, as here; that of tensors is the lower one.
    for name, other in (
        ("median", oracle().Median()),
        ("trimmed-mean", oracle().TrMean(byzantine)),
    ):
        expected = other(x.astype(np.float64))
        np.testing.assert_allclose(
            aggregated(rule(f"{name}:{byzantine}", 500), x), expected, rtol=1e-6, atol=1e-9
        )


@for_each("name", ["median", "trimmed-mean"])
@for_each("m, byzantine", SIZES)
def test_coordinates_lie_within_the_range_of_honest_values(name, m, byzantine):
    for kind in ("far", "inverted", "largest"):
        x = clouds(kind, m, 300, byzantine)
        honest, y = x[: m - byzantine], aggregated(rule(f"{name}:{byzantine}", 300), x)
        assert ((honest.min(0) <= y) & (y <= honest.max(0))).all()


def test_more_than_f_byzantine_clients_can_move_the_trimmed_mean():
    y = aggregated(rule("trimmed-mean:1", 50), clouds("largest", 7, 50, 2))
    assert (y > 1e30).all()


def test_without_byzantine_clients_the_trimmed_mean_is_the_mean():
    x = clouds("honest", 6, 90, 0)
    expected = x.astype(np.float64).mean(0).astype(np.float32)
    np.testing.assert_allclose(aggregated(rule("trimmed-mean:0", 90), x), expected, rtol=1e-6)


@for_each(
    "text, uplink",
    [
        ("median", "eden:bits=1,damped=true"),
        ("trimmed-mean:2", "eden:bits=1,damped=true"),
        ("median:2,mix=true", RunConfig.uplink),
        ("krum", RunConfig.uplink),
    ],
)
def test_the_default_uplink_sends_every_coordinate_unless_mixed(text, uplink):
    assert resolved(RunConfig(strategy=text)).uplink == uplink
    assert resolved(RunConfig(strategy=text, uplink="stc:density=10%")).uplink == "stc:density=10%"


@for_each("name", ["median", "trimmed-mean"])
@for_each(
    "options, uplink, warned",
    [
        ("", "stc:density=1/100", True),
        ("", "topk:density=10%@layer", True),
        ("", "topk:density=90%", False),
        ("", "eden:bits=1,damped=true", False),
        (",mix=true", "stc:density=1/100", False),
    ],
)
def test_a_sparse_uplink_gives_a_warning(name, options, uplink, warned):
    heard = []
    config = StrategyConfig(uplink=uplink, memory="none")
    strategy(f"{name}:f=1{options}", config, Layout.flat(500), warn=heard.append)
    assert [f"--strategy {name} loses values" in sentence for sentence in heard] == [True] * warned
