"""Several devices of one machine in parallel: each trains consecutive clients of a cohort and compresses their updates.

Except for rounding, a client's update does not depend on the number of devices. The host adds the frames in the order of the clients.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..tasks.data import Data, Examples
from ..training.engine import DeviceResults, Engine, Job, JobResult
from ..training.local_sgd import LocalSGD
from .jobs import copy_traces, map_traces


class MultiDevice(Engine):
    """One engine and one thread for each device. `train` takes weights and data on the first device.

    `warnings`: a list to which the engines append in their threads. `train` passes them to `warn` in the caller's thread.
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
        # By id of a tensor and position of an engine: the tensor, and its copy on the engine's device.
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def train(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        """Train on all devices and gather the updates on the first."""
        by_device = self.train_on_devices(start, data, jobs, sgd, seed=seed)
        moved_jobs = [job for results in by_device for job in results.jobs]
        for job, moved in zip(jobs, moved_jobs, strict=True):
            copy_traces(moved.traces, job.traces)
        updates = [
            start.new_empty(0, len(start)),
            *(results.updates.to(self.device) for results in by_device),
        ]
        return torch.cat(updates), [result for results in by_device for result in results.results]

    def train_on_devices(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> list[DeviceResults]:
        assert isinstance(data, Data)  # else the run has another engine
        edges = [i * len(jobs) // len(self.engines) for i in range(len(self.engines) + 1)]
        slices = [
            (i, jobs[a:b]) for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False)) if a < b
        ]
        futures = [
            self._threads.submit(self._train_on, i, start, self._data_on(i, data), some, sgd, seed)
            for i, some in slices
        ]
        wait(futures)
        while self.warnings:
            self.warn(self.warnings.pop(0))
        return [future.result() for future in futures]

    def _train_on(
        self, i: int, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, seed: int
    ) -> DeviceResults:
        """Train jobs with engine `i`, on its device."""
        engine = self.engines[i]

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(engine.device)

        with current_device(engine.device):
            moved = [job._replace(traces=map_traces(move, job.traces)) for job in jobs]
            updates, results = engine.train(start.to(engine.device), data, moved, sgd, seed=seed)
            return DeviceResults(moved, updates, results)

    def _data_on(self, i: int, data: Data) -> Data:
        """Return the data on the device of engine `i`, copied once."""
        inputs, targets = (self._copy_of(i, tensor) for tensor in (data.single_input, data.targets))
        return replace(data, inputs=inputs, targets=targets)

    def _copy_of(self, i: int, tensor: Tensor) -> Tensor:
        key = (id(tensor), i)
        if key not in self._copies:
            self._copies[key] = tensor, tensor.to(self.engines[i].device)
        return self._copies[key][1]

    def resident(self, data: Examples) -> Examples:
        return self.engines[0].resident(data)

    def close(self) -> None:
        self._threads.shutdown()
        for engine in self.engines:
            engine.close()


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one in a `with` block."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
