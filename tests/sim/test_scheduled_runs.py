"""Schedules in whole runs: clients follow them, in every engine and after interruptions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import for_each
from federation import Federation
from forked_workers import fork_workers
from safetensors.torch import load_file
from small_runs import assert_refused

from fedcomp import Data, RunConfig, codec
from fedcomp.codecs import at_density
from fedcomp.config import read_run
from fedcomp.errors import ConfigError, ProtocolError
from fedcomp.sim import simulate
from fedcomp.sim.engine_choice import EngineChoice
from fedcomp.strategies import StrategyConfig
from fedcomp.tasks import load
from fedcomp.training.local_sgd import LocalSGD

TINY = f"{Path(__file__).parents[1] / 'tiny_task.py'}:task"
CONFIG = RunConfig(
    task=TINY,
    clients=6,
    participation=0.5,
    uplink="topk:density=1/10",
    downlink="identity",
    batch_size=10,
    lr=0.1,
    rounds=4,
    seed=3,
    engine="serial",
    device="cpu",
)
ALL = {
    "lr_schedule": "cosine:to=0.01",
    "local_steps_schedule": "1,4@3",
    "batch_size_schedule": "step:every=2,factor=2",
    "density_schedule": "geometric:to=1/40",
    "lr_warmup": 1,
    "density_warmup": 1,
}


def ran(config: RunConfig, out: Path, **also) -> tuple[bytes, list[int]]:
    """Return the model and the bytes that clients sent in each round."""
    simulate(replace(config, out=str(out), **also))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return (out / "model.safetensors").read_bytes(), [line["uplink_bytes"] for line in lines]


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_an_interrupted_run_equals_an_uninterrupted_one(tmp_path, engine):
    config = replace(CONFIG, engine=engine, **ALL)
    whole = ran(config, tmp_path / "whole")
    ran(config, tmp_path / "parts", rounds=2, horizon=4)
    assert ran(config, tmp_path / "parts", resume=True) == whole


def test_a_schedule_changes_a_run_unless_it_repeats_the_default(tmp_path):
    own = {
        "lr_schedule": "0.1",
        "local_steps_schedule": "5",
        "batch_size_schedule": "10",
        "density_schedule": "1/10",
    }
    plain = ran(CONFIG, tmp_path / "plain")
    for name, default in own.items():
        assert ran(CONFIG, tmp_path / name, **{name: ALL[name]}) != plain
        assert ran(CONFIG, tmp_path / f"{name} default", **{name: default}) == plain


@pytest.mark.deploy
def test_engines_agree(tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    config = replace(CONFIG, **ALL)
    models = []
    for engine in ("serial", "batched", "processes"):
        ran(config, tmp_path / engine, engine=engine)
        models.append(load_file(tmp_path / engine / "model.safetensors"))
    for model in models[1:]:
        for name, value in models[0].items():
            torch.testing.assert_close(model[name], value, rtol=1e-4, atol=1e-6)


def test_a_longer_resumed_run_keeps_the_horizon_of_its_start(tmp_path):
    config, out = replace(CONFIG, lr_schedule="cosine:to=0.01"), tmp_path / "run"
    ran(config, out)
    assert read_run(out)["horizon"] == 4
    longer = ran(config, out, rounds=6, resume=True)
    assert read_run(out)["horizon"] == 4
    assert longer == ran(config, tmp_path / "by-hand", rounds=6, horizon=4)
    assert longer != ran(config, tmp_path / "stretched", rounds=6)


def test_the_error_for_a_rate_of_0_after_the_horizon_names_the_option(tmp_path):
    config = replace(CONFIG, lr_schedule="cosine", out=str(tmp_path / "run"))
    simulate(config)
    with pytest.raises(
        ConfigError,
        match="^--lr-schedule 'cosine' reaches 0 in round 6, but values must be more than 0; give --horizon 6, or ",
    ):
        simulate(replace(config, rounds=6, resume=True))
    simulate(replace(config, rounds=6, resume=True, horizon=6))
    assert read_run(tmp_path / "run")["horizon"] == 6


def test_a_run_without_curves_has_no_horizon_in_its_config(tmp_path):
    ran(CONFIG, tmp_path / "run", local_steps_schedule="1,4@3", lr_schedule="step:every=2")
    assert read_run(tmp_path / "run")["horizon"] == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"local_steps_schedule": "1,4@3", "local_epochs": 1},
            "--local-steps-schedule and --local-epochs both set how long clients train",
        ),
        (
            {"density_schedule": "1%", "budget": "5kB"},
            "--density-schedule and --budget both set the density",
        ),
        (
            {"density_schedule": "1%", "uplink": "fp16"},
            "--density-schedule changes the density of the uplink codec, but --uplink fp16 has no density",
        ),
        (
            {"density_schedule": "1%", "uplink": "topk", "memory": "variance"},
            "--density-schedule has no effect with memory 'variance'",
        ),
        (
            {"density_schedule": "step:every=1,factor=3"},
            "--density-schedule 'step:every=1,factor=3' reaches 2.7 in round 4, but values must be at most 1",
        ),
        (
            {
                "density_schedule": "1%",
                "strategy": "fetchsgd",
                "uplink": "sketch",
                "memory": "none",
                "downlink_memory": "none",
            },
            "needs frames of equal size, but --density-warmup, --density-schedule and --budget change",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(tmp_path, options, sentence):
    assert_refused(tmp_path, replace(CONFIG, **options), sentence)


def test_virtual_time_depends_on_the_scheduled_steps(tmp_path):
    config = replace(
        CONFIG,
        network="uniform:up=1GB,down=1GB,latency=0s,step=1s",
        local_steps_schedule="1,4@3",
        out=str(tmp_path / "run"),
    )
    simulate(config)
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [round(line["simulated_s"], 3) for line in lines] == [1, 1, 4, 4]


def test_the_batched_engine_reserves_memory_for_the_largest_batches():
    task = load("mnist-logreg", None)
    at_once = [
        EngineChoice.choose(
            replace(CONFIG, engine="batched", **also),
            task,
            Data(torch.ones(1, 784), torch.zeros(1)),
            task.model(),
            torch.device("cpu"),
        ).at_once
        for also in (
            {"batch_size": 500},
            {"batch_size_schedule": "500@4"},
            {"batch_size": 1},
            {"batch_size_schedule": "1"},
        )
    ]
    assert at_once[0] == at_once[1] < at_once[2] == at_once[3]


def test_clients_follow_the_schedules_of_the_server():
    rules = StrategyConfig(
        participation=1.0,
        uplink="topk:density=1/10",
        lr=0.1,
        local_steps_schedule="1,3@2",
        batch_size_schedule="10,20@3",
        density_schedule="1/2,1/5@2",
        lr_schedule="0.2,0.05@2",
        rounds=3,
    )
    federation, nonzeros, trained = Federation(rules), [], []
    engine = federation.members[0].trainer.engine.engine
    train_job = engine.train_job

    def recorded(start, data, job, sgd, *more):
        trained.append(([len(batch) for batch in job.batches], round(sgd.lr, 9)))
        return train_job(start, data, job, sgd, *more)

    engine.train_job = recorded
    for outcome in federation.loop.rounds((1, 2, 3)):
        nonzeros.append({a.update.nonzeros for a in outcome.accepted})
    n = federation.layout.numel
    assert nonzeros == [{at_density(codec("topk"), d).count(n)} for d in (1 / 2, 1 / 5, 1 / 5)]
    assert trained[::6] == [([10], 0.2), ([10] * 3, 0.05), ([20] * 3, 0.05)]


@for_each("asked", [{"steps": -1}, {"steps": 10**6 + 1}, {"batch_size": -5}, {"batch_size": 10**9}])
def test_a_client_refuses_invalid_steps_and_batch_sizes(asked):
    with pytest.raises(
        ProtocolError, match="^the server asks for -?[0-9]+ .*; expected 1 to 1000000$"
    ):
        LocalSGD().for_round(**asked)


def test_scheduled_steps_replace_epochs():
    assert LocalSGD(epochs=3).for_round(steps=2) == LocalSGD(steps=2, epochs=0)
    assert LocalSGD(epochs=3).for_round(lr=0.5) == LocalSGD(epochs=3, lr=0.025, lr_multiple=0.5)


def test_a_scheduled_batch_size_is_the_size_of_each_accumulated_batch():
    assert LocalSGD(batch_size=20 * 3, accumulate=3).for_round(batch_size=8).batch_size == 8 * 3


def test_a_schedule_needs_a_horizon_if_the_last_round_is_unknown():
    with pytest.raises(
        ConfigError, match="ends at the last round, which is unknown; give --horizon"
    ):
        Federation(StrategyConfig(lr_schedule="cosine"))
