"""The other side of the engines that train in other processes: a worker loads the task and trains the clients that it is given."""

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from ..clients import nested_state
from ..config import RunConfig, data_folder
from ..errors import FedcompError
from ..layout import Layout
from ..tasks import initial_model, load
from ..tasks.data import Data, Examples
from ..tasks.user_errors import client_error
from ..training import devices
from ..training.engine import JobResult, client_engine, try_job
from ..training.local_sgd import ClientEngine, Job, LocalSGD
from .jobs import PickledTensor, map_buffers

POLL_S = 0.5  # how often a worker looks whether its parent is still there


class TrainingWorker:
    """Trains one client at a time, on one thread. Loads the task once, when it is first needed."""

    def __init__(self, config: RunConfig, device: str, dtype: torch.dtype):
        """`config`: with absolute paths, as `with_absolute_paths` returns it. `dtype`: torch's default."""
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self.engine: ClientEngine | None = None
        self._own_data: Examples | None = None  # read when a job comes without data

    def load(self) -> str:
        """Load the task. Return why it cannot be loaded, "" if it could."""
        if self.engine is None:
            try:
                torch.set_num_threads(1)
                torch.set_default_dtype(self.dtype)
                devices.keep_freed_memory()
                task = load(self.config.task, data_folder(self.config.data))
                model = initial_model(task, self.config.seed)
                self.engine = client_engine(task, model, Layout.of(model), self.device)
            except Exception as error:
                return _line(error)
        return ""

    def train(
        self,
        start: Tensor,
        data: Data | None,
        job: Job,
        sgd: LocalSGD,
        seed: int,
        update: Tensor,
    ) -> JobResult | str:
        """Train a job and write its update [n] into `update`. Return the packed result, or why training failed.

        `data` is None where this process reads the task's data itself.
        """
        try:
            if data is None and self._own_data is None:
                self._own_data = self.engine.task.train().to(self.device)
            own = job._replace(state=job.state and nested_state.unpack(job.state))
            data = self._own_data if data is None else data
            result = try_job(self.engine, start, data, own, sgd, seed, update)
        except Exception as error:
            result = error
        except KeyboardInterrupt as error:  # raised by the task's own code
            result = client_error(error)
        if isinstance(result, Exception):
            return _line(result)
        try:
            state = result.state and nested_state.pack(result.state)
        except FedcompError as error:
            return _line(error)
        return result._replace(buffers=map_buffers(PickledTensor, result.buffers), state=state)


def main(channel: int, parent: int) -> None:
    """Train the clients that arrive through the connection with descriptor `channel`, until the process `parent` ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection = Connection(channel)
    with suppress(EOFError, ConnectionError):  # the parent has ended
        worker = TrainingWorker(*connection.recv())
        answer: JobResult | str = worker.load()
        while True:
            connection.send(answer)
            start, data, updates, row, job, sgd, seed = connection.recv()
            answer = worker.train(start, data, job, sgd, seed, updates[row])


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return a config whose task and data are found from any folder."""
    path, separator, name = config.task.rpartition(":")
    task = f"{os.path.abspath(os.path.expanduser(path))}:{name}" if separator else config.task
    folder = data_folder(config.data)
    return replace(config, task=task, data=str(folder.absolute()) if folder else None)


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, also while a client is trained."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(0)


def _line(error: Exception) -> str:
    return str(client_error(error)).strip().split("\n")[0]
