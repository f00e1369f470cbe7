"""Worker processes compute the updates of the serial engine, are replaced if they die, and end with their parent process."""

import contextlib
import os
import random
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import worker_tasks
from deployment import Command, gone, running
from engine_checks import SGD, TASKS, assert_same, jobs, serial, start_of, two_rounds
from forked_workers import fork_workers

from fedcomp import RunConfig, UserError
from fedcomp.clients.session import failure_reason
from fedcomp.config import read_run
from fedcomp.errors import TaskError
from fedcomp.layout import Layout
from fedcomp.sim import simulate
from fedcomp.sim.processes import WorkerEngine
from fedcomp.tasks import initial_model, load
from fedcomp.tasks.data import Data
from fedcomp.training.cpu_convolutions import set_memory_format
from fedcomp.training.engine import JobResult, SerialEngine
from fedcomp.training.local_sgd import LocalSGD

pytestmark = pytest.mark.deploy


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def workers(name: str = "task", count: int = 1, **options) -> Iterator[WorkerEngine]:
    spec = f"{TASKS}:{name}"
    task = load(spec)
    config = RunConfig(task=spec, seed=3)
    engine = WorkerEngine(config, task, initial_model(task, 3), count, **options)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def two() -> Iterator[WorkerEngine]:
    """Yield an engine with two workers that are new interpreters, as in a real run."""
    with workers("faulty", count=2) as engine:
        yield engine


def test_updates_equal_those_of_the_serial_engine_bit_for_bit(two):
    """With dropout, running statistics, momentum that is kept between rounds, moments, batches of two sizes, and data in shared memory."""
    data, one_by_one = worker_tasks.examples(), serial("faulty")
    start = start_of(one_by_one)
    assert_same(two_rounds(two, start, two.place_data(data)), two_rounds(one_by_one, start, data))
    flipped = Data(data.inputs, 3 - data.targets)
    assert_same(two_rounds(two, start, flipped), two_rounds(one_by_one, start, flipped))
    assert len({worker.process.pid for worker in two.workers}) == 2


def test_the_parent_trains_clients_before_workers_are_started(monkeypatch):
    fork_workers(monkeypatch)
    data, one_by_one = worker_tasks.examples(), serial()
    start = start_of(one_by_one)
    expected = two_rounds(one_by_one, start, data)
    monkeypatch.setattr("fedcomp.sim.processes.LOCAL_TRAINING_S", float("inf"))
    with workers(local_training=True) as engine:
        assert_same(two_rounds(engine, start, data), expected)
        assert not engine.workers
        monkeypatch.setattr("fedcomp.sim.processes.LOCAL_TRAINING_S", 0.0)
        assert_same(two_rounds(engine, start, data), expected)  # in the parent and in the worker
        assert len(engine.workers) == 1


def test_bfloat16_updates_equal_the_serial_engines_and_are_close_to_float32(two):
    data, one_by_one = worker_tasks.examples(), serial("faulty")
    start, coarse = start_of(one_by_one), LocalSGD(steps=3, batch_size=8, precision="bfloat16")
    fine = LocalSGD(steps=3, batch_size=8)
    expected, _ = one_by_one.train(start, data, jobs(start, coarse), coarse, seed=5)
    full, _ = one_by_one.train(start, data, jobs(start, fine), fine, seed=5)
    updates, _ = two.train(start, data, jobs(start, coarse), coarse, seed=5)
    assert torch.equal(updates, expected) and updates.dtype == torch.float32
    difference = (updates - full).norm(dim=1) / full.norm(dim=1)
    assert ((0 < difference) & (difference < 0.1)).all()


def test_returned_updates_do_not_change_in_later_calls(two):
    data, start = worker_tasks.examples(), start_of(serial("faulty"))
    first, _ = two.train(start, data, jobs(start), SGD, seed=5)
    kept = first.clone()
    row = two.train(start, data, jobs(start, round=2), SGD, seed=5)[0][1]
    assert torch.equal(first, kept) and not torch.equal(row, kept[1])
    files = set()
    for round in range(3, 9):
        two.train(start, data, jobs(start, round=round), SGD, seed=5)
        files.add(len(os.listdir("/proc/self/fd")))
    assert len(files) == 1


def test_workers_killed_while_they_are_idle_are_replaced(two):
    data, start = worker_tasks.examples(), start_of(serial("faulty"))
    before, _ = two.train(start, data, jobs(start), SGD, seed=5)
    killed = two.workers[0].process
    killed.kill()
    killed.wait()
    after, results = two.train(start, data, jobs(start), SGD, seed=5)
    assert torch.equal(before, after) and len(results) == 5
    pids = {worker.process.pid for worker in two.workers}
    assert len(pids) == 2 and killed.pid not in pids


def test_a_client_whose_worker_died_is_trained_once_more_and_fails_alone(tmp_path, monkeypatch):
    """Client 0 raises an error, client 2 kills every worker that trains it, and client 4 kills the first.

    Seven workers die in three rounds, with trained clients in between. As many deaths in a row would end the run.
    """
    fork_workers(monkeypatch)
    monkeypatch.setenv(worker_tasks.FIRST_DEATH, str(tmp_path / "died"))
    output: list[str] = []
    one_by_one = serial("faulty")
    sgd, start = LocalSGD(epochs=1, batch_size=8), start_of(one_by_one)
    deadly = worker_tasks.marked(_30=worker_tasks.DEADLY)
    survivable = {"_7": worker_tasks.BAD, "_90": worker_tasks.DEADLY_ONCE}
    with workers("faulty", warn=output.append) as engine:
        updates, results = engine.train(
            start,
            worker_tasks.marked(_30=worker_tasks.DEADLY, **survivable),
            jobs(start, sgd),
            sgd,
            seed=5,
        )
        later = [
            engine.train(start, deadly, jobs(start, sgd, round=round), sgd, seed=5)[1]
            for round in (2, 3)
        ]
    honest, expected = one_by_one.train(
        start, worker_tasks.marked(**survivable), jobs(start, sgd), sgd, seed=5
    )
    assert [type(result) is JobResult for result in results] == [False, True, False, True, True]
    assert failure_reason(results[0]) == failure_reason(expected[0])
    assert failure_reason(results[0]).endswith("in forward: ValueError: a sensor reports nonsense")
    assert failure_reason(results[2]).startswith(
        "two worker processes ended while they trained this client; the second was killed by SIGSEGV"
    )
    assert torch.equal(updates, honest[[0, 2, 3]])
    assert len(output) == 4 and not any("\n" in sentence for sentence in output)
    assert "SIGSEGV while it trained client 2" in output[0]
    assert "SIGSEGV while it trained client 4" in output[1]
    for results in later:
        assert [type(result) is JobResult for result in results] == [True, True, False, True, True]


def test_a_task_that_workers_cannot_load_raises_an_error(tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    monkeypatch.setenv(worker_tasks.FIRST_DEATH, str(tmp_path / "gone"))
    data, start = worker_tasks.examples(), start_of(serial())
    with workers("gone") as engine:
        (tmp_path / "gone").touch()
        with pytest.raises(
            TaskError, match="cannot load --task .*the file is gone.*--engine serial"
        ) as error:
            engine.train(start, data, jobs(start), SGD, seed=5)
        assert "\n" not in str(error.value) and not engine.workers


def test_workers_that_cannot_start_raise_an_error(monkeypatch):
    data, start = worker_tasks.examples(), start_of(serial())
    with workers() as engine:
        monkeypatch.setattr("fedcomp.sim.processes.WORKER_PROGRAM", "raise SystemExit(7)")
        with pytest.raises(UserError, match="exit status 7.*--engine serial"):
            engine.train(start, data, jobs(start), SGD, seed=5)


def test_random_numbers_drawn_by_an_imported_task_are_the_same_in_workers(monkeypatch):
    fork_workers(monkeypatch)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    one_by_one, data = serial("drawn"), worker_tasks.examples()
    assert (
        torch.equal(before[0], torch.get_rng_state())
        and (before[1] == np.random.get_state()[1]).all()
    )
    assert before[2] == random.getstate()
    start, found = start_of(one_by_one), []
    with workers("drawn") as engine:
        for each in (engine, one_by_one):
            found.append(each.train(start, data, jobs(start), SGD, seed=5)[0])
    assert torch.equal(*found)


def test_a_run_in_which_every_client_kills_its_worker_ends_with_an_error(monkeypatch):
    fork_workers(monkeypatch)
    output, start = [], start_of(serial("faulty"))
    data, sgd = (
        worker_tasks.marked(**{f"_{i}": worker_tasks.DEADLY for i in range(2, 120)}),
        LocalSGD(epochs=1, batch_size=8),
    )
    ended = pytest.raises(UserError, match="^6 worker.*SIGSEGV.*--engine serial")
    with workers("faulty", warn=output.append) as engine, ended as error:
        engine.train(start, data, jobs(start, sgd)[1:], sgd, seed=5)
    assert (
        "\n" not in str(error.value)
        and output
        and not any("memory" in sentence for sentence in output)
        and not engine.workers
    )


def test_a_model_that_exits_its_process_fails_only_its_client(two):
    one_by_one, sgd = serial("faulty"), LocalSGD(epochs=1, batch_size=8)
    start = start_of(one_by_one)
    leaving = worker_tasks.marked(_7=worker_tasks.EXIT)
    for each in (two, one_by_one):
        _, results = each.train(start, leaving, jobs(start, sgd), sgd, seed=5)
        assert "worker_tasks.py, line " in failure_reason(
            results[0]
        ) and "SystemExit: 7" in failure_reason(results[0])
        assert all(type(result) is JobResult for result in results[1:])
    stopping = worker_tasks.marked(_7=worker_tasks.STOP)
    _, results = two.train(start, stopping, jobs(start, sgd), sgd, seed=5)
    assert "KeyboardInterrupt" in failure_reason(results[0])
    assert all(type(result) is JobResult for result in results[1:])
    with pytest.raises(KeyboardInterrupt):
        one_by_one.train(start, stopping, jobs(start, sgd), sgd, seed=5)


def test_a_worker_does_not_import_flower(two):
    sgd = LocalSGD(epochs=1, batch_size=8)
    start = start_of(serial("faulty"))
    _, results = two.train(
        start, worker_tasks.marked(_7=worker_tasks.MODULES), jobs(start, sgd), sgd, seed=5
    )
    imported = failure_reason(results[0]).partition("modules: ")[2].split()
    assert imported == ["torch"]


RUN = RunConfig(
    task=f"{TASKS}:task",
    clients=6,
    participation=0.5,
    rounds=3,
    local_steps=2,
    lr=0.1,
    momentum=0.5,
    keep_momentum=True,
    uplink="stc:density=10%",
    downlink="stc:density=10%",
)


def test_a_run_equals_that_of_the_serial_engine(tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    for engine in ("serial", "processes"):
        simulate(RunConfig(**vars(RUN) | {"engine": engine, "out": str(tmp_path / engine)}))
    assert (tmp_path / "serial" / "model.safetensors").read_bytes() == (
        tmp_path / "processes" / "model.safetensors"
    ).read_bytes()
    assert read_run(tmp_path / "processes")["resolved"]["engine"] == "processes"
    assert RunConfig(**vars(RUN) | {"engine": "processes"}).precision == "float32"


def test_models_that_are_not_batched_are_trained_by_processes_on_several_cores(
    tmp_path,
):
    torch.set_num_threads(2)
    simulate(RunConfig(**vars(RUN) | {"rounds": 1, "out": str(tmp_path / "run")}))
    assert read_run(tmp_path / "run")["resolved"] | {"device": "", "residuals": ""} == {
        "device": "",
        "engine": "processes",
        "at_once": 2,
        "residuals": "",
    }


def test_a_model_that_views_its_activations_is_trained():
    task = load(f"{TASKS}:viewed")
    model = initial_model(task, 3)
    layout, data, batches = Layout.of(model), task.train(), [np.arange(8), np.arange(8) + 8]
    start, plain = layout.gather(model), SerialEngine(task, initial_model(task, 3), layout, "cpu")
    plain.channels_last = False
    set_memory_format(plain.model, channels_last=False)
    engine = SerialEngine(task, model, layout, "cpu")
    assert engine.channels_last
    expected = plain.train(start, data, batches, LocalSGD())
    assert (
        torch.equal(engine.train(start, data, batches, LocalSGD()).update, expected.update)
        and not engine.channels_last
    )


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_no_process_or_file_is_left_after_the_parent_ends(tmp_path, sent):
    """The parent ends while a worker trains a client for ten minutes."""
    before = set(os.listdir("/dev/shm"))
    task = ("--task", f"{TASKS}:slow", "--clients", "1", "--participation", "1")
    run = Command(tmp_path, "run", "sim", *task, "--rounds", "1", "--engine", "processes")
    try:
        pids = {int(run.wait_for(r"^trains (\d+)$")[1])}
        assert running(pids)
        run.send(sent)
        run.end(60)
        assert gone(pids, 60)
        assert not {name for name in set(os.listdir("/dev/shm")) - before if "fedcomp" in name}
    finally:
        run.kill()
