"""The worker of the engines that train in other processes: it loads the task and trains the jobs that it receives."""

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from ..config import RunConfig, data_folder
from ..errors import FedcompError
from ..layout import Layout
from ..tasks import initial_model, load
from ..tasks.data import Examples
from ..tasks.user_errors import client_error
from ..training import devices
from ..training.engine import ClientEngine, Job, JobResult, try_job
from ..training.local_sgd import LocalSGD
from ..training.serial_engine import client_engine
from .jobs import packed_result, unpacked_job

POLL_S = 0.5  # interval at which a worker checks that its parent still runs


class TrainingWorker:
    """Trains one client at a time on one thread. Loads the task on first use."""

    def __init__(self, config: RunConfig, device: str, dtype: torch.dtype):
        """`config`: as `with_absolute_paths` returns it. `dtype`: torch's default dtype in the parent."""
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self.engine: ClientEngine | None = None
        self._own_data: Examples | None = None  # loaded when a job arrives without data

    def load(self) -> str:
        """Load the task. Return the error as one line, "" on success."""
        if self.engine is None:
            try:
                torch.set_num_threads(1)
                torch.set_default_dtype(self.dtype)
                devices.keep_freed_memory()
                task = load(self.config.task, data_folder(self.config.data))
                model = initial_model(task, self.config.seed)
                self.engine = client_engine(task, model, Layout.of(model), self.device)
            except Exception as error:
                return _first_line(error)
        return ""

    def train(
        self,
        start: Tensor,
        data: Examples | None,
        job: Job,
        sgd: LocalSGD,
        seed: int,
        update: Tensor,
    ) -> JobResult | str:
        """Train a job and write its update [n] into `update`. Return the packed result, or the error as one line.

        `data`: None if this process reads the task's data itself.
        """
        assert self.engine is not None  # `load` has been called
        result: JobResult | Exception
        try:
            if data is None:
                if self._own_data is None:
                    self._own_data = self.engine.task.train().to(self.device)
                data = self._own_data
            result = try_job(self.engine, start, data, unpacked_job(job), sgd, seed, update)
        except Exception as error:
            result = error
        except KeyboardInterrupt as error:  # raised by the task's own code
            result = client_error(error)
        if isinstance(result, Exception):
            return _first_line(result)
        try:
            return packed_result(result)
        except FedcompError as error:
            return _first_line(error)


def main(descriptor: int, parent_pid: int) -> None:
    """Train the jobs that arrive on the connection with this file descriptor, until the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, args=(parent_pid,), daemon=True).start()
    connection = Connection(descriptor)
    with suppress(EOFError, ConnectionError):  # the parent has ended
        worker = TrainingWorker(*connection.recv())
        answer: JobResult | str = worker.load()
        while True:
            connection.send(answer)
            start, data, updates, row, job, sgd, seed = connection.recv()
            answer = worker.train(start, data, job, sgd, seed, updates[row])


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the config with absolute paths of task and data, valid in any working directory."""
    path, separator, name = config.task.rpartition(":")
    task = f"{os.path.abspath(os.path.expanduser(path))}:{name}" if separator else config.task
    folder = data_folder(config.data)
    return replace(config, task=task, data=str(folder.absolute()) if folder else None)


def _exit_with_parent(parent_pid: int) -> None:
    """End this process when its parent has ended, also during training."""
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    os._exit(0)


def _first_line(error: Exception) -> str:
    return str(client_error(error)).strip().split("\n")[0]
