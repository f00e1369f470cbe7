"""The engine of a CPU with several cores: one worker process a core, one thread each, fed from shared memory.

A convolution of one client does not gain from other clients beside it, and little from a second thread; two clients on two
cores take the time of one. Each worker is an interpreter of its own, with a clients.local_sgd.SerialEngine: the update of a client
is that engine's on one thread, to the bit, whichever worker it went to. What is large — weights, data, updates — lies in memory
that all map; orders and answers are lines of JSON.

Clients go to whoever is free. A worker that dies is replaced and its client is trained once more; if that kills another one, the
client has failed.
"""

import dataclasses
import os
import selectors
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import FedcompError, TaskError, UserError
from ..layout import Layout
from ..tasks import initial_model
from ..tasks.base import Data, Task
from ..training.engine import Done, Engine, Job, trained
from ..training.local_sgd import LocalSGD, SerialEngine
from .buffers import Buffers
from .engines import likeness
from .processes import Worker, end_all, error_of
from .shared_memory import Pool, Region, ref

ALONE_S = 0.5  # of training in this process, before it is worth while to start others
STILLBORN = 3  # workers in a row that end before they are ready: more will do the same
DEATHS = 2  # of each worker there is, in a row, with no client trained: likewise
Result = Done | Exception


@dataclasses.dataclass
class Stack:
    """Jobs that are being trained, and where their tensors are."""

    jobs: Sequence[Job]
    order: dict[str, Any]  # what is the same for all
    rows: list[dict[str, Any]]  # what is a job's own
    updates: Tensor
    traces: Tensor  # [m, 0 to 4, n]
    buffers: Tensor  # uint8 [m, bytes]
    waiting: deque[int]
    results: list[Result | None]
    deaths: Counter[int]


class WorkerEngine(Engine):
    """Trains clients in `count` processes, on one thread each.

    They load the task anew: `name` and `folder` are what tasks.load was given, `seed` what initial_model was. With `helps`, this
    process trains until it has done so for half a second and its workers are there, so that short runs need none; `model` is used for
    that. `warn` hears of workers that died.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        layout: Layout,
        name: str,
        folder: Path | None,
        seed: int,
        count: int,
        *,
        helps: bool = False,
        warn: Callable[[str], None] = lambda sentence: None,
    ):
        self.layout, self.count, self.warn = layout, count, warn
        self.hello = {
            "task": name,
            "folder": str(folder.absolute()) if folder else "",
            "seed": seed,
            "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        }
        self.cwd, self.buffers = os.getcwd(), Buffers.of(model)
        self.helper = SerialEngine(task, model, layout, "cpu") if helps else None
        self._anew = lambda: SerialEngine(task, initial_model(task, seed), layout, "cpu")
        self._like: tuple[dict[str, list], str] | None = (
            None  # what each worker tries before it trains, and what comes of it here
        )
        self.workers: list[Worker] = []
        self.pool = Pool()
        self._lent: dict[str, Region] = {}
        self._homes: dict[
            int, tuple[Region, Tensor]
        ] = {}  # of tensors of the data, which are not written to
        self._alone_s, self._stillborn, self._fallen = 0.0, 0, 0
        self._finalizer = weakref.finalize(self, end_all, self.workers, os.getpid())

    def train(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[Result]]:
        """What engines.Engine promises. Raises UserError when workers cannot load the task, or end and train nobody."""
        if not jobs:
            return torch.empty(0, self.layout.numel), []
        try:
            stack = self._stack(start, data, jobs, sgd, seed)
            while None in stack.results:
                self._staff(len(jobs))
                self._deal(stack)
                helped = self._help(stack, start, data, sgd, seed)
                self._hear(stack, start, data, wait=not helped)
        except BaseException:
            self.close()
            raise
        kept = [i for i, result in enumerate(stack.results) if not isinstance(result, Exception)]
        return (stack.updates if len(kept) == len(jobs) else stack.updates[kept]), stack.results

    def resident(self, data: Data) -> Data:
        """The data in shared memory, where this process and the workers read it."""
        return dataclasses.replace(
            data, inputs=self._placed(data.inputs), targets=self._placed(data.targets)
        )

    @property
    def settled(self) -> bool:
        """Whether the workers are there, so that the rounds to come are trained as the last one was."""
        return (self.helper is None or self._alone_s >= ALONE_S) and all(
            worker.ready for worker in self.workers
        )

    def close(self) -> None:
        """End the workers. The engine can be used again."""
        end_all(self.workers, os.getpid())

    # What is shared.

    def _stack(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, seed: int
    ) -> Stack:
        n, size, first = self.layout.numel, self.buffers.places[-1], jobs[0].traces
        width = len(_traces(jobs[0]))
        updates = self._lend("updates", len(jobs), n)
        traces = self._lend("traces", len(jobs), width, n)
        buffers = self._lend("buffers", len(jobs), size, dtype=torch.uint8)
        self._lend("start", n).copy_(start)
        lengths = [[len(batch) for batch in job.batches] for job in jobs]
        plans = [
            np.concatenate([*job.batches, sizes]) for job, sizes in zip(jobs, lengths, strict=True)
        ]
        self._lend("plan", sum(map(len, plans)), dtype=torch.int64).copy_(
            torch.from_numpy(np.concatenate(plans))
        )
        order = {
            "start": self._ref("start", n),
            "inputs": self._home(data.inputs),
            "targets": self._home(data.targets),
            "sgd": dataclasses.asdict(sgd),
            "seed": seed,
            "momentum": first.momentum is not None,
            "pull": first.pull is not None,
        }
        rows, at = [], 0
        for i, (job, plan, sizes) in enumerate(zip(jobs, plans, lengths, strict=True)):
            rows.append(
                {
                    "round": job.round,
                    "who": job.who,
                    "examples": len(plan) - len(sizes),
                    "plan": self._ref("plan", len(plan), at, torch.int64),
                    "update": self._ref("updates", n, i * n),
                    "traces": [self._ref("traces", n, (i * width + k) * n) for k in range(width)],
                    "buffers": self._ref("buffers", size, i * size, torch.uint8) if size else None,
                }
            )
            at += len(plan)
        return Stack(
            jobs,
            order,
            rows,
            updates,
            traces,
            buffers,
            deque(range(len(jobs))),
            [None] * len(jobs),
            Counter(),
        )

    def _lend(self, what: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self._lent[what], tensor = self.pool.lend(self._lent.get(what), shape, dtype)
        return tensor

    def _ref(self, what: str, numel: int, at: int = 0, dtype: torch.dtype = torch.float32) -> list:
        return ref(self._lent[what], [numel], dtype, at * dtype.itemsize)

    def _placed(self, tensor: Tensor) -> Tensor:
        region = self.pool.new(tensor.numel() * tensor.element_size())
        shared = region.tensor(tensor.shape, tensor.dtype).copy_(tensor)
        self._homes[id(shared)] = region, shared
        return shared

    def _home(self, tensor: Tensor) -> list:
        """Where workers find a tensor of the data; brought there when it is new."""
        if id(tensor) not in self._homes:
            self._homes[id(tensor)] = self._homes[id(self._placed(tensor))][0], tensor
        return ref(self._homes[id(tensor)][0], tensor.shape, tensor.dtype)

    # Who works.

    def _staff(self, jobs: int) -> None:
        """Start the workers that are missing, if it is worth while."""
        if self.helper is None or self._alone_s >= ALONE_S:
            while len(self.workers) < min(self.count, jobs):
                self.workers.append(Worker(self.hello, self.cwd))

    def _deal(self, stack: Stack) -> None:
        """A job for everybody who is free."""
        for worker in [w for w in self.workers if w.ready and w.job < 0]:
            if stack.waiting:
                i = stack.waiting.popleft()
                try:
                    self._give(worker, stack, i)
                    worker.job = i
                except OSError:  # it died while it had nothing to do
                    stack.waiting.appendleft(i)
                    self._bury(worker, stack)

    def _give(self, worker: Worker, stack: Stack, i: int) -> None:
        """Lay out what a job changes in place, and order it."""
        job = stack.jobs[i]
        for row, trace in zip(stack.traces[i], _traces(job), strict=True):
            row.copy_(trace)
        given = self.buffers.write(stack.buffers[i], job.buffers) if job.buffers else []
        for name in worker.known - self.pool.regions.keys():
            worker.send({"drop": name})
        self._share(worker, stack.order)
        worker.send(stack.order | stack.rows[i] | {"given": given})

    def _share(self, worker: Worker, order: dict[str, Any]) -> None:
        """Have a worker map what it does not yet, for an order that names data, and forget what is gone."""
        needed = {region.name for region in self._lent.values()} | {
            order["inputs"][0],
            order["targets"][0],
        }
        for name in sorted(needed - worker.known):
            worker.send({"map": [name, self.pool.regions[name].size]}, self.pool.regions[name].file)
        worker.known = worker.known & self.pool.regions.keys() | needed

    def _compare(self, worker: Worker, start: Tensor, data: Data) -> None:
        """Have a worker try what was tried here, on what this engine trained first."""
        if self._like is None:
            self._lend("like", len(start)).copy_(start)
            order = {
                "start": self._ref("like", len(start)),
                "inputs": self._home(data.inputs),
                "targets": self._home(data.targets),
            }
            with _one_thread():
                self._like = order, likeness(self._anew(), start, data)
        self._share(worker, self._like[0])
        worker.send({"like": self._like[0]})

    def _hear(self, stack: Stack, start: Tensor, data: Data, wait: bool) -> None:
        """Answers that are there; with `wait`, at least one."""
        if not self.workers:
            return
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.link, selectors.EVENT_READ, worker)
            for key, _ in selector.select(None if wait and None in stack.results else 0):
                answer = key.data.answer()
                if answer is None:
                    self._bury(key.data, stack)
                elif "ready" in answer:
                    try:
                        self._compare(key.data, start, data)
                    except OSError:
                        self._bury(key.data, stack)
                else:
                    self._take(key.data, answer, stack)

    def _take(self, worker: Worker, answer: dict[str, Any], stack: Stack) -> None:
        if "broken" in answer:
            raise TaskError(
                f"a worker process cannot load --task {self.hello['task']} as this one did: {answer['broken'][2]}; "
                "give --engine serial"
            )
        if "like" in answer:
            worker.ready, self._stillborn = True, 0
            if self._like is None or answer["like"] != self._like[1]:
                raise TaskError(
                    f"--task {self.hello['task']} gives a worker process another model than it gave this one; "
                    "let it always give the same, or give --engine serial"
                )
            return
        i, worker.job = worker.job, -1
        if "failed" in answer:
            stack.results[i] = error_of(*answer["failed"])
            return
        for row, trace in zip(stack.traces[i], _traces(stack.jobs[i]), strict=True):
            trace.copy_(row)
        self._fallen = 0
        stack.results[i] = Done(
            answer["loss"], self.buffers.read(stack.buffers[i], answer["changed"]) or None
        )

    def _bury(self, worker: Worker, stack: Stack) -> None:
        """A worker has died: its job is done once more, by another."""
        how, i = worker.end(), worker.job
        self.workers.remove(worker)
        if not worker.ready:
            self._stillborn += 1
            if self._stillborn >= STILLBORN:
                raise UserError(
                    f"worker processes end before they can work: the last {how}; give --engine serial"
                )
        if i < 0:
            return
        self._fallen += 1
        if self._fallen >= DEATHS * max(STILLBORN, min(self.count, len(stack.jobs))):
            raise UserError(
                f"{self._fallen} worker processes in a row have ended while they trained a client: the last {how}; "
                "give --engine serial to see why"
            )
        stack.deaths[i] += 1
        who = stack.jobs[i].who
        why = "memory may be short" if "SIGKILL" in how else "the task's own code may be why"
        if stack.deaths[i] == 1:
            stack.waiting.appendleft(i)
            self.warn(
                f"a worker process {how} while it trained client {who}, who is trained once more; {why}"
            )
        else:
            stack.results[i] = FedcompError(
                f"the worker process that trained this client {how}, twice; {why}"
            )

    def _help(self, stack: Stack, start: Tensor, data: Data, sgd: LocalSGD, seed: int) -> bool:
        """Train a client here while no worker is ready, if this process helps. On one thread, so that its update is what a worker's is."""
        if self.helper is None or not stack.waiting or any(worker.ready for worker in self.workers):
            return False
        if stack.deaths[stack.waiting[0]]:  # it would end this process too
            return False
        began, i = time.perf_counter(), stack.waiting.popleft()
        with _one_thread():
            stack.results[i] = trained(
                self.helper, start, data, stack.jobs[i], sgd, seed, stack.updates[i]
            )
        self._alone_s += time.perf_counter() - began
        return True


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _traces(job: Job) -> list[Tensor]:
    t = job.traces
    return [trace for trace in (t.momentum, *(t.moments or ()), t.pull) if trace is not None]
