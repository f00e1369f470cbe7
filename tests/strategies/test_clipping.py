"""The server clips updates by the norm of the decoded frame, for every codec."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import ONE_EACH
from federation import Federation

from fedcomp import codec
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout
from fedcomp.strategies import Asynchronous, Average, StrategyConfig, available_strategies
from fedcomp.strategies.average import clip_factor, norm
from fedcomp.strategies.base import RoundUpdates
from fedcomp.strategies.gtopk import GTopK

LAYOUT = Layout.from_shapes({"a": (30, 20), "b": (20,), "c": (8, 10)})
X = torch.from_numpy(np.random.default_rng(3).normal(0, 1, LAYOUT.numel).astype(np.float32))
DENSE = StrategyConfig(
    participation=1.0, uplink="identity", downlink="identity", seed=3, clip_update=0.05
)


@for_each("text", ONE_EACH)
def test_the_norm_equals_that_of_the_decoded_frame(text):
    made = codec(text)
    frame = made.encode(X, seed=1, layout=LAYOUT)
    (update,) = made.open_batch([frame], LAYOUT.numel, LAYOUT)
    length = float(made.decode(frame, numel=LAYOUT.numel, layout=LAYOUT).double().norm())
    assert norm(update) == pytest.approx(length, rel=1e-6)
    assert clip_factor(update, length * 1.01) == 1.0
    assert clip_factor(update, length / 4) == pytest.approx(0.25, rel=1e-6)


def test_an_update_of_zeros_is_not_clipped():
    made = codec("identity")
    (update,) = made.open_batch([made.encode(torch.zeros(10))], 10, None)
    assert norm(update) == 0 and clip_factor(update, 1e-30) == 1.0


def test_the_mean_is_over_clipped_updates_which_are_counted():
    federation = Federation(DENSE)
    start = federation.initial
    shout = federation.strategy.uplink.encode(torch.full((federation.layout.numel,), 1e4))
    federation.faults[2, 1] = lambda a, r: replace(r, frame=shout)
    (outcome,) = federation.loop.rounds([1])
    updates = torch.stack([a.update.dense() for a in outcome.accepted])
    lengths = updates.norm(dim=1, keepdim=True)
    clipped = updates * (DENSE.clip_update / lengths).clamp(max=1)
    torch.testing.assert_close(
        federation.loop.broadcasts.weights, start + clipped.mean(0), rtol=1e-4, atol=1e-6
    )
    assert outcome.clipped == int((lengths > DENSE.clip_update).sum()) >= 1
    assert float((federation.loop.broadcasts.weights - start).norm()) <= DENSE.clip_update * 1.001


def test_clipped_updates_are_also_weighted_by_examples_and_staleness():
    federation = Federation(replace(DENSE, weights="examples"), strategy=Asynchronous)
    answers = Federation(replace(DENSE, clip_update=0.0))
    (outcome,) = answers.loop.rounds([1])
    strategy, into = federation.strategy, torch.zeros(federation.layout.numel)
    accepted = [
        replace(a, examples=i + 1, staleness=3 if a.client == 0 else 0)
        for i, a in enumerate(outcome.accepted)
    ]
    strategy.aggregate(RoundUpdates(4, {"train": accepted}, torch.zeros_like(into)), into)
    weights = [a.examples * (0.5 if a.client == 0 else 1.0) for a in accepted]  # (1 + 3)^-0.5
    parts = [
        w * a.update.dense() * min(1.0, 0.05 / float(a.update.dense().norm()))
        for w, a in zip(weights, accepted, strict=True)
    ]
    torch.testing.assert_close(
        into, torch.stack(parts).sum(0) / sum(a.examples for a in accepted), rtol=1e-4, atol=1e-6
    )


def test_estimates_of_a_counterpart_are_clipped_after_adding_the_update():
    federation = Federation(replace(DENSE, uplink="topk:density=20%", memory="ef21"))
    for _ in federation.loop.rounds(range(1, 6)):
        pass
    before = federation.loop.broadcasts.weights.clone()
    (outcome,) = federation.loop.rounds([6])
    assert (
        outcome.clipped
        and float((federation.loop.broadcasts.weights - before).norm()) <= DENSE.clip_update * 1.001
    )


def test_gtopk_clips_updates_and_counts_none_without_a_bound():
    rules = replace(DENSE, uplink="topk:density=20%", clip_update=1e-3)
    federation, free = (
        Federation(rules, strategy=GTopK),
        Federation(replace(rules, clip_update=0.0), strategy=GTopK),
    )
    (outcome,) = federation.loop.rounds([1])
    assert outcome.clipped == len(outcome.accepted)
    assert next(free.loop.rounds([1])).clipped == 0


@for_each(
    "name", [name for name, cls in available_strategies().items() if not cls.supports_clipping]
)
def test_strategies_that_cannot_clip_refuse_the_option(name):
    cls = available_strategies()[name]
    assert name not in (Average.name, GTopK.name, Asynchronous.name)
    with pytest.raises(
        ConfigError,
        match=f"--strategy {name} cannot clip the updates of single clients; leave --clip-update out",
    ):
        cls(DENSE, Layout.flat(8))
