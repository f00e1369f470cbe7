"""Strategies of fedcomp in a Flower ServerApp give the rounds of the round loop."""

from dataclasses import replace

import keyword_task
import numpy as np
import pytest
import torch
from cases import for_each
from federation import Federation
from flower_grid import AppGrid
from flwr.app import Array, ArrayRecord, MetricRecord

from fedcomp.errors import ConfigError
from fedcomp.strategies import StrategyConfig, strategy
from fedcomp.transports.flower import FlowerStrategy, client_app

CONFIG = StrategyConfig(
    participation=1.0, uplink="stc:density=10%", downlink="stc:density=10%", seed=3
)
CASES = {
    "average": replace(CONFIG, server_optimizer="sgd:momentum=0.5"),
    "powersgd:rank=1": replace(
        CONFIG, uplink="powersgd:rank=1", downlink="identity", memory="lowrank"
    ),
}


def federation(text: str) -> Federation:
    return Federation(CASES[text], strategy=lambda *args: strategy(text, *args))


def by_partition(grid: AppGrid) -> dict[int, int]:
    return dict(grid.nodes)


def grid_of(flowers: Federation) -> AppGrid:
    """Return a grid whose nodes are ClientApps around a federation's clients."""
    return AppGrid(lambda: client_app(flowers), nodes=6)


def flower_strategy(text: str, **changes) -> FlowerStrategy:
    return FlowerStrategy(text, replace(CASES[text], **changes), node_ids=by_partition)


@for_each("text", CASES)
def test_start_runs_the_rounds_of_the_loop(text):
    own, flowers = federation(text), federation(text)
    list(own.loop.rounds(range(1, 4)))
    result = flower_strategy(text).start(
        grid_of(flowers),
        flowers.arrays(),
        num_rounds=3,
        evaluate_fn=lambda round, arrays: MetricRecord({"round": round}),
    )
    expected = own.layout.views(own.loop.model)
    assert all(
        torch.equal(torch.from_numpy(result.arrays[name].numpy()), view)
        for name, view in expected.items()
    )
    assert [r["round"] for r in result.evaluate_metrics_serverapp.values()] == [1, 2, 3]
    assert result.train_metrics_clientapp[2]["accepted"] == 6


@for_each("task", [keyword_task.task, keyword_task.own_loop], ids=["keywords", "loop"])
def test_clients_train_dict_batches_with_any_optimizer_and_by_their_own_loop(task):
    own, flowers = (Federation(CONFIG, task=task, optimizer="adamw") for _ in range(2))
    list(own.loop.rounds(range(1, 3)))
    result = FlowerStrategy("average", CONFIG, node_ids=by_partition).start(
        grid_of(flowers), flowers.arrays(), num_rounds=2
    )
    for name, view in own.layout.views(own.loop.model).items():
        assert torch.equal(torch.from_numpy(result.arrays[name].numpy()), view)
    assert not torch.equal(own.loop.model, own.initial)


def test_start_knows_the_last_round():
    flowers, adapter = federation("average"), flower_strategy("average", lr_schedule="cosine")
    adapter.start(grid_of(flowers), flowers.arrays(), num_rounds=2)
    assert adapter.loop.strategy.schedule.rate(2) == 0.5


def test_a_phase_ends_after_the_timeout_of_start():
    flowers = federation("average")
    grid = grid_of(flowers)
    grid.faults["train", 0] = lambda reply: None
    result = flower_strategy("average").start(grid, flowers.arrays(), num_rounds=1, timeout=1.0)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["accepted"], metrics["rejected"]) == (5, 1)


def test_a_malformed_reply_is_rejected():
    flowers = federation("average")
    grid = grid_of(flowers)

    def garble(reply):
        reply.content["fedcomp"]["fedcomp"] = reply.content["fedcomp"]["fedcomp"][:-1]
        return reply

    grid.faults["train", 0] = garble
    adapter = flower_strategy("average")
    (outcome,) = adapter.initialize(grid, flowers.arrays(), 1).rounds([1])
    (rejection,) = outcome.rejections
    assert (
        rejection.client == 0
        and "its header specifies" in rejection.reason
        and len(outcome.accepted) == 5
    )


def test_an_initial_array_of_integers_is_refused():
    arrays = ArrayRecord({"w": Array(np.zeros(3, np.float32)), "count": Array(np.array([7]))})
    with pytest.raises(ConfigError, match="initial array 'count' has the dtype int64"):
        flower_strategy("average").start(grid_of(federation("average")), arrays)


@for_each(
    "step", ["configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate"]
)
def test_flowers_own_loop_cannot_run_the_rounds(step):
    with pytest.raises(ConfigError, match=r"call start\(\)"):
        getattr(flower_strategy("average"), step)(1, None, None, None)
