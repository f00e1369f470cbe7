"""`--engine ray`: local SGD in the actors of Flower's own Ray engine, on this machine or, with RAY_ADDRESS, on a cluster.

The strategy, its loop, the clients' memories and the run folder are those of any simulation; a client's training is a Flower message to
a ClientApp (ray_app.py). An actor has one core and one thread, and with --device cuda a quarter of a GPU; there are as many as Ray has
room for. An update depends on the client's message alone, so it is the serial engine's on one thread, to the bit, whichever actor made it;
where an actor dies, Ray starts another and the client is trained once more. Flower's own loop is not used: it looks for messages ten
times a second, works on 32 at most at a time, and cannot be interrupted.

Every machine of a cluster needs fedcomp[ray] and, under the same path, the file of a user's own task with the modules beside it that it
imports. The data is sent to them.
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
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from torch import Tensor

from ..clients.flower import Actors, identify_process, name_messages
from ..clients.session import reason
from ..config import RunConfig, data_folder
from ..errors import ConfigError, TaskError, UserError
from ..tasks import Data
from ..training.engine import Done, Engine, Job, moved
from ..training.local_sgd import LocalSGD
from .ray_app import DONE, PARTITION, REASON, Errand, Setup, Stored, Untrained, asked_of, done_of

FIRST_NODE = 2  # Flower gives 1 to the SuperLink
PER_GPU = 4  # actors
AHEAD = 4  # clients for each actor that are asked at once
RESOURCES = {
    "num_cpus": 1,
    "max_restarts": -1,
    "max_task_retries": 1,
}  # of an actor, in Ray's words; -1 = as often as it takes
DATA_SETS = 8  # in the object store: the run's, and those of attacks
ATTEMPTS = 3  # to start Ray, which gives up after 30 s on a machine that has much else to do
REACH_S = 10.0  # that a cluster has to answer
ADDRESS = "RAY_ADDRESS"  # of a cluster, in the environment
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Without the first, Ray listens on every address; with the others, it obeys nobody else on this machine.
ALONE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}


def check(config: RunConfig) -> None:
    """Raise ConfigError for options that do not go together with `--engine ray`, and where Ray is not installed."""
    if config.device.startswith("cuda:"):
        raise ConfigError(
            f"--device {config.device} names one GPU, and --engine ray deals them out; give --device cuda"
        )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--engine ray needs Ray, which is not installed; install it with: pip install 'fedcomp[ray]'"
        )


class RayEngine(Engine):
    """Trains clients in actors. `device`: where the updates are put.

    The actors are started with the first clients. Where Ray runs in this process already, it is used as it is and left running.
    """

    def __init__(self, config: RunConfig, device: torch.device):
        check(config)
        self.config, self.device = config, device
        self._ends: ExitStack | None = None
        self._data: dict[
            int, tuple[Data, tuple[Any, Any]]
        ] = {}  # by identity, with what refers to it in the object store
        self._start: tuple[Tensor, Any] | None = (
            None  # likewise, the weights that were asked for last
        )
        self._actors: Actors
        self._threads: ThreadPoolExecutor

    def train(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[Done | Exception]]:
        """What engines.Engine promises. Raises what `begin` does."""
        self.begin()
        self._actors.app = self._errand(start, data)
        answers = [
            self._threads.submit(self._ask, asked_of(job, sgd, seed), "train", job.who)
            for job in jobs
        ]
        updates, results, done = torch.empty(len(jobs), len(start), device=self.device), [], 0
        for job, answer in zip(jobs, answers, strict=True):
            try:
                results.append(done_of(answer.result(), updates[done], job.traces))
            except Exception as error:  # of Ray: the actor died, and the one after it
                results.append(Untrained(f"the actor was lost that trained it: {reason(error)}"))
            done += isinstance(results[-1], Done)
        return updates[:done], results

    def resident(self, data: Data) -> Data:
        return moved(data, self.device)

    def begin(self) -> int:
        """Start Ray and the actors, unless they are there. Returns how many actors there are.

        Raises UserError where Ray cannot be started or reached, and TaskError where an actor cannot load the task.
        """
        if self._ends is None:
            with ExitStack() as ends:
                self._begin(ends)
                self._ends = ends.pop_all()
        return self._actors.count

    def close(self) -> None:
        """End the actors, whatever they do, and Ray if it was started here."""
        if self._ends is not None:
            ends, self._ends = self._ends, None
            ends.close()

    def _begin(self, ends: ExitStack) -> None:
        address = os.environ.get(ADDRESS)
        if "ray" not in sys.modules:
            os.environ.update(QUIET if address else QUIET | ALONE)
        import ray

        identify_process()
        cuda = self.device.type == "cuda"
        init: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address:
            _reach(address)
            init |= {"address": address}
        elif not ray.is_initialized():
            folder = tempfile.mkdtemp(
                prefix="fedcomp-ray-", dir="/tmp"
            )  # for logs and sockets, whose paths have to be short
            ends.callback(shutil.rmtree, folder, ignore_errors=True)
            init |= {
                "address": "local",
                "num_cpus": _cores(),
                "num_gpus": torch.cuda.device_count() if cuda else 0,
                "_temp_dir": folder,
            }
        if not ray.is_initialized():
            ends.callback(ray.shutdown)
        self._actors = _actors(init, RESOURCES | {"num_gpus": 1 / PER_GPU if cuda else 0}, cuda)
        self._threads = ThreadPoolExecutor(self._actors.count, "fedcomp-ray")
        ends.callback(self._threads.shutdown)
        ends.callback(self._actors.kill)
        ends.callback(self._threads.shutdown, wait=False, cancel_futures=True)
        ends.callback(self._forget)
        folder = data_folder(self.config)
        there = replace(
            self.config,
            task=_from_anywhere(self.config.task),
            data=str(folder.absolute()) if folder else None,
        )
        setup = Setup(there, self.device.type, torch.get_default_dtype())
        self._put, self._actors.app = ray.put, Errand(uuid.uuid4().hex, ray.put(setup), ray.get)
        each = [
            self._threads.submit(self._ask, RecordDict(), "query", actor)
            for actor in range(self._actors.count)
        ]
        if why := next((why for answer in each if (why := answer.result()[DONE][REASON])), ""):
            raise TaskError(
                f"--engine ray: an actor cannot load the task ({why}); every machine of a cluster needs it as it is here"
            )

    def _forget(self) -> None:
        self._data, self._start = {}, None

    def _errand(self, start: Tensor, data: Data) -> Errand:
        if self._start is None or not torch.equal(self._start[0], start):
            self._start = start.clone(), self._put(Stored.of(start))
        if id(data) not in self._data:
            for old in list(self._data)[: max(0, len(self._data) - DATA_SETS + 1)]:
                del self._data[old]
            self._data[id(data)] = (
                data,
                (self._put(Stored.of(data.inputs)), self._put(Stored.of(data.targets))),
            )
        return replace(self._actors.app, examples=self._data[id(data)][1], start=self._start[1])

    def _ask(self, content: RecordDict, kind: str, who: int) -> RecordDict:
        """What an actor answers. In a thread of as many as there are actors, so that one is free."""
        node = FIRST_NODE + who
        message = Message(content, node, kind)
        name_messages([message])
        return self._actors.ask(
            message, Context(1, node, {PARTITION: who}, RecordDict(), {})
        ).content


def _actors(init: dict[str, Any], resources: dict[str, float], cuda: bool) -> Actors:
    """Ray, and actors that have started. Raises UserError."""
    import ray

    needed = f"a core and 1/{PER_GPU} of a GPU" if cuda else "a core"
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with _unchanged():
                return Actors(init, resources)
        except Exception as error:  # Ray raises that itself
            if "ActorPool is empty" in str(error):
                raise UserError(
                    f"--engine ray: no machine that Ray knows has {needed} for an actor; give another --device"
                ) from error
            if "timed out" not in str(error) or attempt == ATTEMPTS:
                raise UserError(
                    f"--engine ray: Ray does not start ({reason(error)}); {ADDRESS} in the environment names a cluster that "
                    "runs, or is not set"
                ) from error
            ray.shutdown()
    raise AssertionError("unreachable")


@contextmanager
def _unchanged() -> Iterator[None]:
    """Keep what Ray and Flower change of this process."""
    main = threading.current_thread() is threading.main_thread()
    before, path, ended = signal.getsignal(signal.SIGTERM), os.environ.get("PYTHONPATH"), None
    try:
        yield
    except SystemExit as error:  # what Ray makes of the signal
        ended = error.code
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
        if path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = path
    if ended == signal.SIGTERM:
        signal.raise_signal(signal.SIGTERM)


def _reach(address: str) -> None:
    """Raise UserError where nobody listens: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return  # auto, or a URL
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--engine ray: no cluster answers at {address}, which {ADDRESS} names ({reason(error)}); start it there with ray "
            "start --head, or unset the variable"
        ) from error


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _from_anywhere(task: str) -> str:
    """The name of a task, as it is found from any folder."""
    where, separator, name = task.rpartition(":")
    return f"{os.path.abspath(os.path.expanduser(where))}:{name}" if separator else task
