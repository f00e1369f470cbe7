"""Density and learning rate by round and client."""

import json
from pathlib import Path

import pytest
import torch
from cases import for_each
from every_codec import layout_of, vectors
from federation import Federation
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import RunConfig, codec
from fedcomp.callbacks import Callback
from fedcomp.codecs import at_density, longest_frame
from fedcomp.errors import ConfigError, ProtocolError
from fedcomp.layout import Layout
from fedcomp.messages import ClientRoundConfig
from fedcomp.sim import simulate
from fedcomp.spec import parse_duration
from fedcomp.strategies import StrategyConfig
from fedcomp.strategies.schedule import Schedule
from fedcomp.training.local_sgd import LocalSGD

TINY = f"{Path(__file__).parents[1] / 'tiny_task.py'}:task"
BOUNDED = [
    "topk",
    "topk:values=fp16",
    "stc",
    "sbc",
    "topk@layer",
    "stc@layer",
    "sbc@layer",
    "topk+fp16",
    "topk+identity",
]
ROTATED = ["topk+eden", "topk+srq:levels=5@layer"]  # frames of tiny values are longer


def made(spec: str, layout: Layout, **options) -> Schedule:
    return Schedule(StrategyConfig(**options), codec(spec), layout)


def test_without_a_schedule_clients_get_no_settings():
    assert made("identity", layout_of(10)).for_clients(1, [3, 5], {}) == {
        3: ClientRoundConfig(0.0, 1.0),
        5: ClientRoundConfig(0.0, 1.0),
    }


def test_the_warm_up_of_the_paper():
    schedule = made("topk:density=0.1%", layout_of(10), density_warmup=4)
    densities = [schedule.for_clients(round, [0], {})[0].density for round in (1, 2, 3, 4, 5, 99)]
    assert densities == pytest.approx([0.25, 0.0625, 0.015625, 0.00390625, 0, 0], rel=0.02)


def test_a_codec_that_is_dense_enough_needs_no_warm_up():
    assert (
        made("topk:density=1/2", layout_of(10), density_warmup=4).for_clients(1, [0], {})[0].density
        == 0
    )


def test_the_learning_rate_grows_linearly_to_its_final_value():
    schedule = made("identity", layout_of(10), lr_warmup=4)
    assert [schedule.for_clients(round, [0], {})[0].lr for round in range(1, 7)] == [
        0.25,
        0.5,
        0.75,
        1,
        1,
        1,
    ]


@for_each("spec", BOUNDED + ROTATED)
def test_no_frame_exceeds_the_declared_size(spec):
    hard = ("normal", "ties", "alternating", "denormal", "all scales")
    for numel, densities in ((1, (1.0,)), (401, (1e-9, 1 / 10, 1.0)), (20_000, (1 / 10,))):
        layout = layout_of(numel)
        for density in densities:
            c = at_density(codec(spec), density)
            longest = longest_frame(c, layout)
            for name, x in vectors(numel).items():
                if numel <= 401 or name in hard:
                    assert len(c.encode(x, layout=layout)) <= longest, (numel, density, name)


@for_each("spec", BOUNDED)
def test_frames_with_random_positions_are_close_to_the_longest(spec):
    c, x = (
        at_density(codec(spec), 1 / 100),
        torch.randn(100_000, generator=torch.Generator().manual_seed(0)),
    )
    layout = Layout.from_shapes({"w": (60_000,), "b": (40_000,)})
    assert len(c.encode(x, layout=layout)) > 0.9 * longest_frame(c, layout)


@given(
    st.sampled_from(BOUNDED),
    st.integers(0, 10**6),
    st.lists(st.none() | st.floats(1.0, 1e9), min_size=1, max_size=8),
)
def test_the_longest_frames_of_a_cohort_fit_the_budget(spec, budget, declared):
    layout, cohort = layout_of(1001), list(range(len(declared)))
    least = longest_frame(at_density(codec(spec), 1e-9), layout)
    schedule = made(spec, layout, budget_bytes=least * len(cohort) + budget)
    configs = schedule.for_clients(
        1, cohort, {client: rate for client, rate in enumerate(declared) if rate is not None}
    )
    assert (
        sum(longest_frame(at_density(codec(spec), configs[c].density), layout) for c in cohort)
        <= schedule.config.budget_bytes
    )


def test_budgets_are_proportional_to_bandwidths_with_the_mean_for_unknown_ones():
    layout = Layout.flat(10**6)
    schedule = made("stc", layout, budget_bytes=60_000)
    configs = schedule.for_clients(1, [0, 1, 2], {0: 1e4, 2: 3e4})
    bytes_ = [
        longest_frame(at_density(codec("stc"), configs[c].density), layout) for c in (0, 1, 2)
    ]
    assert bytes_ == pytest.approx([10_000, 20_000, 30_000], rel=0.01)


@for_each(
    "spec, options, sentence",
    [
        (
            "identity",
            {"budget_bytes": 100},
            "--budget changes the density of the uplink codec, but --uplink identity has no density; leave --budget out",
        ),
        (
            "fp16",
            {"density_warmup": 2},
            "--density-warmup changes the density of the uplink codec, but --uplink fp16 has no density",
        ),
        (
            "stc",
            {"density_warmup": 2, "budget_bytes": 100},
            "--density-warmup and --budget both set the density; give one of them",
        ),
    ],
)
def test_an_invalid_schedule_is_refused(spec, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        made(spec, layout_of(10), **options)


def test_the_error_for_a_small_budget_names_a_sufficient_one():
    with pytest.raises(
        ConfigError,
        match="--budget of 50 bytes is too small for 3 clients in a round; give at least",
    ) as caught:
        made("stc", layout_of(1001), budget_bytes=50).for_clients(1, [0, 1, 2], {})
    enough = int(str(caught.value).partition("at least ")[2].partition(",")[0])
    assert made("stc", layout_of(1001), budget_bytes=enough).for_clients(1, [0, 1, 2], {})


@given(st.floats(1.0, 1e9))
def test_the_error_for_a_short_time_names_a_sufficient_one(bandwidth):
    def lasting(seconds: float) -> Schedule:
        return made("stc", layout_of(1001), budget_s=seconds)

    with pytest.raises(ConfigError, match="too short for client 1: it can send") as caught:
        lasting(1e-9).for_clients(1, [0, 1], {0: 2 * bandwidth, 1: bandwidth})
    said = str(caught.value).partition("at least ")[2]
    assert lasting(parse_duration(said)).for_clients(1, [0, 1], {0: 2 * bandwidth, 1: bandwidth})


@for_each("multiple", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_not_positive_and_finite_is_refused(multiple):
    with pytest.raises(ProtocolError, match="expected a positive, finite factor"):
        LocalSGD().for_round(lr=multiple)


def test_a_rate_out_of_the_range_of_float32_is_refused():
    with pytest.raises(
        ProtocolError,
        match=r"^the server asks for the learning rate 5e\+298; expected at most 3e\+38$",
    ):
        LocalSGD(lr=0.05).for_round(lr=1e300)


def test_clients_follow_the_density_of_each_round():
    federation = Federation(
        StrategyConfig(participation=1.0, uplink="topk:density=1/50", density_warmup=2, lr_warmup=2)
    )
    n, sent = federation.layout.numel, []
    for outcome in federation.loop.rounds((1, 2, 3)):
        sent.append({a.update.nonzeros for a in outcome.accepted})
    assert sent == [
        {at_density(codec("topk"), d).count(n)} for d in (0.25, (0.25 / 50) ** 0.5, 1 / 50)
    ]


class Rounds(Callback):
    def __init__(self):
        self.records = []

    def on_round_end(self, record):
        self.records.append(record)


def test_a_simulation_with_a_budget_keeps_it_after_a_resume(tmp_path):
    options = dict(
        task=TINY,
        clients=6,
        participation=0.5,
        budget="72B",
        bandwidths="1kB,9kB",
        lr_warmup=3,
    )
    seen = Rounds()
    simulate(RunConfig(**options, rounds=4, out=str(tmp_path / "whole")), seen)
    assert all(50 < record.uplink_bytes <= 72 for record in seen.records)
    simulate(RunConfig(**options, rounds=2, out=str(tmp_path / "parts")))
    simulate(RunConfig(**options, rounds=4, out=str(tmp_path / "parts"), resume=True))
    assert (tmp_path / "parts/model.safetensors").read_bytes() == (
        tmp_path / "whole/model.safetensors"
    ).read_bytes()
    lines = [
        json.loads(line) for line in (tmp_path / "parts/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["uplink_bytes"] for line in lines] == [
        record.uplink_bytes for record in seen.records
    ]
