"""The Ray engine computes the updates of the serial engine bit for bit. Runs survive dead actors, stop at once, and hide Ray's output."""

import gc
import importlib.util
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import worker_tasks
from cases import for_each
from engine_checks import assert_same, jobs, serial, start_of, two_rounds

from fedcomp import RunConfig
from fedcomp.clients.session import failure_reason
from fedcomp.errors import ConfigError, TaskError
from fedcomp.sim import ray_engine, simulate
from fedcomp.sim.ray_engine import RayEngine
from fedcomp.sim.worker import PickledTensor
from fedcomp.training.engine import JobResult
from fedcomp.training.local_sgd import LocalSGD

pytestmark = [pytest.mark.slow, pytest.mark.deploy, pytest.mark.ray]

TINY = Path(__file__).parents[1] / "tiny_task.py"
DEADLY = Path(__file__).parents[1] / "deadly_task.py"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(str(Path(__file__).resolve().parents[i]) for i in (1, 2)),
    "OMP_NUM_THREADS": "1",
}
NEVER = 10**9  # steps
LOOPBACK = {
    "0100007F",
    "0000000000000000FFFF00000100007F",
    "00000000000000000000000001000000",
}  # as in /proc
RUN = RunConfig(
    task=f"{DEADLY}:task",
    clients=8,
    participation=0.5,
    local_steps=2,
    lr=0.1,
    uplink="stc:density=10%",
    downlink="stc:density=10%",
    partition="classes:1",
    engine="ray",
    rounds=100_000,
    plain=True,
)

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed; pip install 'fedcomp[ray]'",
)


@contextmanager
def running(folder: Path, **variables: str) -> Iterator[subprocess.Popen]:
    """Start a run in `folder`/ray on one core, and therefore with one actor."""
    flags = [
        "task",
        "clients",
        "participation",
        "local_steps",
        "lr",
        "uplink",
        "downlink",
        "partition",
        "engine",
        "rounds",
    ]
    given = [
        word for name in flags for word in (f"--{name.replace('_', '-')}", str(getattr(RUN, name)))
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "fedcomp", "sim", *given, "--plain", "--out", "ray"],
        cwd=folder,
        env=ENVIRONMENT | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1]),
    ) as run:
        try:
            yield run
        finally:
            run.kill()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ray_with_three_cores() -> Iterator[None]:
    """Start Ray in this process, on the loopback address, with short paths for its sockets."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for name, value in (ray_engine.DEFAULT_VARIABLES | ray_engine.LOOPBACK_ONLY).items():
            patch.setenv(name, value)
        import ray

        handler = signal.getsignal(signal.SIGTERM)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Ray drops its handles of processes
            ray.init(
                "local",
                num_cpus=3,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=folder,
            )
            gc.collect()
        yield
        assert ray.is_initialized()  # engines do not stop Ray if they did not start it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            ray.shutdown()
            gc.collect()
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def engine(name: str, actors: int) -> Iterator[RayEngine]:
    """Yield an engine with `actors` actors for a task with a relative path."""
    task = f"{os.path.relpath(worker_tasks.__file__)}:{name}"
    engine = RayEngine(RunConfig(task=task, seed=3), torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_engine, "_n_actors", lambda resources, gpus: actors)
        try:
            yield engine
        finally:
            engine.close()


@pytest.fixture(scope="module")
def two_actors(ray_with_three_cores) -> Iterator[RayEngine]:
    with engine("faulty", actors=2) as engine_:
        assert engine_.start_actors() == 2
        yield engine_


def descendants(process: int) -> Iterator[int]:
    """Return the processes that a process has started and that still run."""
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for child in map(int, tasks.read_text().split()):
                yield child
                yield from descendants(child)


def listening(processes: list[int]) -> set[str]:
    """Return the addresses, in hexadecimal, of the TCP sockets on which these processes listen."""
    inodes = set()
    for process in processes:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for file in list(Path(f"/proc/{process}/fd").iterdir()):
                with suppress(FileNotFoundError):
                    inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(file)))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def rounds_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@needs_ray
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
@pytest.mark.timeout(600)
def test_a_run_with_dead_actors_and_an_interruption_equals_the_serial_one(tmp_path, monkeypatch):
    with (
        running(tmp_path, KILL_AT="38") as run
    ):  # the actor takes eight steps per round, dies in round 5, and would die again in round 10
        heard = []
        while not heard or not re.match(r" +5 ", heard[-1]):
            heard.append(run.stdout.readline())
            assert heard[-1], run.stderr.read()
        started = list(descendants(run.pid))
        addresses = listening([run.pid, *started])
        os.killpg(run.pid, signal.SIGINT)  # a terminal also sends Ctrl-C to the process group
        _, said = run.communicate(timeout=300)
    assert run.returncode == 130
    done = int(
        re.fullmatch(
            r"fedcomp: interrupted after round (\d+) of 100000; continue with: fedcomp sim .*\n",
            said,
        )[1]
    )
    assert re.search(
        r" ray, \d+ actors?$", next(line for line in heard if line.startswith("engine"))
    )
    assert len(started) > 3 and addresses and addresses <= LOOPBACK
    until = time.monotonic() + 120
    while left := [process for process in started if Path(f"/proc/{process}").exists()]:
        assert time.monotonic() < until, f"{left} are left"
        time.sleep(0.1)

    monkeypatch.setenv("KILL_AT", str(NEVER))
    ray, serial, serially = (
        tmp_path / "ray",
        tmp_path / "serial",
        replace(RUN, engine="serial", rounds=done + 1),
    )
    assert not any(line["rejected"] for line in rounds_of(ray))
    simulate(replace(serially, out=str(serial)))
    assert rounds_of(ray) == rounds_of(serial)[:done]
    (ray / "config.toml").write_text(
        (ray / "config.toml").read_text().replace('engine = "ray"', 'engine = "serial"')
    )
    simulate(replace(serially, out=str(ray), resume=True))
    assert rounds_of(ray) == rounds_of(serial)
    assert (ray / "model.safetensors").read_bytes() == (serial / "model.safetensors").read_bytes()


def test_the_error_for_a_missing_ray_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(ray_engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--engine ray needs Ray.*pip install 'fedcomp\[ray\]'"):
        ray_engine.check(RUN)


@needs_ray
def test_an_engine_with_one_named_gpu_is_refused():
    with pytest.raises(ConfigError, match="--device cuda:1 names one GPU.*give --device cuda$"):
        ray_engine.check(replace(RUN, device="cuda:1"))


def test_cohort_batch_is_refused():
    with pytest.raises(ConfigError, match="--cohort-batch"):
        simulate(replace(RUN, task=f"{TINY}:task", cohort_batch=4))


@needs_ray
def test_updates_equal_those_of_the_serial_engine_bit_for_bit(two_actors):
    """With dropout, running statistics, momentum that is kept between rounds, moments, and batches of two sizes."""
    data, one_by_one = worker_tasks.examples(), serial("faulty")
    start = start_of(one_by_one)
    flipped = replace(data, targets=3 - data.targets)
    for each in (data, flipped, data):
        assert_same(two_rounds(two_actors, start, each), two_rounds(one_by_one, start, each))
    moved = two_rounds(two_actors, start + 0.01, data)
    assert_same(moved, two_rounds(one_by_one, start + 0.01, data))


@needs_ray
def test_a_client_that_ends_its_actor_or_raises_an_error_fails_alone(two_actors):
    """In round 1, clients 0 and 2 raise KeyboardInterrupt and SystemExit.

    In round 2, client 0 raises an error, and client 2 kills every actor that trains it.
    """
    one_by_one = serial("faulty")
    sgd, start = LocalSGD(epochs=1, batch_size=8), start_of(one_by_one)
    leaving = worker_tasks.marked(_7=worker_tasks.STOP, _30=worker_tasks.EXIT)
    deadly = worker_tasks.marked(_7=worker_tasks.BAD, _30=worker_tasks.DEADLY)
    trained = [False, True, False, True, True]
    updates, results = two_actors.train(start, leaving, jobs(start, sgd), sgd, seed=5)
    assert [type(result) is JobResult for result in results] == trained and len(updates) == 3
    assert "in forward: KeyboardInterrupt" in failure_reason(results[0])
    assert "in forward: SystemExit" in failure_reason(results[2])
    updates, results = two_actors.train(start, deadly, jobs(start, sgd), sgd, seed=5)
    survivable = worker_tasks.marked(_7=worker_tasks.BAD)
    honest, expected = one_by_one.train(start, survivable, jobs(start, sgd), sgd, seed=5)
    assert [type(result) is JobResult for result in results] == trained
    assert failure_reason(results[0]) == failure_reason(expected[0])
    assert failure_reason(results[2]).startswith(
        "the Ray actor that trained this client died twice"
    )
    assert torch.equal(updates, honest[[0, 2, 3]])


@needs_ray
def test_a_task_that_actors_cannot_load_raises_an_error(ray_with_three_cores):
    with (
        engine("nothing", actors=1) as actors,
        pytest.raises(
            TaskError, match="^--engine ray: an actor cannot load the task .*worker_tasks.py"
        ),
    ):
        actors.start_actors()


@for_each(
    "tensor",
    [
        torch.arange(6, dtype=torch.int64).reshape(2, 3),
        torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16),
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.arange(12.0).reshape(3, 4).T,
    ],
)
def test_tensors_of_every_dtype_are_shared(tensor):
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(PickledTensor(tensor), protocol=5, buffer_callback=buffers.append)
    read_only = [bytes(buffer.raw()) for buffer in buffers]
    shared = pickle.loads(pickled, buffers=read_only)
    assert shared.dtype == tensor.dtype and torch.equal(shared, tensor)
