"""How many clients are trained at once: measured on a few of them, by an engine that is real and a meter that is made up."""

from dataclasses import replace

import pytest
import torch
from cases import for_each
from small_runs import TINY, out
from test_batched_engine import SGD, images, limited, network, parts

from fedcomp import RunConfig
from fedcomp.config import read_run
from fedcomp.errors import ConfigError
from fedcomp.sim import run, simulate
from fedcomp.sim.batched import BatchedEngine
from fedcomp.sim.batched.room import MOST, clients_at_once, fitting
from fedcomp.sim.engines import Together
from fedcomp.sim.machine import Machine, measured
from fedcomp.tasks.augment import CROP_AND_FLIP


class Bytes:
    """A device with `size` bytes; training needs `fixed`, and `each` for every client."""

    def __init__(self, size: int, fixed: int, each: int):
        self.size, self.fixed, self.each, self.tried, self.last = size, fixed, each, [], 0

    def free(self) -> int:
        return self.size

    def peak(self, train) -> int:
        train()
        return self.fixed + self.each * self.last

    def train(self, clients: int) -> None:
        self.last = clients
        self.tried.append(clients)


@for_each(
    "size, fixed, each, at_once",
    [
        (4000, 100, 10, 64),
        (4000, 100, 9, 64),
        (4000, 0, 100, 8),
        (4000, 0, 801, 1),
        (4000, 0, 400, 2),
        (4000, 0, 250, 4),
        (4000, 3990, 1, 1),
        (10**9, 5, 1, MOST),
    ],
)
def test_a_quarter_of_what_is_free_is_filled(size, fixed, each, at_once):
    assert clients_at_once((device := Bytes(size, fixed, each)).train, device) == at_once


def test_several_are_tried_only_where_they_surely_fit():
    device = Bytes(4000, 0, 801)
    clients_at_once(device.train, device)
    assert device.tried == [1]


class Metered(Bytes):
    """The same, around a real training."""

    def peak(self, train) -> int:
        self.last = 1 if not self.tried else 5
        self.tried.append(self.last)
        train()
        return self.fixed + self.each * self.last


@pytest.mark.parametrize("augment", [False, True])
def test_an_engine_is_measured_in_the_training_that_it_is_for(monkeypatch, augment):
    sizes = limited(monkeypatch, 1000, RuntimeError())
    task, model, layout, start = parts(network, images())
    engine = BatchedEngine(replace(task, augment=CROP_AND_FLIP), model, layout, "cpu")
    assert (
        fitting(
            engine,
            start,
            images(),
            replace(SGD, batch_size=7, augment=augment),
            Metered(4000, 100, 50),
        )
        == engine.at_once
        == 16
    )
    assert sizes == [1, 1, 5, 5]


def test_a_client_that_fits_nowhere_is_told_at_once(monkeypatch):
    limited(monkeypatch, 0, torch.OutOfMemoryError())
    task, model, layout, start = parts(network, images())
    with pytest.raises(ConfigError, match="does not hold the training of one client"):
        fitting(
            BatchedEngine(task, model, layout, "cpu"), start, images(), SGD, Metered(4000, 0, 1)
        )


def test_a_number_that_was_given_stays():
    task, model, layout, start = parts(network, images())
    engine, machine = (
        Together(BatchedEngine(task, model, layout, "cpu", 3)),
        Machine("cpu", "batched", 3),
    )
    assert (
        measured(machine, RunConfig(cohort_batch=3), engine, start, images(), Metered(4000, 0, 50))
        == machine
    )
    found = measured(machine, RunConfig(), engine, start, images(), Metered(4000, 0, 50))
    assert found == Machine("cpu", "batched", 16) and engine.engine.at_once == 16
    assert measured(machine, RunConfig(), engine, start, images()) == machine  # a CPU has a rule


def test_a_run_begins_with_what_was_measured_and_is_resumed_with_it(tmp_path, monkeypatch):
    asked = []

    def metered(*given):
        asked.append(1)
        return measured(*given, meter=Metered(4000, 0, 400))

    monkeypatch.setattr(run, "measured", metered)
    config = replace(TINY, rounds=2, out=out(tmp_path, "run"))
    simulate(config)
    assert asked == [1] and read_run(config.out)["resolved"]["at_once"] == 2
    limited(monkeypatch, 1, torch.OutOfMemoryError())  # on this machine now there is less
    summary = simulate(replace(config, rounds=4, resume=True))
    assert (
        asked == [1]
        and read_run(config.out)["resolved"]["at_once"] == 2
        and summary.client_updates == 16
    )
