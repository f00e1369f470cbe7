"""Runs with a server optimizer: with compression, after an interruption, and with options that are refused."""

from dataclasses import replace

import pytest
import torch
from cases import for_each
from federation import Federation
from small_runs import (
    TINY,
    Stop,
    StopsAt,
    assert_refused,
    assert_the_same_when_stopped,
    model_bytes,
    out,
)

from fedcomp import RunConfig
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout
from fedcomp.sim import simulate
from fedcomp.strategies import StrategyConfig, available_strategies, strategy
from fedcomp.strategies.gtopk import GTopK
from fedcomp.strategies.optimizers import FIRST, optimizer

TEXTS = ["sgd:momentum=0.5", "sgd:momentum=0.5,nesterov=true", "adam", "yogi:tau=1%"]
DENSE = StrategyConfig(participation=1.0, uplink="identity", downlink="identity", seed=3)


def with_optimizer(config, text: str):
    return replace(config, server_optimizer=text, server_lr=1.0 if text.startswith("sgd") else 0.02)


@pytest.mark.parametrize(
    ("text", "stop", "every"),
    [(TEXTS[0], StopsAt(1, 1), 1), (TEXTS[1], StopsAt(5), 4), (TEXTS[2], StopsAt(3, 2), 1)],
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path, text, stop, every):
    config = with_optimizer(replace(TINY, checkpoint_every=every), text)
    assert_the_same_when_stopped(tmp_path, config, stop)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["asynchronous", "gtopk", "median", "powersgd:rank=1", "sketched-sgd:density=20%"]
)
def test_a_server_optimizer_works_with_every_strategy_that_has_no_own_step(tmp_path, name):
    config = replace(
        TINY,
        strategy=name,
        rounds=4,
        participation=1.0,
        server_optimizer="sgd:momentum=0.9",
        server_lr=0.5,
    )
    config = replace(
        config,
        **{field: getattr(RunConfig(), field) for field in ("uplink", "downlink")}
        if name[:2] in ("po", "sk")
        else {},
    )
    simulate(replace(config, out=out(tmp_path, "whole")))
    stopped = replace(config, out=out(tmp_path, "stopped"))
    with pytest.raises(Stop):
        simulate(stopped, StopsAt(2))
    simulate(replace(stopped, resume=True))
    plain = simulate(replace(config, server_optimizer="sgd", out=out(tmp_path, "plain")))
    assert model_bytes(out(tmp_path, "whole")) == model_bytes(out(tmp_path, "stopped"))
    assert plain.accuracy is not None and model_bytes(out(tmp_path, "plain")) != model_bytes(
        out(tmp_path, "whole")
    )


def test_a_robust_run_stopped_in_its_first_round_can_be_resumed(tmp_path):
    config = replace(
        TINY, strategy="centered-clipping", participation=1.0, out=out(tmp_path, "run")
    )
    with pytest.raises(Stop):
        simulate(config, StopsAt(1, 1))
    assert simulate(replace(config, resume=True)).rounds == 6


@for_each("text", TEXTS)
def test_the_model_moves_by_the_optimizers_step_for_the_mean(text):
    federation, own = Federation(with_optimizer(DENSE, text)), optimizer(text)
    for round in range(1, 5):
        before = federation.loop.broadcasts.weights.clone()
        (outcome,) = federation.loop.rounds([round])
        mean = torch.stack([a.update.dense() for a in outcome.accepted]).mean(0)
        step = own.step(mean) * federation.strategy.config.server_lr
        own.commit()
        torch.testing.assert_close(
            federation.loop.broadcasts.weights, before + step, rtol=1e-4, atol=1e-6
        )


def test_a_round_without_updates_does_not_change_the_momentum():
    federation = Federation(with_optimizer(DENSE, "sgd:momentum=0.5"))
    list(federation.loop.rounds([1]))
    before = {name: vector.clone() for name, vector in federation.loop.optimizer.state.items()}
    federation.faults = {
        (client, 2): lambda a, r: replace(r, frame=b"no frame")
        for client in range(federation.clients)
    }
    (outcome,) = federation.loop.rounds([2])
    assert outcome.broadcast is None
    assert torch.equal(before[FIRST], federation.loop.optimizer.state[FIRST])


def test_updates_with_infinite_squares_are_rejected_and_the_next_round_moves():
    federation = Federation(with_optimizer(DENSE, "yogi"))
    shout = federation.strategy.uplink.encode(torch.full((federation.layout.numel,), 1e30))
    federation.faults = {
        (client, 1): lambda a, r: replace(r, frame=shout) for client in range(federation.clients)
    }
    first, second = federation.loop.rounds([1, 2])
    assert first.broadcast is None and {r.stage for r in first.rejections} == {"aggregate"}
    assert (
        second.broadcast is not None and second.broadcast.base == federation.loop.broadcasts.first
    )


def test_gtopk_returns_the_values_dropped_before_the_momentum():
    rules = StrategyConfig(
        participation=1.0, uplink="topk:density=20%", downlink="identity", seed=3
    )
    federation, plain = (
        Federation(replace(rules, server_optimizer=o), strategy=GTopK)
        for o in ("sgd:momentum=0.9", "sgd")
    )
    for each in (federation, plain):
        list(each.loop.rounds([1]))
    assert federation.loop.dropped and federation.loop.dropped == plain.loop.dropped


@pytest.mark.parametrize(
    "name", [name for name, cls in available_strategies().items() if cls.replaces_server_optimizer]
)
def test_strategies_with_their_own_step_refuse_a_server_optimizer(tmp_path, name):
    with pytest.raises(
        ConfigError,
        match=f"--strategy {name} replaces the server optimizer; .* --strategy {name}:momentum=0.9",
    ):
        simulate(
            RunConfig(
                strategy=name, server_optimizer="adam", server_lr=0.01, out=out(tmp_path, "run")
            )
        )
    assert strategy(
        f"{name}:momentum=0.9",
        StrategyConfig(
            uplink="sketch" if name == "fetchsgd" else "sign",
            memory="none",
            downlink="efsign",
            downlink_memory="none",
        ),
        Layout.flat(42),
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"server_optimizer": "adam"},
            "changes every weight by about --server-lr, which is 1; give a smaller value",
        ),
        ({"server_optimizer": "sdg"}, "unknown optimizer 'sdg'; did you mean 'sgd'"),
        (
            {"server_optimizer": "yogi", "server_lr": 0.1, "memory": "laq", "uplink": "fp16"},
            "with --server-optimizer yogi the norm of a step does not depend on",
        ),
    ],
)
def test_errors_in_options_are_raised_before_anything_is_written(tmp_path, change, says):
    assert_refused(tmp_path, replace(TINY, **change), says)
