"""Runs of FetchSGD learn with every type of cell, and are the same after interruptions and with real instead of virtual clients."""

import sqlite3
from dataclasses import replace
from functools import partial

import pytest
from federation import Federation
from small_runs import TINY, StopsAt, assert_refused, assert_the_same_when_stopped, out
from test_memories import Sentences

from fedcomp import RunConfig
from fedcomp.config import read_run
from fedcomp.sim import simulate
from fedcomp.strategies import StrategyConfig
from fedcomp.strategies.fetchsgd import FetchSGD
from fedcomp.training.local_sgd import LocalSGD

SKETCHED = replace(
    TINY,
    strategy="fetchsgd:momentum=0.5,density=10%",
    uplink="sketch:rows=3,columns=24",
    downlink=RunConfig.downlink,
    seed=5,
)
VARIANTS = {
    "subtract": {
        "strategy": "fetchsgd:momentum=0.5,density=10%,error=subtract",
        "uplink": "sketch:rows=3,columns=48",
    },
    "zero, lossy downlink": {
        "strategy": "fetchsgd:momentum=0.5,density=10%,error=zero",
        "downlink": "stc:density=10%",
    },
    "bf16, weights": {
        "uplink": "sketch:rows=3,columns=24,cells=bf16",
        "weights": "examples",
        "weight_cap": 1.5,
        "partition": "dirichlet:1",
    },
    "int8, step": {"uplink": "sketch:rows=3,columns=24,cells=int8", "server_lr": 0.5},
    "kept momentum": {"momentum": 0.9, "keep_momentum": True, "lr": 0.02},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
STATEFUL = ("subtract", "zero, lossy downlink", "int8, step", "kept momentum")


@pytest.mark.parametrize("variant", STATEFUL)
def test_a_run_stopped_in_a_round_equals_an_uninterrupted_one(tmp_path, variant):
    config = replace(SKETCHED, rounds=5, **VARIANTS[variant])
    assert_the_same_when_stopped(tmp_path, config, StopsAt(3, 2))


@pytest.mark.parametrize(
    ("error", "stop", "every"), [("subtract", (1, 1), 1), ("zero", (4, None), 4)]
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path, error, stop, every):
    config = replace(
        SKETCHED, strategy=f"fetchsgd:density=10%,error={error}", rounds=6, checkpoint_every=every
    )
    assert_the_same_when_stopped(tmp_path, config, StopsAt(*stop), StopsAt(5))


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_virtual_and_real_clients_compute_the_same_model(tmp_path, engine):
    config = replace(
        SKETCHED,
        partition="iid",
        engine=engine,
        downlink="topk:density=10%",
        out=out(tmp_path, "run"),
    )
    simulate(config)
    rules = StrategyConfig(
        participation=0.5,
        uplink=config.uplink,
        downlink=config.downlink,
        memory="none",
        downlink_memory="none",
        seed=5,
    )
    federation = Federation(
        rules, clients=8, strategy=partial(FetchSGD, options=FetchSGD.Options(0.5, density=0.1))
    )
    federation.use_partition()
    for member in federation.members:
        member.sgd = LocalSGD.from_config(config)
    list(federation.loop.rounds(range(1, 7)))
    federation.assert_same_model(tmp_path / "run", 0 if engine == "serial" else 1e-6)


@every_variant
def test_the_task_is_learned_without_a_warning(tmp_path, variant):
    watched = Sentences()
    summary = simulate(
        replace(SKETCHED, **variant, rounds=15, eval_every=15, out=out(tmp_path, "run")), watched
    )
    assert summary.accuracy > 0.85 and not watched.warnings
    assert summary.downlink_bytes < summary.dense_downlink_bytes


def test_unset_codecs_and_memories_get_the_defaults_of_the_strategy(tmp_path):
    simulate(replace(SKETCHED, uplink=RunConfig.uplink, rounds=1, out=out(tmp_path, "run")))
    stored = read_run(tmp_path / "run")
    assert (stored["uplink"], stored["memory"]) == ("sketch", "none")
    assert (stored["downlink"], stored["downlink_memory"]) == (
        "topk:density=0.1,values=fp32",
        "none",
    )


def test_checkpoints_contain_two_sketches_and_no_vectors_of_clients(tmp_path):
    simulate(replace(SKETCHED, rounds=3, out=out(tmp_path, "run")))
    with sqlite3.connect(tmp_path / "run" / "checkpoint" / "state.sqlite") as state:
        sizes = dict(state.execute("SELECT name, length(data) FROM entry"))
    state.close()
    assert sizes["weights"] == 4 * 42
    vectors = {name for name in sizes if name.startswith(("client/", "strategy/")) and "." in name}
    assert not vectors  # records of clients are named client/ID
    assert sizes["strategy/momentum"] == sizes["strategy/error"] == 4 * 72


def test_errors_in_options_are_raised_before_anything_is_written(tmp_path):
    assert_refused(tmp_path, replace(SKETCHED, memory="dgc"), "leave --memory out, or give none")
