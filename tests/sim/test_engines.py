"""Engines that train in the main process fulfil the interface of training.engine.Engine. Model and device determine the engine."""

import dataclasses

import numpy as np
import pytest
import torch
from cases import for_each
from engine_checks import assert_same, serial, start_of, two_rounds
from torch import nn
from worker_tasks import examples as task_examples

from fedcomp.config import RunConfig
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout
from fedcomp.sim.batched import BatchedEngine
from fedcomp.sim.engine_choice import EngineChoice, engine_reason
from fedcomp.tasks.base import Task
from fedcomp.tasks.data import Data
from fedcomp.training.engine import Job, JobResult, SequentialJobs, SerialEngine
from fedcomp.training.local_sgd import LocalSGD, Traces, plan_batches

SGD = LocalSGD(steps=2, batch_size=8, momentum=0.9, keep_momentum=True)
CPU = torch.device("cpu")


def examples() -> Data:
    drawn = torch.Generator().manual_seed(1)
    return Data(torch.randn(60, 12, generator=drawn), torch.randint(0, 4, (60,), generator=drawn))


def engines(loss=nn.functional.cross_entropy) -> tuple[SequentialJobs, BatchedEngine, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(12, 4)
    layout, task = (
        Layout.of(model),
        Task("small", lambda: nn.Linear(12, 4), examples, examples, loss),
    )
    start = layout.gather(model)
    return (
        SequentialJobs(SerialEngine(task, model, layout, "cpu")),
        BatchedEngine(task, nn.Linear(12, 4), layout, "cpu", 2),
        start,
    )


def jobs(start: torch.Tensor) -> list[Job]:
    return [
        Job(
            1,
            who,
            plan_batches(SGD, np.arange(20) + 20 * who, 0, 1, who),
            None,
            Traces.for_round(SGD, True, start, start),
        )
        for who in range(3)
    ]


def test_an_engine_that_frees_its_memory_returns_equal_results(monkeypatch):
    monkeypatch.setattr("fedcomp.training.parameter_memory.LARGE_BYTES", 0)
    reuses = serial()
    frees = SequentialJobs(serial().engine, frees_memory=True)
    start, data = start_of(reuses), task_examples()
    assert_same(two_rounds(frees, start, data), two_rounds(reuses, start, data))
    assert not any(p.untyped_storage().nbytes() for p in frees.engine.parameters)
    assert all(p.untyped_storage().nbytes() for p in reuses.engine.parameters)


def test_both_engines_return_equal_updates_losses_and_traces():
    one_by_one, together, start = engines()
    found = []
    for engine in (one_by_one, together):
        mine = jobs(start)
        updates, results = engine.train(start, engine.place_data(examples()), mine, SGD, seed=0)
        assert updates.shape == (3, 52) and all(isinstance(result, JobResult) for result in results)
        found.append(
            (
                updates,
                torch.tensor([r.loss for r in results]),
                torch.stack([j.traces.momentum for j in mine]),
                torch.stack([j.traces.moments[1] for j in mine]),
            )
        )
        empty, nothing = engine.train(start, examples(), [], SGD, seed=0)
        assert empty.shape == (0, 52) and nothing == []
    for a, b in zip(*found, strict=True):
        assert a.any()
        torch.testing.assert_close(a, b)


def test_an_error_of_a_client_does_not_affect_the_others():
    one_by_one, together, start = engines(loss=nn.CrossEntropyLoss())
    for engine in (one_by_one, together):
        mine = jobs(start)
        mine[1] = mine[1]._replace(batches=[np.array([60])])  # there is no such example
        updates, results = engine.train(start, examples(), mine, SGD, seed=0)
        expected, _ = engine.train(
            start, examples(), [job for job in jobs(start) if job.client != 1], SGD, seed=0
        )
        assert [isinstance(result, JobResult) for result in results] == [
            True,
            False,
            True,
        ] and isinstance(results[1], Exception)
        torch.testing.assert_close(updates, expected)


@for_each("engine", ["serial", "batched"])
def test_bfloat16_is_close_but_not_equal_to_float32(engine):
    one_by_one, together, start = engines()
    mine = one_by_one if engine == "serial" else together
    fine, _ = mine.train(start, examples(), jobs(start), SGD, seed=0)
    coarse, results = mine.train(
        start, examples(), jobs(start), dataclasses.replace(SGD, precision="bfloat16"), seed=0
    )
    assert coarse.dtype == torch.float32 and all(
        isinstance(result, JobResult) for result in results
    )
    assert 0 < (coarse - fine).norm() < 0.02 * fine.norm()


CHOICES = {  # model, requested engine, threads → engine, clients at once (None: not checked)
    "convolution on two cores": (lambda: nn.Conv2d(3, 4, 3), "auto", 2, ("processes", 2)),
    "convolution on one core": (lambda: nn.Conv2d(3, 4, 3), "auto", 1, ("serial", 1)),
    "linear": (lambda: nn.Linear(784, 10), "auto", 2, ("batched", None)),
    "serial, asked for": (lambda: nn.Conv2d(3, 4, 3), "serial", 2, ("serial", 1)),
    "processes, asked for on one core": (
        lambda: nn.Linear(784, 10),
        "processes",
        1,
        ("processes", 1),
    ),
}


def chosen(config: RunConfig, model: nn.Module, device: torch.device) -> EngineChoice:
    task = Task("small", lambda: model, examples, examples)
    return EngineChoice.choose(config, task, examples(), model, device)


@pytest.mark.parametrize(("make", "asked", "threads", "expected"), CHOICES.values(), ids=CHOICES)
def test_the_engine_is_chosen_by_model_and_device(monkeypatch, make, asked, threads, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    machine = chosen(RunConfig(engine=asked), make(), CPU)
    assert (machine.engine, expected[1] and machine.at_once) == expected


def test_the_serial_engine_is_used_if_it_is_requested(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    config = RunConfig(
        engine="serial", optimizer="adamw"
    )  # the batched engine does not support adamw
    assert chosen(config, nn.Linear(2, 2), CPU).engine == "serial"


@pytest.mark.parametrize(("outputs", "engine"), [(800, "processes"), (900, "serial")])
def test_models_of_32_million_parameters_are_trained_in_one_process(monkeypatch, outputs, engine):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = nn.Conv2d(4000, outputs, 3, device="meta")
    assert chosen(RunConfig(), model, CPU).engine == engine
    assert chosen(RunConfig(engine="processes"), model, CPU).engine == "processes"


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (nn.Linear(2, 2), {}, "all weights are in Linear and Embedding layers"),
        (
            nn.Sequential(nn.Linear(784, 400), nn.Linear(400, 10)),
            {},
            "on a CPU, the batched engine is slower for large models of Linear layers",
        ),
        (
            nn.Conv2d(1, 2, 3),
            {},
            "on a CPU, the batched engine is used only for Linear and Embedding layers",
        ),
        (
            nn.Dropout(),
            {},
            "the batched engine does not support Dropout, which draws random numbers",
        ),
        (
            nn.Linear(2, 2),
            {"optimizer": "adamw"},
            "the batched engine does not support --optimizer adamw",
        ),
        (nn.Linear(2, 2), {"engine": "serial"}, ""),
        (
            nn.Conv2d(4000, 900, 3, device="meta"),
            {},
            "one process with all cores is faster for models of 32 million parameters or more",
        ),
    ],
)
def test_the_reason_for_an_engine(model, options, reason):
    task = Task("small", lambda: model, examples, examples)
    assert engine_reason(RunConfig(**options), task, examples(), model, CPU) == reason


def test_errors_for_unsuitable_options_name_the_flag():
    with pytest.raises(ConfigError, match="--engine processes.*--device cpu"):
        chosen(RunConfig(engine="processes"), nn.Linear(2, 2), torch.device("cuda"))
    with pytest.raises(ConfigError, match="--cohort-batch"):
        chosen(RunConfig(engine="processes", cohort_batch=4), nn.Linear(2, 2), CPU)
    with pytest.raises(ConfigError, match="--precision"):
        RunConfig(precision="float8")
