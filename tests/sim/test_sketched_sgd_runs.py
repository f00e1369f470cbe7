"""Runs of sketched SGD are the same after interruptions and with real instead of virtual clients."""

from dataclasses import replace

import pytest
from federation import Federation
from small_runs import (
    TINY,
    StopsAfter,
    StopsAt,
    assert_refused,
    assert_the_same_when_stopped,
    out,
    rounds_of,
)

from fedcomp import RunConfig
from fedcomp.config import read_run
from fedcomp.sim import simulate
from fedcomp.strategies import StrategyConfig
from fedcomp.strategies.sketched_sgd import SketchedSGD

RUN = replace(
    TINY,
    strategy="sketched-sgd:density=10%,candidates=2",
    uplink="sketch:columns=12",
    memory="sketched:momentum=0.5",
    downlink="topk:density=10%",
)
UPLINKS = [
    "sketch:columns=12",
    "sketch:columns=12,cells=bf16",
    "sketch:rows=3,columns=5,cells=int8@layer",
]


@pytest.mark.parametrize(
    ("stop", "every", "uplink"), [((1, 2), 1, 0), ((5, 8), 4, 1), ((4, None), 1, 2)]
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path, stop, every, uplink):
    config = replace(RUN, uplink=UPLINKS[uplink], rounds=7, checkpoint_every=every)
    assert_the_same_when_stopped(tmp_path, config, StopsAfter(*stop), StopsAt(6))


@pytest.mark.parametrize(
    ("engine", "candidates"), [("serial", 2), ("serial", 1), ("batched", 2)]
)  # with 1 candidate per coordinate, none is returned
def test_virtual_and_real_clients_compute_the_same_model(tmp_path, engine, candidates):
    rules = StrategyConfig(
        participation=0.5, uplink=RUN.uplink, downlink=RUN.downlink, memory=RUN.memory, seed=5
    )
    options = SketchedSGD.Options(density=0.1, candidates=candidates)
    federation = Federation(
        rules, clients=8, strategy=lambda *args: SketchedSGD(*args, options=options)
    )
    federation.use_partition()
    traffic = [o.traffic for o in federation.loop.rounds(range(1, 7))]
    assert bool(federation.loop.dropped) == (candidates > 1)
    spec = f"sketched-sgd:density=10%,candidates={candidates}"
    simulate(
        replace(
            RUN,
            strategy=spec,
            engine=engine,
            partition="iid",
            batch_size=10,
            seed=5,
            out=out(tmp_path, "run"),
        )
    )
    federation.assert_same_model(tmp_path / "run", 0 if engine == "serial" else 1e-6)
    lines = rounds_of(out(tmp_path, "run"))
    assert [line["uplink_bytes"] for line in lines] == [sum(t.uplink.values()) for t in traffic]
    assert [line["downlink_bytes"] for line in lines] == [sum(t.downlink.values()) for t in traffic]


@pytest.mark.slow
def test_the_tiny_task_is_learned(tmp_path):
    summary = simulate(replace(RUN, rounds=20, partition="iid", out=out(tmp_path, "run")))
    assert summary.accuracy > 0.85


def test_unset_codecs_and_memory_get_the_defaults_of_the_strategy(tmp_path):
    config = replace(
        TINY,
        strategy="sketched-sgd:density=10%",
        uplink=RunConfig.uplink,
        downlink=RunConfig.downlink,
        rounds=1,
    )
    simulate(replace(config, out=out(tmp_path, "run")))
    stored = read_run(tmp_path / "run")
    assert (stored["uplink"], stored["memory"], stored["downlink"]) == (
        "sketch",
        "sketched",
        "topk:density=0.1,values=fp32",
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"strategy": "average"},
            "--memory sketched does not work with --strategy average; give --strategy sketched-sgd",
        ),
        (
            {"strategy": "gtopk", "uplink": "topk"},
            "--memory sketched needs --strategy sketched-sgd and --uplink sketch",
        ),
        ({"uplink": "stc:density=5%"}, "leave --uplink out, or give sketch"),
        ({"memory": "none"}, "leave --memory out, or give sketched"),
        ({"strategy": "sketched-sgd:candidates=0"}, "candidates is 0; give at least 1"),
        (
            {"strategy": "sketched-sgd:candidate=2"},
            "strategy 'sketched-sgd' has no option 'candidate'; did you mean 'candidates'",
        ),
        ({"strategy": "sketched-sgd@layer"}, "has no scope"),
        ({"density_warmup": 3}, "--density-schedule and --budget change the size of frames; leave"),
        (
            {"memory": "sketched:momentum=1"},
            "momentum is 1; give at least 0 and less than 1, such as 0.9",
        ),
    ],
)
def test_errors_in_options_are_raised_before_anything_is_written(tmp_path, options, sentence):
    assert_refused(tmp_path, replace(RUN, **options), sentence)
