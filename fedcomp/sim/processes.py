"""`--engine processes`: a worker process for each core, on one thread each.

A convolution gains little from a second thread, but two clients on two cores take the time of one. Each worker is an interpreter of its own
that trains like the serial engine on one thread: the update of a client is the same, bit for bit. Weights, tensors of data, updates and
traces lie in shared memory; the rest of a job goes through a pipe. Workers read datasets that are not in memory themselves.

A worker that dies is replaced, and its client is trained once more. If that worker dies too, the client fails.
"""

import os
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor, nn

from ..config import RunConfig
from ..errors import ConfigError, FedcompError, TaskError, UserError
from ..layout import Layout
from ..tasks.base import Task
from ..tasks.data import Data, Examples, mapped
from ..training.engine import Engine, Job, JobResult, client_engine, try_job
from ..training.local_sgd import LocalSGD, Traces
from .jobs import copy_traces, map_traces, packed, packed_data, unpacked
from .shared_memory import SharedMemory, SharedTensor
from .worker import with_absolute_paths

ALONE_S = 0.5  # of training in this process before workers are started
FAILED_STARTS = 3  # workers in a row that end before they are ready; then the run ends
DEATHS = 2  # of each worker, in a row, without a trained client; then the run ends
PROGRAM = (
    "import sys; channel, parent, *path = sys.argv[1:]; sys.path[:], sys.argv[1:] = path, []; "
    "from fedcomp.sim.worker import main; main(int(channel), int(parent))"
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # saves a tenth of a step where the system grants them
Result = JobResult | Exception


def available() -> bool:
    """Return whether this system has what worker processes need: anonymous shared memory."""
    return hasattr(os, "memfd_create")


class Worker:
    """A worker process and the connection to it.

    It is a new interpreter, since a fork of a process with threads of OpenMP or numba may deadlock.
    """

    def __init__(self, *hello: Any):
        self.ready, self.job = False, -1  # position of the job that it trains
        self.connection, other = Pipe()
        tunables = ":".join(filter(None, [os.environ.get(TUNABLES), HUGE_PAGES]))
        path = [place for place in sys.path if isinstance(place, str)]
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(other.fileno()), str(os.getpid()), *path],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[other.fileno()],
                env=os.environ | ONE_THREAD | {TUNABLES: tunables},
                process_group=0,  # Ctrl-C is for the parent
            )
            self.send(*hello)

    def send(self, *message: Any) -> None:
        """Send a message. Raises OSError if the process has ended."""
        self.connection.send(message)

    def receive(self) -> Any:
        """Return the next answer; None if the process has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def end(self) -> str:
        """Kill the process if it still runs. Return how it ended."""
        self.connection.close()
        try:
            status = self.process.wait(0.2)
        except subprocess.TimeoutExpired:
            self.kill()
            return "was ended"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


@dataclass
class Cohort:
    """Jobs that are being trained."""

    jobs: Sequence[Job]
    start: SharedTensor
    data: Data | None  # its tensors are SharedTensors; None where workers read the data themselves
    sgd: LocalSGD
    seed: int
    updates: SharedTensor
    results: list[Result | None]
    waiting: deque[int]  # positions of jobs that nobody trains yet
    traces: dict[int, Traces] = field(default_factory=dict)  # shared with workers, by position
    deaths: Counter[int] = field(default_factory=Counter)  # of workers, by position


class WorkerEngine(Engine):
    """Trains clients in `count` processes. They load the task that `config` names anew.

    With `helps`, this process trains on `model` until it has done so for ALONE_S, so that short runs start no workers. `warn` is called
    when a worker dies.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        model: nn.Module,
        count: int,
        *,
        helps: bool = False,
        warn: Callable[[str], None] = lambda sentence: None,
    ):
        if not available():
            raise ConfigError(
                "--engine processes needs anonymous shared memory, which Linux has; give --engine serial"
            )
        self.config, self.count, self.warn = config, count, warn
        self.helper = client_engine(task, model, Layout.of(model), "cpu") if helps else None
        self.workers: list[Worker] = []
        self._hello = with_absolute_paths(config), "cpu", torch.get_default_dtype()
        # Tensors of data, and these tensors in shared memory, by identity.
        self._data: dict[int, tuple[Tensor, SharedTensor]] = {}
        self._memory: SharedMemory | None = None  # of the last updates
        self._alone_s, self._deaths = 0.0, 0
        weakref.finalize(self, _kill_all, self.workers, os.getpid())

    def train(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[Result]]:
        """Train each job in an idle worker.

        Raises UserError if workers cannot load the task, or die without training anybody.
        """
        m = len(jobs)
        cohort = Cohort(
            jobs,
            SharedTensor.copy_of(start),
            packed_data(data, self._shared),
            sgd,
            seed,
            self._updates_of(m, len(start)),
            [None] * m,
            deque(range(m)),
        )
        try:
            self._help(cohort, start, data)
            while None in cohort.results:
                while len(self.workers) < min(self.count, m):
                    self.workers.append(Worker(*self._hello))
                self._deal(cohort)
                self._receive(cohort)
        except BaseException:
            self.close()
            raise
        kept = [i for i, result in enumerate(cohort.results) if isinstance(result, JobResult)]
        updates = cohort.updates.tensor
        return (updates if len(kept) == m else updates[kept]), cohort.results

    def resident(self, data: Examples) -> Examples:
        """Return the data in shared memory, where this process and the workers read it."""
        if not isinstance(data, Data):
            return data
        return replace(
            data, inputs=mapped(data.inputs, self._moved), targets=self._moved(data.targets)
        )

    @property
    def settled(self) -> bool:
        """Whether all workers are ready, so that the next rounds are trained like the last one."""
        started = self.helper is None or self._alone_s >= ALONE_S
        return started and all(worker.ready for worker in self.workers)

    def close(self) -> None:
        """End the workers. The engine can be used again."""
        _kill_all(self.workers, os.getpid())

    def _updates_of(self, m: int, n: int) -> SharedTensor:
        """Return a tensor for the updates of m clients, in the memory of the last one if nobody reads that any more."""
        memory, size = self._memory, 4 * m * n
        if memory is None or memory.size < size or not memory.is_free:
            memory = self._memory = SharedMemory(size)
        return SharedTensor((m, n), memory=memory)

    def _moved(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the data as it lies in shared memory."""
        shared = SharedTensor.copy_of(tensor)
        self._data[id(shared.tensor)] = shared.tensor, shared
        return shared.tensor

    def _shared(self, tensor: Tensor) -> SharedTensor:
        """Return a tensor of the data in shared memory."""
        if id(tensor) not in self._data:
            self._data[id(tensor)] = tensor, SharedTensor.copy_of(tensor)
        return self._data[id(tensor)][1]

    def _deal(self, cohort: Cohort) -> None:
        """Give a job to every idle worker."""
        for worker in [w for w in self.workers if w.ready and w.job < 0]:
            if cohort.waiting:
                i = cohort.waiting.popleft()
                job = packed(cohort.jobs[i], pack_trace=SharedTensor.copy_of)
                cohort.traces[i] = job.traces
                try:
                    worker.send(
                        cohort.start, cohort.data, cohort.updates, i, job, cohort.sgd, cohort.seed
                    )
                    worker.job = i
                except OSError:  # it died while it was idle
                    cohort.waiting.appendleft(i)
                    self._replace_dead(worker, cohort)

    def _help(self, cohort: Cohort, start: Tensor, data: Examples) -> None:
        """Train jobs in this process until ALONE_S has passed. On one thread, so that the updates are those of a worker."""
        while self.helper is not None and self._alone_s < ALONE_S and cohort.waiting:
            began, i = time.perf_counter(), cohort.waiting.popleft()
            job, update = cohort.jobs[i], cohort.updates.tensor[i]
            with _one_thread():
                cohort.results[i] = try_job(
                    self.helper, start, data, job, cohort.sgd, cohort.seed, update
                )
            self._alone_s += time.perf_counter() - began

    def _receive(self, cohort: Cohort) -> None:
        """Wait for answers of workers."""
        workers = {worker.connection: worker for worker in self.workers}
        for connection in wait(list(workers)):
            worker = workers[connection]
            answer = worker.receive()
            if answer is None:
                self._replace_dead(worker, cohort)
            elif worker.ready:
                self._take(worker, answer, cohort)
            elif answer:
                raise TaskError(
                    f"a worker process cannot load --task {self.config.task} as this one did: {answer}; give --engine serial"
                )
            else:
                worker.ready = True

    def _take(self, worker: Worker, answer: JobResult | str, cohort: Cohort) -> None:
        i, worker.job = worker.job, -1
        traces = cohort.traces.pop(i)
        if isinstance(answer, str):
            cohort.results[i] = FedcompError(answer)
            return
        copy_traces(map_traces(lambda shared: shared.tensor, traces), cohort.jobs[i].traces)
        self._deaths = 0
        cohort.results[i] = unpacked(answer)

    def _replace_dead(self, worker: Worker, cohort: Cohort) -> None:
        """Remove a dead worker. Its job waits for another one, or fails if it has killed two.

        Raises UserError if too many workers have died in a row.
        """
        how, i = worker.end(), worker.job
        self.workers.remove(worker)
        self._deaths += 1
        if self._deaths >= (DEATHS * max(3, self.count) if worker.ready else FAILED_STARTS):
            raise UserError(
                f"{self._deaths} worker processes in a row have ended: the last {how}; give --engine serial to see why"
            )
        if i < 0:
            return
        cohort.deaths[i] += 1
        why = "memory may be short" if "SIGKILL" in how else "the task's own code may be why"
        if cohort.deaths[i] == 1:
            cohort.waiting.appendleft(i)
            client = cohort.jobs[i].client
            self.warn(
                f"a worker process {how} while it trained client {client}, which is trained once more; {why}"
            )
        else:
            cohort.results[i] = FedcompError(
                f"the worker process that trained this client {how}, twice; {why}"
            )


def _kill_all(workers: list[Worker], owner: int) -> None:
    if os.getpid() == owner:  # not in a fork of it
        while workers:
            workers.pop().kill()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
