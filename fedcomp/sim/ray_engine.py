"""The engine of `--engine ray`, which trains clients in Ray actors (worker processes), on this machine or on the cluster at RAY_ADDRESS.

Only local training runs in actors. The main process runs the strategy, the round loop and error feedback, and writes the run folder. An
actor has one core, one thread and, with --device cuda, a quarter of a GPU. The engine starts as many actors as the cluster has room for,
and sends each job (the training of a client in a round) to an idle actor. Actors keep no state of clients: momentum and running statistics
are sent with a job and returned with its update. Every actor therefore computes bit for bit the updates of the serial engine on one thread.

Ray's object store holds, on each machine, one copy of the data and one copy of the weights with which a round starts. Every machine of a
cluster needs fedcomp[ray]. If the task is a file, every machine also needs this file and the modules that it imports, under the same path.
"""

import importlib.util
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..clients.session import failure_reason
from ..config import RunConfig
from ..errors import ConfigError, FedcompError, TaskError, UserError
from ..tasks.data import Examples
from ..training.engine import Engine, Job, JobResult
from ..training.local_sgd import LocalSGD, Traces
from .worker import (
    PickledTensor,
    TrainingWorker,
    packed_data,
    packed_job,
    unpacked_result,
    with_absolute_paths,
)

ACTORS_PER_GPU = 4
JOBS_PER_ACTOR = 4  # jobs for each actor in a call of `train`; with 1, actors would often be idle
CONNECT_TIMEOUT_S = 10.0
ADDRESS_VARIABLE = "RAY_ADDRESS"
# Do not send usage statistics, and leave CUDA_VISIBLE_DEVICES unchanged in actors without a GPU.
DEFAULT_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 makes Ray listen on the loopback interface only. The random RAY_AUTH_TOKEN keeps out other users of
# this machine.
LOOPBACK_ONLY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}


def check(config: RunConfig) -> None:
    """Raise ConfigError if options conflict with `--engine ray` or Ray is not installed."""
    if config.device.startswith("cuda:"):
        raise ConfigError(
            f"--device {config.device} names one GPU, but --engine ray assigns GPUs to its actors; give --device cuda"
        )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--engine ray needs Ray, which is not installed; install it with: pip install 'fedcomp[ray]'"
        )


class TrainResult(NamedTuple):
    """The result of training a client in an actor. Its tensors are wrapped as PickledTensor."""

    update: Any  # float32 [numel]
    result: JobResult
    traces: Traces  # momentum and other vectors after the last step


class TrainingActor(TrainingWorker):
    """A training worker that runs as a Ray actor."""

    def __init__(self, config: RunConfig, device: str, dtype: torch.dtype):
        super().__init__(config, device, dtype)
        self._fetched: dict[str, tuple[Any, Any]] = {}

    def train_job(
        self, job: Job, sgd: LocalSGD, seed: int, refs: dict[str, Any]
    ) -> TrainResult | str:
        """Train the client of `job`. Return the result, or an error message of one line.

        `refs` has references to two objects in Ray's store. `refs["data"]` refers to the training data, or to None if the actor reads the
        data itself. `refs["start"]` refers to the weights before the first step.
        """
        if error := self.load():
            return error
        data, start = self._fetch("data", refs["data"]), self._fetch("start", refs["start"])
        update = torch.empty_like(start)
        traces = job.traces.map(lambda trace: trace.to(self.device, copy=True))
        result = self.train(start, data, job._replace(traces=traces), sgd, seed, update)
        if isinstance(result, str):
            return result
        return TrainResult(PickledTensor(update), result, traces.map(PickledTensor))

    def _fetch(self, name: str, ref: Any) -> Any:
        """Return the object that `ref` refers to, on this actor's device. The last object of each name is cached."""
        import ray

        if name not in self._fetched or self._fetched[name][0] != ref:
            fetched = ray.get(ref)
            self._fetched[name] = ref, None if fetched is None else fetched.to(self.device)
        return self._fetched[name][1]


class RayEngine(Engine):
    """Engine that trains clients in Ray actors and returns updates on `device`. The first call of `train` starts the actors."""

    def __init__(self, config: RunConfig, device: torch.device):
        check(config)
        self.config, self.device = config, device
        self._actors: list[Any] = []
        self._cleanup = ExitStack()
        # Maps the id of a dataset to the dataset and its reference in Ray's store.
        self._data: dict[int, tuple[Examples, Any]] = {}
        # The start weights of the last call of `train`, and their reference in Ray's store.
        self._start: tuple[Tensor, Any] | None = None

    def train(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        """Train the clients of `jobs` in actors. Each job is sent to an idle actor.

        If an actor dies twice while it trains a client, only this client fails. Raises the same errors as `start_actors`.
        """
        self.start_actors()
        updates = torch.empty(len(jobs), len(start), device=self.device, dtype=torch.float32)
        results: dict[int, JobResult | Exception] = {}
        refs = {"data": self._data_ref(data), "start": self._start_ref(start)}
        for i, result in self._run(jobs, sgd, seed, refs):
            if isinstance(result, str):
                results[i] = FedcompError(result)
            else:
                results[i] = unpacked_result(result.result)
                updates[i].copy_(result.update)
                jobs[i].traces.copy_from(result.traces)
        trained = [i for i in range(len(jobs)) if isinstance(results[i], JobResult)]
        if len(trained) < len(jobs):
            updates = updates[trained]
        return updates, [results[i] for i in range(len(jobs))]

    def start_actors(self) -> int:
        """Start Ray and the actors if they are not running. Return the number of actors.

        Raises UserError if Ray cannot be started or reached, and TaskError if an actor cannot load the task.
        """
        if not self._actors:
            with ExitStack() as cleanup:
                self._actors = self._create_actors(cleanup)
                self._cleanup = cleanup.pop_all()
        return len(self._actors)

    def close(self) -> None:
        """Stop the actors, even if they are training, and stop Ray if this engine started it."""
        self._actors, self._data, self._start = [], {}, None
        self._cleanup.close()

    def _run(
        self, jobs: Sequence[Job], sgd: LocalSGD, seed: int, refs: dict[str, Any]
    ) -> Iterator[tuple[int, TrainResult | str]]:
        """Send each job to an idle actor. When a result arrives, yield the position of its job in `jobs`, and the result."""
        import ray
        from ray.exceptions import RayActorError, RayError

        waiting, idle = deque(enumerate(jobs)), list(self._actors)
        # Maps a pending Ray call to (position of its job, actor). The position is None if the call waits for the restart of an actor.
        running: dict[Any, tuple[int | None, Any]] = {}
        while waiting or running:
            while waiting and idle:
                (i, job), actor = waiting.popleft(), idle.pop()
                running[actor.train_job.remote(packed_job(job), sgd, seed, refs)] = i, actor
            [call], _ = ray.wait(list(running))
            position, actor = running.pop(call)
            if position is None:
                idle.append(actor)
                continue
            try:
                result = ray.get(call)
                idle.append(actor)
            except RayActorError:
                # Send the next job only after the actor has restarted. Otherwise Ray counts the actor's death against that job, too.
                running[actor.load.remote()] = None, actor
                result = "the Ray actor that trained this client died twice; the cause may be a lack of memory or the task's own code"
            except RayError as error:
                idle.append(actor)
                result = f"Ray could not train this client: {failure_reason(error)}"
            yield position, result

    def _data_ref(self, data: Examples) -> Any:
        import ray

        if id(data) not in self._data:
            self._data[id(data)] = data, ray.put(packed_data(data))
        return self._data[id(data)][1]

    def _start_ref(self, start: Tensor) -> Any:
        import ray

        if self._start is None or not torch.equal(self._start[0], start):
            self._start = start.clone(), ray.put(PickledTensor(start))
        return self._start[1]

    def _create_actors(self, cleanup: ExitStack) -> list[Any]:
        """Return actors that have loaded the task. Closing `cleanup` stops the actors, and stops Ray if this method started it."""
        address = os.environ.get(ADDRESS_VARIABLE)
        if "ray" not in sys.modules:  # Ray reads environment variables when it is imported
            os.environ.update(DEFAULT_VARIABLES if address else DEFAULT_VARIABLES | LOOPBACK_ONLY)
        import ray
        from ray.exceptions import RayError

        cuda = self.device.type == "cuda"
        if not ray.is_initialized():
            _init_ray(address, torch.cuda.device_count() if cuda else 0, cleanup)
        gpus = 1 / ACTORS_PER_GPU if cuda else 0
        count = sum(_n_actors(node["Resources"], gpus) for node in ray.nodes() if node["Alive"])
        if not count:
            needed = f"a core and 1/{ACTORS_PER_GPU} of a GPU" if cuda else "a core"
            raise UserError(
                f"--engine ray: no machine of the Ray cluster has {needed} for an actor; give another --device or --engine"
            )
        config = with_absolute_paths(self.config)
        actor_class: Any = ray.remote(TrainingActor).options(
            num_cpus=1,
            num_gpus=gpus,
            max_restarts=-1,  # an actor may be restarted any number of times
            max_task_retries=1,  # if an actor dies, its client is trained again once
        )
        actors: list[Any] = []
        for _ in range(count):
            actors.append(actor_class.remote(config, self.device.type, torch.get_default_dtype()))
            cleanup.callback(ray.kill, actors[-1])
        try:
            errors = [error for error in ray.get([a.load.remote() for a in actors]) if error]
        except RayError as error:
            errors = [failure_reason(error)]
        if errors:
            raise TaskError(
                f"--engine ray: an actor cannot load the task ({errors[0]}); every machine of a cluster needs the task's files "
                "under the same path"
            )
        return actors


def _init_ray(address: str | None, gpus: int, cleanup: ExitStack) -> None:
    """Connect to the Ray cluster at `address`, or start Ray on this machine if `address` is empty. Raises UserError."""
    import ray

    init: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        _check_reachable(address)
        init |= {"address": address}
    else:
        # Ray's logs and sockets are in /tmp, since the path of a socket must be short.
        folder = tempfile.mkdtemp(prefix="fedcomp-ray-", dir="/tmp")
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        init |= {
            "address": "local",
            "num_cpus": _n_cores(),
            "num_gpus": gpus,
            "include_dashboard": False,
            "_temp_dir": folder,
        }
    cleanup.callback(ray.shutdown)
    try:
        with _preserved_sigterm_handler():
            ray.init(**init)
    except Exception as error:  # Ray raises built-in exceptions of several types
        raise UserError(
            f"--engine ray: Ray does not start ({failure_reason(error)}); set {ADDRESS_VARIABLE} to the address of a running "
            "cluster, or unset it"
        ) from error


@contextmanager
def _preserved_sigterm_handler() -> Iterator[None]:
    """Restore the SIGTERM handler, which ray.init replaces. If a SIGTERM arrives during ray.init, send it again afterwards."""
    before, exit_code = signal.getsignal(signal.SIGTERM), None
    try:
        yield
    except SystemExit as error:  # Ray's SIGTERM handler raises SystemExit
        exit_code = error.code
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    if exit_code == signal.SIGTERM:
        signal.raise_signal(signal.SIGTERM)


def _check_reachable(address: str) -> None:
    """Raise UserError if no process listens at `address`. Without this check, Ray would try for minutes to connect."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return  # `address` is "auto" or a URL
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--engine ray: no cluster answers at {address}, which {ADDRESS_VARIABLE} names ({failure_reason(error)}); start a cluster "
            "there with ray start --head, or unset the variable"
        ) from error


def _n_actors(resources: dict[str, float], gpus: float) -> int:
    limits = [resources.get("CPU", 0)] + ([resources.get("GPU", 0) / gpus] if gpus else [])
    return int(min(limits))


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
