"""Several devices of one machine: each trains consecutive clients of a cohort and compresses their updates, in parallel.

Except for rounding, a client's update does not depend on the number of devices. The host adds the frames in the order of the clients.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..tasks.data import Data
from ..training.engine import DeviceResults, Engine, Job, JobResult
from ..training.local_sgd import LocalSGD
from .jobs import copy_traces, map_traces


class MultiDevice(Engine):
    """An engine for each device, each driven by its own thread. Weights and data are given on the first device.

    `warnings`: filled by the engines in their threads. `warn` is called with them after every training, in the caller's thread.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        warnings: list[str],
        warn: Callable[[str], None] = lambda sentence: None,
    ):
        self.engines, self.device = engines, engines[0].device
        self.warnings, self.warn = warnings, warn
        self._threads = ThreadPoolExecutor(len(engines), "device")
        # By identity of a tensor and position of an engine: the tensor, and its copy on that device.
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def train(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        """Train on all devices and gather the updates on the first."""
        shares = self.train_apart(start, data, jobs, sgd, seed=seed)
        for job, there in zip(jobs, (job for share in shares for job in share.jobs), strict=True):
            copy_traces(there.traces, job.traces)
        updates = [
            start.new_empty(0, len(start)),
            *(share.updates.to(self.device) for share in shares),
        ]
        return torch.cat(updates), [result for share in shares for result in share.results]

    def train_apart(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> list[DeviceResults]:
        edges = [i * len(jobs) // len(self.engines) for i in range(len(self.engines) + 1)]
        runs = [
            (i, jobs[a:b]) for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False)) if a < b
        ]
        waiting = [
            self._threads.submit(self._share, i, start, self._there(i, data), run, sgd, seed)
            for i, run in runs
        ]
        wait(waiting)
        while self.warnings:
            self.warn(self.warnings.pop(0))
        return [future.result() for future in waiting]

    def _share(
        self, i: int, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, seed: int
    ) -> DeviceResults:
        engine = self.engines[i]

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(engine.device)

        with at(engine.device):
            mine = [job._replace(traces=map_traces(move, job.traces)) for job in jobs]
            updates, results = engine.train(start.to(engine.device), data, mine, sgd, seed=seed)
            return DeviceResults(mine, updates, results)

    def _there(self, i: int, data: Data) -> Data:
        """Return the data on an engine's device, copied once."""
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


def at(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one for a block."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
