"""The worker of `--engine processes` and `--engine ray`: it loads the task in its own process, and trains one client at a time."""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import malloc
from ..clients.session import failure_reason
from ..config import RunConfig, data_folder
from ..layout import Layout
from ..tasks import initial_model, load
from ..tasks.data import Data, Examples, map_nested, map_tensors
from ..tasks.user_errors import client_error
from ..training.engine import ClientEngine, Job, JobResult
from ..training.local_sgd import LocalSGD
from ..training.own_loop import client_engine

POLL_S = 0.5  # interval at which a worker checks whether its parent process still runs


class TrainingWorker:
    """A worker that trains one client at a time, on one thread. Call `load` before `train`."""

    def __init__(self, config: RunConfig, device: str, dtype: torch.dtype):
        """`config` is a result of `with_absolute_paths`, and `dtype` is torch's default dtype in the parent process."""
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self.engine: ClientEngine | None = None
        self._own_data: Examples | None = (
            None  # loaded by the first call of `train` with `data=None`
        )

    def load(self) -> str:
        """Load the task unless it is loaded. Return an error message of one line, or "" on success."""
        if self.engine is None:
            try:
                torch.set_num_threads(1)
                torch.set_default_dtype(self.dtype)
                malloc.keep_freed_memory()
                task = load(self.config.task, data_folder(self.config.data))
                model = initial_model(task, self.config.seed)
                self.engine = client_engine(task, model, Layout.of(model), self.device)
            except Exception as error:
                return failure_reason(error)
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
        """Train the client of `job`, and write its update into `update`. Return the result for pickling, or an error message of one line.

        If `data` is None, the worker reads the task's training data itself.
        """
        assert self.engine is not None
        try:
            if data is None:
                if self._own_data is None:
                    self._own_data = self.engine.task.train().to(self.device)
                data = self._own_data
            result = self.engine.try_job(start, data, job, sgd, seed, update)
            return (
                failure_reason(result) if isinstance(result, Exception) else packed_result(result)
            )
        except (Exception, KeyboardInterrupt) as error:  # the task's code may raise any exception
            return failure_reason(client_error(error))


def main(descriptor: int, parent_pid: int) -> None:
    """Train the clients of the jobs that arrive on a connection, until the parent process exits.

    `descriptor` is the connection's file descriptor.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, args=(parent_pid,), daemon=True).start()
    connection = Connection(descriptor)
    with suppress(EOFError, ConnectionError):  # the parent process has exited
        worker = TrainingWorker(*connection.recv())

        def train(
            start: Tensor, data: Any, updates: Tensor, row: int, job: Job, sgd: LocalSGD, seed: int
        ) -> JobResult | str:
            # A function, so that its references to shared memory (`start`, `data`, `updates`) end when it returns.
            return worker.train(start, data, job, sgd, seed, updates[row])

        answer: JobResult | str = worker.load()
        while True:
            connection.send(answer)
            answer = train(*connection.recv())


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return `config` with absolute paths of the task file and the data folder, for processes with another working directory."""
    path, separator, name = config.task.rpartition(":")
    task = f"{os.path.abspath(os.path.expanduser(path))}:{name}" if separator else config.task
    folder = data_folder(config.data)
    return replace(config, task=task, data=str(folder.absolute()) if folder else None)


def _exit_with_parent(parent_pid: int) -> None:
    """Exit this process when its parent has exited, even during training."""
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    os._exit(0)


@dataclass(frozen=True, eq=False)
class PickledTensor:
    """A wrapper that pickles a tensor as a NumPy array. Unpickling returns a tensor on the CPU.

    Do not write to the unpickled tensor, since Ray may store the array in memory that processes share.
    """

    tensor: Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self.tensor.detach().cpu().contiguous()
        array = tensor.reshape(-1).view(torch.uint8).numpy()
        return _from_array, (array, tensor.dtype, tensor.shape)


def _from_array(array: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns about read-only arrays
        return torch.from_numpy(array).view(dtype).reshape(shape)


def packed_job(job: Job, pack_trace: Callable[[Tensor], Any] = PickledTensor) -> Job:
    """Return a copy of `job` whose tensors are wrapped for pickling. `pack_trace` wraps the vectors in `job.traces`."""
    buffers, state = map_nested((job.buffers, job.state), PickledTensor)
    return job._replace(buffers=buffers, traces=job.traces.map(pack_trace), state=state)


def packed_result(result: JobResult) -> JobResult:
    """Return a copy of `result` whose tensors are wrapped for pickling."""
    buffers, state = map_nested((result.buffers, result.state), PickledTensor)
    return result._replace(buffers=buffers, state=state)


def packed_data(data: Examples, pack: Callable[[Tensor], Any] = PickledTensor) -> Data | None:
    """Return a copy of `data` whose tensors are wrapped by `pack`, or None for LazyData, which the receiving process loads itself."""
    if not isinstance(data, Data):
        return None
    return Data(map_tensors(data.inputs, pack), pack(data.targets))


def unpacked_result(result: JobResult) -> JobResult:
    """Return a copy of an unpickled result, with tensors that may be written to."""
    buffers, state = map_nested((result.buffers, result.state), torch.clone)
    return result._replace(buffers=buffers, state=state)
