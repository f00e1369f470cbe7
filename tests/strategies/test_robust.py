"""Properties of every robust rule: the required clients, rounds with too few of them, and models that stay near the honest ones."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cases import for_each
from federation import Federation, sum_updates
from robust_rules import FRONTS, NAMES, aggregated, clouds, oracle, rule

from fedcomp import UserError, codec, seeds
from fedcomp.errors import ConfigError, SpecError
from fedcomp.layout import Layout
from fedcomp.strategies import StrategyConfig, available_strategies, robust, strategy
from fedcomp.strategies.robust import UpdateMatrix

RULES = StrategyConfig(participation=1.0, uplink="stc:density=1/2", downlink="identity", seed=3)
# Smallest number of clients in a round, minus (2f − 1).
LEAST = {
    "median": 2,
    "trimmed-mean": 2,
    "krum": 4,
    "multi-krum": 4,
    "geometric-median": 2,
    "centered-clipping": 2,
}

every_rule = pytest.mark.parametrize("name", NAMES)


def federation(name: str, clients: int = 6, **changes) -> Federation:
    made = available_strategies()[name]
    return Federation(
        replace(RULES, **changes), clients, strategy=partial(made, options=made.Options(f=1))
    )


def scaled(factor: float):
    """A Byzantine client that sends its update times a factor."""

    def lie(assignment, report):
        c = codec("identity")
        return replace(report, frame=c.encode(factor * c.decode(report.frame, numel=42)))

    return lie


def lose(assignment, report):
    return replace(report, kind="failed", frame=b"", stage="train", reason="lost")


# How many clients.


@every_rule
@pytest.mark.parametrize("byzantine", [1, 4])
def test_a_cohort_that_is_too_small_is_refused(name, byzantine):
    least = 2 * byzantine + LEAST[name] - 1
    rule(f"{name}:{byzantine}", 3, participation=1.0, clients=least)
    with pytest.raises(
        ConfigError,
        match=f"--strategy {name} needs {least} clients .* has {least - 1}; give a larger --participation",
    ) as error:
        rule(f"{name}:{byzantine}", 3, participation=1.0, clients=least - 1)
    assert "\n" not in str(error.value)


@every_rule
def test_a_quorum_that_is_too_small_is_refused(name):
    least = 2 + LEAST[name] - 1
    rule(f"{name}:1", 3, quorum=0.5, participation=1.0, clients=2 * least)
    with pytest.raises(
        ConfigError,
        match=f"needs {least} clients .* with --quorum 0.5 a round ends after {least - 1} answers; give a larger",
    ):
        rule(f"{name}:1", 3, quorum=0.5, participation=1.0, clients=2 * least - 2)


@every_rule
@pytest.mark.parametrize("size", [2, 3])
def test_with_buckets_a_cohort_must_fill_enough_of_them(name, size):
    text, vectors = f"{name}:2,buckets={size}", 2 * 2 + LEAST[name] - 1
    least = next(n for n in range(1, 100) if math.ceil(n / size) >= vectors)
    assert rule(text, 3, participation=1.0, clients=least).min_cohort == least
    with pytest.raises(ConfigError, match=f"{least} clients in a round for f=2 and buckets={size}"):
        rule(text, 3, participation=1.0, clients=least - 1)


def test_the_options_mix_and_keep_increase_the_required_cohort():
    assert rule("multi-krum:1,keep=9", 3).min_cohort == 10
    assert [rule(f"{name}:3,mix=true", 3).min_cohort for name in NAMES] == [7, 7, 9, 9, 7, 7]


@every_rule
def test_a_round_with_too_few_updates_moves_and_loses_nothing(name):
    least = 2 + LEAST[name] - 1
    f = federation(name, clients=least)
    (first,) = f.loop.rounds((1,))
    assert first.broadcast is not None and not first.rejections
    f.faults[0, 2] = lose
    version, tickets = f.loop.broadcasts.version, dict(f.loop.tickets)
    (second,) = f.loop.rounds((2,))
    assert second.broadcast is None and not second.accepted and f.loop.broadcasts.version == version
    assert f.loop.tickets == tickets
    assert [r.stage for r in second.rejections] == ["train"] + ["aggregate"] * (least - 1)
    for rejection in second.rejections[1:]:
        assert (
            rejection.reason
            == f"strategy '{name}' needs {least} clients in a round for f=1; {least - 1} were accepted"
        )
    waiting = {i: member.memory.pending for i, member in enumerate(f.members)}
    (third,) = f.loop.rounds((3,))
    assert third.broadcast is not None and len(third.accepted) == least
    for client, frame in waiting.items():
        assert frame is not None and f.loop.tickets[client] != tickets[client]


@every_rule
def test_residuals_keep_the_updates_of_failed_rounds(name):
    """Σ accepted updates + residual = Σ inputs, for each client."""
    f = federation(name, clients=5 if LEAST[name] == 4 else 3)
    inputs, taken = (
        torch.zeros(len(f.members), 42, dtype=torch.float64),
        torch.zeros(len(f.members), 42, dtype=torch.float64),
    )
    for client, member in enumerate(f.members):
        sum_updates(member, inputs[client])
    f.faults[0, 2] = f.faults[1, 4] = f.faults[1, 5] = lose
    outcomes = list(f.loop.rounds(range(1, 8)))
    assert [o.broadcast is None for o in outcomes] == [False, True, False, True, True, False, False]
    for outcome in outcomes:
        for a in outcome.accepted:
            taken[a.client] += a.update.dense()
    for client, member in enumerate(f.members):
        assert member.ticket == f.loop.tickets[client]
        member.memory.commit()
        kept = member.memory.state_dict()["residual"].double()
        torch.testing.assert_close(taken[client] + kept, inputs[client], rtol=1e-5, atol=1e-6)


# Results for given vectors.


@every_rule
@pytest.mark.parametrize("front", FRONTS)
def test_the_largest_byzantine_updates_leave_a_finite_result(name, front):
    for kind in ("largest", "far"):
        x = clouds(kind, 13, 80, 2)
        y = aggregated(rule(f"{name}:2{front}", 80), x)
        center = x[:11].astype(np.float64).mean(0)
        assert (
            np.isfinite(y).all()
            and np.linalg.norm(y - center) < 30 * np.linalg.norm(x[:11] - center, axis=1).max()
        )


@every_rule
@pytest.mark.parametrize("front", FRONTS)
def test_block_size_and_type_of_updates_do_not_change_the_result(name, front, monkeypatch):
    n = 2 * robust.CHUNK + 77
    x = clouds("far", 13, n, 2)
    x[:, ::3] = 0
    whole = aggregated(rule(f"{name}:2{front}", n), x)
    monkeypatch.setattr(UpdateMatrix, "block", robust.CHUNK)
    assert np.array_equal(whole, aggregated(rule(f"{name}:2{front}", n), x, sparse=True))


@every_rule
@pytest.mark.parametrize("front", ["", ",mix=true"])
@pytest.mark.parametrize("kind", ["honest", "far", "inverted"])
def test_the_result_does_not_depend_on_the_order_of_clients(name, front, kind):
    """With buckets, the result depends on the order, because buckets are drawn by position."""
    x = clouds(kind, 13, 200, 2)
    shuffled = np.random.default_rng(1).permutation(x)
    y, z = (aggregated(rule(f"{name}:2{front}", 200), rows) for rows in (x, shuffled))
    if name in ("median", "trimmed-mean", "krum") and not front:
        assert np.array_equal(y, z)
    np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-6)


def byzfl_rule(name: str, byzantine: int):
    a = oracle()
    return {
        "median": a.Median(),
        "trimmed-mean": a.TrMean(byzantine),
        "krum": a.Krum(byzantine + 1),
        "multi-krum": a.MultiKrum(byzantine + 1),
        "geometric-median": a.GeometricMedian(nu=0.1, T=10),
        "centered-clipping": a.CenteredClipping(L=2, tau=1.5),
    }[name]


SAME = {
    "multi-krum": ",keep={keep}",
    "geometric-median": ",iterations=10,tolerance=0,smoothing=0.1",
    "centered-clipping": ",iterations=2,radius=1.5",
}


@every_rule
@pytest.mark.parametrize("kind", ["honest", "far", "inverted"])
def test_with_mixing_and_buckets_results_equal_those_of_byzfl(name, kind, monkeypatch):
    monkeypatch.setattr(seeds, "generator", lambda *which: np.random.RandomState(5))
    x = clouds(kind, 14, 120, 2)
    for front, steps in (
        (",mix=true", ["mix"]),
        (",buckets=2", ["buckets"]),
        (",buckets=2,mix=true", ["buckets", "mix"]),
    ):
        vectors = x.astype(np.float64)
        np.random.seed(5)
        for step in steps:
            vectors = oracle().NNM(2)(vectors) if step == "mix" else oracle().Bucketing(2)(vectors)
        expected = byzfl_rule(name, 2)(vectors)
        y = aggregated(
            rule(f"{name}:2{front}{SAME.get(name, '').format(keep=len(vectors) - 3)}", 120), x
        )
        np.testing.assert_allclose(
            y, expected, rtol=1e-4, atol=1e-5 * max(1, np.abs(expected).max())
        )


# In rounds.

ANY_CODEC = (
    "qsgd@layer",
    "eden",
    "sketch:columns=20,density=1",
    "topk:density=1/2+s2",
    "sign",
    "atomo",
)


@pytest.mark.parametrize("name", ["average", *NAMES])
def test_a_byzantine_client_moves_the_mean_far_and_a_robust_rule_little(name):
    dense = {"uplink": "identity", "memory": "none"}
    lied, honest = (
        federation(name, **dense) if name in NAMES else Federation(replace(RULES, **dense))
        for _ in range(2)
    )
    for round in range(1, 4):
        lied.faults[5, round] = scaled(-1e3)
    for f in (lied, honest):
        assert all(not o.rejections and len(o.accepted) == 6 for o in f.loop.rounds(range(1, 4)))
    way, off = (
        honest.loop.broadcasts.weights - w for w in (honest.initial, lied.loop.broadcasts.weights)
    )
    assert off.norm() < way.norm() if name in NAMES else off.norm() > 100 * way.norm()


@for_each(
    "name, memory, uplink",
    [
        (name, *pair)
        for name, pair in zip(
            NAMES,
            2 * [("ef21", "stc:density=1/2"), ("diana", "natural"), ("laq:weight=8", "fp16")],
            strict=True,
        )
    ],
)
def test_rules_read_the_estimates_of_memories_with_a_counterpart(name, memory, uplink):
    f = federation(name, memory=memory, uplink=uplink)
    outcomes = list(f.loop.rounds(range(1, 4)))
    assert all(o.broadcast is not None and not o.rejections for o in outcomes)
    assert f.loop.broadcasts.weights.isfinite().all()


@for_each("name, uplink", [*zip(NAMES, ANY_CODEC, strict=True)])
def test_rules_read_frames_of_any_codec(name, uplink):
    f = federation(name, memory="none", uplink=uplink)
    (outcome,) = f.loop.rounds((1,))
    assert outcome.broadcast is not None and not outcome.rejections
    x = np.stack([a.update.dense().numpy() for a in outcome.accepted])
    step = f.loop.broadcasts.weights - f.initial
    np.testing.assert_allclose(
        step.numpy(), aggregated(rule(f"{name}:1", 42), x), rtol=1e-4, atol=1e-6
    )


def test_weights_by_examples_are_refused():
    with pytest.raises(
        UserError, match="--strategy krum gives every client the same weight.*leave --weights out"
    ) as error:
        strategy("krum", StrategyConfig(weights="examples"), Layout.flat(3))
    assert "\n" not in str(error.value)


def test_the_option_name_of_version_0_1_is_accepted():
    assert rule("krum:liars=2", 10).options == rule("krum:f=2", 10).options


@every_rule
@pytest.mark.parametrize("option", ["f=-1", "buckets=0", "f=1.5", "mix=perhaps", "size=2"])
def test_invalid_options_are_refused(name, option):
    with pytest.raises(SpecError, match=option.partition("=")[0]):
        strategy(f"{name}:{option}", RULES, Layout.flat(3))
