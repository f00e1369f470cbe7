"""The engine of `--engine processes`, which trains clients in worker processes: one process per core, each with one thread.

A second thread hardly speeds up a convolution, but two processes on two cores train two clients in the time of one client. Each worker is a
separate Python interpreter, which computes bit for bit the updates of the serial engine on one thread. Weights, data, updates and momentum
are in anonymous shared memory, which only Linux has. All other values that a job (the training of a client in a round) needs are sent
to the worker through a pipe. If a dataset is not in memory, each worker reads the dataset itself.

A worker that dies is replaced, and its client is trained again. If a second worker dies while it trains the same client, this client fails.
"""

import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..config import RunConfig
from ..errors import ConfigError, FedcompError, TaskError, UserError
from ..layout import Layout
from ..tasks.base import Task
from ..tasks.data import Data, Examples, map_tensors
from ..training.engine import Engine, Job, JobResult
from ..training.local_sgd import LocalSGD, Traces
from ..training.own_loop import client_engine
from .worker import packed_data, packed_job, unpacked_result, with_absolute_paths

# With --engine auto, time for which the main process trains clients before it starts workers.
LOCAL_TRAINING_S = 0.5
# The run fails if this number of workers in a row die before they have loaded the task.
MAX_FAILED_STARTS = 3
# The run also fails after too many deaths without a trained client in between. The limit is this number times the number of workers, or
# times 3 if there are fewer than 3 workers.
MAX_DEATHS_PER_WORKER = 2
# Program of a worker process. Its arguments are those of `worker.main`, followed by the entries of `sys.path`.
WORKER_PROGRAM = (
    "import sys; channel, parent, *path = sys.argv[1:]; sys.path[:], sys.argv[1:] = path, []; "
    "from fedcomp.sim.worker import main; main(int(channel), int(parent))"
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
Result = JobResult | Exception


def is_available() -> bool:
    """Return whether this system has anonymous shared memory, which worker processes need."""
    return hasattr(os, "memfd_create")


def unbatched_engine(device: torch.device) -> str:
    """Return the engine for runs without the batched engine: "processes" on a CPU with several cores, else "serial"."""
    uses_workers = device.type == "cpu" and torch.get_num_threads() > 1 and is_available()
    return "processes" if uses_workers else "serial"


class SharedTensor:
    """A tensor in memory that processes of one machine share. A process that unpickles a SharedTensor gets a tensor with the same storage.

    The memory is anonymous: there is no file, and the system frees the memory when no process maps it any more. If you send a SharedTensor
    to another process, keep a reference to it until that process has unpickled it. After that, the memory exists as long as a tensor in
    one of the processes uses it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32):
        file = os.memfd_create("fedcomp", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, max(1, math.prod(shape) * dtype.itemsize))
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        self.tensor = _mapped(self.path, shape, dtype)

    @classmethod
    def copy_of(cls, tensor: Tensor) -> Self:
        shared = cls(tuple(tensor.shape), tensor.dtype)
        shared.tensor.copy_(tensor)
        return shared

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (self.path, tuple(self.tensor.shape), self.tensor.dtype)


class UpdateMemory:
    """Shared memory for the updates of a cohort. Not thread-safe.

    The memory is reused for the next cohort if the shape is the same and no tensor refers to the previous updates. Reuse saves the time
    that the operating system needs to fill new memory with zeros.
    """

    def __init__(self) -> None:
        self._unused: SharedTensor | None = None

    def stack(self, vectors: int, numel: int) -> tuple[SharedTensor, Tensor]:
        """Return shared memory for `vectors` updates, and an uninitialised tensor [vectors, numel] in this memory."""
        unused, self._unused = self._unused, None
        if unused is None or unused.tensor.shape != (vectors, numel):
            unused = SharedTensor((vectors, numel))
        # The array lives as long as a tensor that uses its memory, so the finalizer runs when the last of these tensors is freed.
        array = unused.tensor.numpy()[:]
        weakref.finalize(array, setattr, self, "_unused", unused).atexit = False
        return unused, torch.from_numpy(array)


def _mapped(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    mapping = np.memmap(path, np.uint8, "r+")
    return torch.from_numpy(mapping[: math.prod(shape) * dtype.itemsize]).view(dtype).view(shape)


class Worker:
    """A worker process and the connection to it. `setup` are the arguments of TrainingWorker.

    The process is a new interpreter, since a forked process may deadlock if the parent has OpenMP or numba threads.
    """

    def __init__(self, *setup: Any):
        self.ready = False  # whether the worker has loaded the task
        self.job = -1  # position of the job that the worker trains; -1: none
        self.connection, remote = Pipe()
        path = [entry for entry in sys.path if isinstance(entry, str)]
        with remote:
            arguments = [str(remote.fileno()), str(os.getpid()), *path]
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER_PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[remote.fileno()],
                env=os.environ | ONE_THREAD,
                process_group=0,  # a new process group, which Ctrl-C does not reach
            )
            self.connection.send(setup)

    def stop(self) -> str:
        """Kill the process if it still runs. Return how the process ended, such as "was killed by SIGKILL"."""
        self.connection.close()
        try:
            status = self.process.wait(0.2)
        except subprocess.TimeoutExpired:
            self.kill()
            return "lost its connection"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


@dataclass
class JobQueue:
    """The jobs of one call of `WorkerEngine.train`. A job is identified by its position in `jobs`."""

    jobs: Sequence[Job]
    start: SharedTensor
    data: (
        Data | None
    )  # data whose tensors are SharedTensors; None: workers read the data themselves
    sgd: LocalSGD
    seed: int
    memory: SharedTensor  # shared memory of `updates`
    updates: Tensor  # float32 [jobs, numel]

    def __post_init__(self) -> None:
        m = len(self.jobs)
        self.results: list[Result | None] = [None] * m
        self.waiting = deque(range(m))  # jobs that are not yet assigned to a worker
        self.traces: dict[int, Traces] = {}  # for each assigned job, its traces as SharedTensors
        self.deaths: Counter[int] = (
            Counter()
        )  # number of workers that died while they trained a job


class WorkerEngine(Engine):
    """Engine with `count` worker processes, each of which loads the task of `config`.

    With `local_training`, the main process trains clients itself for the first LOCAL_TRAINING_S seconds, so that short runs start no
    workers. `model` is used only for this local training. `warn` is called when a worker dies for the first time during a job.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        model: nn.Module,
        count: int,
        *,
        local_training: bool = False,
        warn: Callable[[str], None] = lambda sentence: None,
    ):
        if not is_available():
            raise ConfigError(
                "--engine processes needs anonymous shared memory, which only Linux has; give --engine serial"
            )
        self.config, self.count, self.warn = config, count, warn
        self.local_engine = (
            client_engine(task, model, Layout.of(model), "cpu") if local_training else None
        )
        self.workers: list[Worker] = []
        self._memory = UpdateMemory()
        self._setup = with_absolute_paths(config), "cpu", torch.get_default_dtype()
        # Maps the id of a data tensor to the tensor and its copy in shared memory.
        self._data: dict[int, tuple[Tensor, SharedTensor]] = {}
        self._local_s, self._deaths_in_a_row = 0.0, 0
        weakref.finalize(self, _kill_all, self.workers, os.getpid())

    def train(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[Result]]:
        """Train the clients of `jobs` in worker processes. Each job is sent to an idle worker.

        Raises TaskError if workers cannot load the task, and UserError if workers repeatedly die without training a client.
        """
        shared_data = packed_data(data, self._shared_copy)
        memory, updates = self._memory.stack(len(jobs), len(start))
        queue = JobQueue(jobs, SharedTensor.copy_of(start), shared_data, sgd, seed, memory, updates)
        try:
            self._train_locally(queue, start, data)
            while None in queue.results:
                while len(self.workers) < min(self.count, len(jobs)):
                    self.workers.append(Worker(*self._setup))
                self._assign_jobs(queue)
                self._receive(queue)
        except BaseException:
            self.close()
            raise
        results = [result for result in queue.results if result is not None]
        trained = [i for i, result in enumerate(results) if isinstance(result, JobResult)]
        return (updates if len(trained) == len(jobs) else updates[trained]), results

    def place_data(self, data: Examples) -> Examples:
        """Return a copy of the data in shared memory, from which this process and the workers read."""
        if not isinstance(data, Data):
            return data
        return replace(
            data,
            inputs=map_tensors(data.inputs, self._move_to_shared_memory),
            targets=self._move_to_shared_memory(data.targets),
        )

    @property
    def settled(self) -> bool:
        """Whether all workers have started and loaded the task, so that later rounds will not be faster."""
        started = self.local_engine is None or self._local_s >= LOCAL_TRAINING_S
        return started and all(worker.ready for worker in self.workers)

    def close(self) -> None:
        """Stop the workers. The next call of `train` starts new workers."""
        _kill_all(self.workers, os.getpid())

    def _move_to_shared_memory(self, tensor: Tensor) -> Tensor:
        """Return a copy of a data tensor in shared memory, and register it for `_shared_copy`."""
        shared = SharedTensor.copy_of(tensor)
        self._data[id(shared.tensor)] = shared.tensor, shared
        return shared.tensor

    def _shared_copy(self, tensor: Tensor) -> SharedTensor:
        if id(tensor) not in self._data:
            self._data[id(tensor)] = tensor, SharedTensor.copy_of(tensor)
        return self._data[id(tensor)][1]

    def _assign_jobs(self, queue: JobQueue) -> None:
        for worker in [w for w in self.workers if w.ready and w.job < 0]:
            if queue.waiting:
                i = queue.waiting.popleft()
                job = packed_job(queue.jobs[i], pack_trace=SharedTensor.copy_of)
                queue.traces[i] = job.traces
                try:
                    worker.connection.send(
                        (queue.start, queue.data, queue.memory, i, job, queue.sgd, queue.seed)
                    )
                    worker.job = i
                except OSError:  # the worker died while it was idle
                    queue.waiting.appendleft(i)
                    self._replace_dead(worker, queue)

    def _train_locally(self, queue: JobQueue, start: Tensor, data: Examples) -> None:
        """Train clients in this process until it has trained for LOCAL_TRAINING_S seconds in total."""
        if self.local_engine is None:
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # with one thread, as in a worker, updates are bit-identical
        try:
            while self._local_s < LOCAL_TRAINING_S and queue.waiting:
                began, i = time.perf_counter(), queue.waiting.popleft()
                job, update = queue.jobs[i], queue.updates[i]
                queue.results[i] = self.local_engine.try_job(
                    start, data, job, queue.sgd, queue.seed, update
                )
                self._local_s += time.perf_counter() - began
        finally:
            torch.set_num_threads(threads)

    def _receive(self, queue: JobQueue) -> None:
        ready = wait([worker.connection for worker in self.workers])
        for worker in [worker for worker in self.workers if worker.connection in ready]:
            try:
                answer = worker.connection.recv()
            except (EOFError, OSError):
                self._replace_dead(worker, queue)
                continue
            if worker.ready:
                self._store_result(worker, answer, queue)
            elif answer:
                raise TaskError(
                    f"a worker process cannot load --task {self.config.task}, although the main process has loaded it: {answer}; "
                    "give --engine serial"
                )
            else:
                worker.ready = True

    def _store_result(self, worker: Worker, answer: JobResult | str, queue: JobQueue) -> None:
        i, worker.job = worker.job, -1
        traces = queue.traces.pop(i)
        if isinstance(answer, str):
            queue.results[i] = FedcompError(answer)
            return
        queue.jobs[i].traces.copy_from(traces.map(lambda shared: shared.tensor))
        self._deaths_in_a_row = 0
        queue.results[i] = unpacked_result(answer)

    def _replace_dead(self, worker: Worker, queue: JobQueue) -> None:
        """Remove a dead worker. If it is the first that died during its job, queue the job again. If it is the second, let the job fail.

        Raises UserError if too many workers have died in a row.
        """
        end_of_process, i = worker.stop(), worker.job
        self.workers.remove(worker)
        self._deaths_in_a_row += 1
        limit = MAX_DEATHS_PER_WORKER * max(3, self.count) if worker.ready else MAX_FAILED_STARTS
        if self._deaths_in_a_row >= limit:
            raise UserError(
                f"{self._deaths_in_a_row} worker processes have died one after the other; the last one {end_of_process}; give --engine "
                "serial to see the cause"
            )
        if i < 0:
            return
        queue.deaths[i] += 1
        likely_cause = "the task's own code may be the cause"
        if "SIGKILL" in end_of_process:
            likely_cause = "the machine may have run out of memory"
        if queue.deaths[i] == 1:
            queue.waiting.appendleft(i)
            client = queue.jobs[i].client
            self.warn(
                f"a worker process {end_of_process} while it trained client {client}; this client is trained again; {likely_cause}"
            )
        else:
            queue.results[i] = FedcompError(
                f"two worker processes ended while they trained this client; the second {end_of_process}; {likely_cause}"
            )


def _kill_all(workers: list[Worker], owner: int) -> None:
    # A fork of the process that started the workers must not kill them.
    if os.getpid() == owner:
        while workers:
            workers.pop().kill()
