"""Cohorts are divided among several devices. In the tests, each device is an engine on the CPU with one thread."""

import threading
from dataclasses import replace

import pytest
import torch
from cases import for_each
from safetensors.torch import load_file
from small_models import small_task
from small_runs import TINY, Records, StopsAt, out, rounds_of
from test_batched_engine import SGD, images, limited, network, planned

from fedcomp import RunConfig
from fedcomp.config import read_run
from fedcomp.errors import ConfigError, UserError
from fedcomp.sim import simulate
from fedcomp.sim.batched import BatchedEngine
from fedcomp.sim.multi_device import MultiDevice
from fedcomp.training import devices
from fedcomp.training.engine import Job
from fedcomp.training.local_sgd import Traces

CPU = torch.device("cpu")


def several(
    count: int, warn=lambda sentence: None, at_once: int = 0
) -> tuple[MultiDevice, torch.Tensor]:
    made, warnings = [small_task(network, images()) for _ in range(count)], []
    engines = [
        BatchedEngine(task, model, layout, "cpu", at_once, warn=warnings.append)
        for task, model, layout, _ in made
    ]
    return MultiDevice(engines, warnings, warn), made[0][3]


def jobs(clients: int, momentum: bool = False) -> list[Job]:
    n = small_task(network, images())[2].numel
    kept = [
        Traces(momentum=torch.full((n,), 0.1 * who)) if momentum else Traces()
        for who in range(clients)
    ]
    return [
        Job(1, who, plan, None, traces)
        for (who, plan), traces in zip(enumerate(planned(SGD, clients)), kept, strict=True)
    ]


@for_each("clients", [1, 2, 5])
@for_each("count", [2, 3])
def test_results_equal_those_of_one_device(count, clients):
    engine, start = several(count, at_once=2)
    data, sgd = images(), replace(SGD, momentum=0.9, keep_momentum=True)
    there, alone = jobs(clients, True), jobs(clients, True)
    updates, results = engine.train(start, data, there, sgd, seed=0)
    one, _ = several(1)
    expected, losses = one.train(start, data, alone, sgd, seed=0)
    torch.testing.assert_close(updates, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        torch.tensor([r.loss for r in results]), torch.tensor([r.loss for r in losses])
    )
    for a, b in zip(there, alone, strict=True):
        torch.testing.assert_close(a.traces.momentum, b.traces.momentum, rtol=1e-4, atol=1e-6)
    engine.close()


def test_an_empty_cohort_returns_no_updates():
    engine, start = several(2)
    updates, results = engine.train(start, images(), [], SGD, seed=0)
    assert updates.shape == (0, len(start)) and results == []
    engine.close()


def test_the_update_of_a_failed_client_is_left_out():
    engine, start = several(2)
    asked = jobs(4)
    asked[1] = asked[1]._replace(
        batches=[batch + 1000 for batch in asked[1].batches]
    )  # indices beyond the data
    updates, results = engine.train(start, images(), asked, SGD, seed=0)
    assert [isinstance(result, Exception) for result in results] == [
        False,
        True,
        False,
        False,
    ] and len(updates) == 3
    engine.close()


def test_warnings_from_threads_are_passed_on_in_the_callers_thread(monkeypatch):
    limited(monkeypatch, 2, torch.OutOfMemoryError())
    said = []
    engine, start = several(2, lambda sentence: said.append((sentence, threading.get_ident())))
    engine.train(start, images(), jobs(8), SGD, seed=0)
    assert len(said) == 2 and all("too small to train" in sentence for sentence, _ in said)
    assert {thread for _, thread in said} == {threading.get_ident()}
    # The first engine has 4 clients with batches of 4. The second has 3 of these, and one with batches of 3.
    assert [each.at_once for each in engine.engines] == [2, 1]
    engine.close()


def test_a_user_error_in_a_thread_is_raised_in_the_callers_thread(monkeypatch):
    limited(monkeypatch, 0, torch.OutOfMemoryError())
    engine, start = several(2)
    with pytest.raises(UserError, match="smaller --batch-size"):
        engine.train(start, images(), jobs(4), SGD, seed=0)
    engine.close()


VARIANTS = {
    "attacked": {
        "uplink": "identity",
        "memory": "none",
        "attack": "inverted:2+alie:1",
        "clients": 12,
    },
    "moments, kept momentum": {
        "memory": "variance:alpha=1.5",
        "uplink": "topk",
        "momentum": 0.5,
        "keep_momentum": True,
    },
    "two phases": {
        "strategy": "sketched-sgd:density=10%,candidates=2",
        "uplink": "sketch:columns=12",
        "memory": "sketched:momentum=0.5",
    },
}


def run_on(monkeypatch, count: int, config: RunConfig, callback=None) -> MultiDevice | None:
    """Run a simulation in which `--device` means `count` CPUs. Return its engine if there are several."""
    made, begin = [], MultiDevice.__init__

    def noted(self, *given):
        made.append(self)
        begin(self, *given)

    monkeypatch.setattr(devices, "parse_devices", lambda asked: [CPU] * count)
    monkeypatch.setattr(MultiDevice, "__init__", noted)
    try:
        simulate(config, callback or Records())
    finally:
        monkeypatch.undo()
    return made[0] if made else None


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_on_several_devices_equals_one_on_a_single_device(tmp_path, monkeypatch, variant):
    config = replace(
        TINY, rounds=4, participation=1.0, engine="batched", cohort_batch=2, **VARIANTS[variant]
    )
    one, two = (replace(config, out=out(tmp_path, name)) for name in ("one", "two"))
    simulate(one)
    assert len(run_on(monkeypatch, 2, two).engines) == 2
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    for name in models[0]:
        torch.testing.assert_close(models[0][name], models[1][name], rtol=1e-4, atol=1e-5)
    for a, b in zip(rounds_of(one.out), rounds_of(two.out), strict=True):
        assert (
            a["uplink_bytes"] == b["uplink_bytes"] and a["accepted"] == b["accepted"] == a["cohort"]
        )


def test_a_run_on_several_devices_can_be_resumed(tmp_path, monkeypatch):
    config = replace(TINY, engine="batched", cohort_batch=2, out=out(tmp_path, "whole"))
    run_on(monkeypatch, 2, config)
    stopped = replace(config, out=out(tmp_path, "stopped"))
    with pytest.raises(Exception, match="^$"):
        run_on(monkeypatch, 2, stopped, StopsAt(3))
    run_on(monkeypatch, 2, replace(stopped, resume=True))
    assert rounds_of(config.out) == rounds_of(stopped.out)
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (
        tmp_path / "stopped/model.safetensors"
    ).read_bytes()
    assert read_run(config.out)["resolved"]["device"].count("cpu") == 2


def test_several_devices_need_the_batched_engine(tmp_path, monkeypatch):
    with pytest.raises(
        ConfigError,
        match="only the batched engine supports several devices, but this run uses serial; give --device cpu",
    ):
        run_on(
            monkeypatch, 2, replace(TINY, engine="serial", device="cpu", out=out(tmp_path, "run"))
        )


def test_valid_and_invalid_values_of_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.parse_devices("cuda:0,cuda:1") == [
        torch.device("cuda:0"),
        torch.device("cuda:1"),
    ]
    assert devices.parse_devices("cuda") == [torch.device("cuda")] == devices.parse_devices("auto")
    for asked in ("cuda:0,cuda:0", "cuda,cuda:1", "cpu,cuda:0", "cpu,cpu", "auto,cuda:1"):
        with pytest.raises(
            ConfigError,
            match="each GPU by its number, and only once; give a list such as cuda:0,cuda:1",
        ):
            devices.parse_devices(asked)
    for asked in ("cuda:0,", ",", "cuda:0;cuda:1", "cuda:0,cuda:2"):
        with pytest.raises(ConfigError, match="--device"):
            devices.parse_devices(asked)
