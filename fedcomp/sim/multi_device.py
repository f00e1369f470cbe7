"""Several devices of one machine: each trains consecutive clients of a cohort and compresses their updates, beside the others.

Beyond rounding, a client's update does not depend on the number of devices. The host adds the frames in the order of the clients.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..tasks.base import Data
from ..training.engine import Done, Engine, Job, Share
from ..training.local_sgd import LocalSGD, Traces


class MultiDevice(Engine):
    """An engine for each device, each driven by its own thread. Weights and data are given on the first device.

    `hear` is called after every training, in the thread that asked for it.
    """

    def __init__(self, engines: Sequence[Engine], hear: Callable[[], None] = lambda: None):
        self.engines, self.device, self.hear = engines, engines[0].device, hear
        self._threads = ThreadPoolExecutor(len(engines), "device")
        self._copies: dict[
            tuple[int, int], tuple[Tensor, Tensor]
        ] = {}  # by tensor and engine: the tensor, and it on that device

    def train(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[Done | Exception]]:
        """Train on all devices and gather the updates on the first."""
        shares = self.train_apart(start, data, jobs, sgd, seed=seed)
        for job, there in zip(jobs, (job for share in shares for job in share.jobs), strict=True):
            _copy(there.traces, job.traces)
        updates = [
            start.new_empty(0, len(start)),
            *(share.updates.to(self.device) for share in shares),
        ]
        return torch.cat(updates), [result for share in shares for result in share.results]

    def train_apart(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> list[Share]:
        edges = [i * len(jobs) // len(self.engines) for i in range(len(self.engines) + 1)]
        runs = [
            (i, jobs[a:b]) for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False)) if a < b
        ]
        waiting = [
            self._threads.submit(self._share, i, start, self._there(i, data), run, sgd, seed)
            for i, run in runs
        ]
        wait(waiting)
        self.hear()
        return [future.result() for future in waiting]

    def _share(
        self, i: int, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, seed: int
    ) -> Share:
        engine = self.engines[i]
        with at(engine.device):
            mine = [job._replace(traces=_moved(job.traces, engine.device)) for job in jobs]
            updates, results = engine.train(start.to(engine.device), data, mine, sgd, seed=seed)
            return Share(mine, updates, results)

    def _there(self, i: int, data: Data) -> Data:
        """The data on an engine's device, copied once."""
        inputs, targets = (self._copy_of(i, tensor) for tensor in (data.inputs, data.targets))
        return replace(data, inputs=inputs, targets=targets)

    def _copy_of(self, i: int, tensor: Tensor) -> Tensor:
        key = (id(tensor), i)
        if key not in self._copies:
            self._copies[key] = tensor, tensor.to(self.engines[i].device)
        return self._copies[key][1]

    def resident(self, data: Data) -> Data:
        return self.engines[0].resident(data)

    def close(self) -> None:
        self._threads.shutdown()
        for engine in self.engines:
            engine.close()


class Later:
    """Sentences that are said in any thread, and heard in the one that asks for them."""

    def __init__(self, warn: Callable[[str], None]):
        self.warn, self._said = warn, []

    def say(self, sentence: str) -> None:
        self._said.append(sentence)

    def hear(self) -> None:
        while self._said:
            self.warn(self._said.pop(0))


def at(device: torch.device) -> AbstractContextManager:
    """What is launched in this block is launched on the device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _moved(traces: Traces, device: torch.device) -> Traces:
    momentum = None if traces.momentum is None else traces.momentum.to(device)
    moments = traces.moments and (traces.moments[0].to(device), traces.moments[1].to(device))
    return Traces(momentum, moments, None if traces.pull is None else traces.pull.to(device))


def _copy(given: Traces, into: Traces) -> None:
    for a, b in zip(
        (given.momentum, *(given.moments or ())),
        (into.momentum, *(into.moments or ())),
        strict=True,
    ):
        if a is not None and a is not b:
            b.copy_(a)
