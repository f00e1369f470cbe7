"""An engine that trains on several GPUs (devices) of one machine in parallel. Each device trains some of the clients of a round.

Except for rounding, a client's update does not depend on the number of devices.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..tasks.data import Data, Examples
from ..training.engine import Engine, Job, JobResult
from ..training.local_sgd import LocalSGD


class MultiDevice(Engine):
    """Engine with one inner engine and one thread for each device. The inputs and the results of `train` are on the first device.

    The inner engines, which run in other threads, append their warnings to `warnings`. `train` passes these warnings to `warn`.
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
        # Maps (id of a tensor, index of an engine) to the tensor and its copy on the engine's device.
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def train(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        assert isinstance(data, Data)  # runs whose data is not in memory use another engine
        n = len(self.engines)
        parts = [jobs[i * len(jobs) // n : (i + 1) * len(jobs) // n] for i in range(n)]
        futures = [
            self._threads.submit(self._train_on, i, start, self._data_on(i, data), part, sgd, seed)
            for i, part in enumerate(parts)
            if part
        ]
        wait(futures)
        while self.warnings:
            self.warn(self.warnings.pop(0))
        trained = [future.result() for future in futures]
        updates = torch.cat([start.new_empty(0, len(start)), *(rows for rows, _ in trained)])
        return updates, [result for _, results in trained for result in results]

    def _train_on(
        self, i: int, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        """Train the clients of `jobs` with the inner engine `i` on its device, and return the updates on the first device."""
        engine = self.engines[i]
        device = engine.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            # Training changes the vectors in `traces`, such as the momentum, in place. Copy them to the device, and back after training.
            moved = [job._replace(traces=job.traces.map(lambda t: t.to(device))) for job in jobs]
            updates, results = engine.train(start.to(device), data, moved, sgd, seed=seed)
            for job, moved_job in zip(jobs, moved, strict=True):
                job.traces.copy_from(moved_job.traces)
            return updates.to(self.device), results

    def _data_on(self, i: int, data: Data) -> Data:
        inputs, targets = (self._copy_of(i, tensor) for tensor in (data.single_input, data.targets))
        return replace(data, inputs=inputs, targets=targets)

    def _copy_of(self, i: int, tensor: Tensor) -> Tensor:
        key = (id(tensor), i)
        if key not in self._copies:
            self._copies[key] = tensor, tensor.to(self.engines[i].device)
        return self._copies[key][1]

    def place_data(self, data: Examples) -> Examples:
        return self.engines[0].place_data(data)

    def close(self) -> None:
        self._threads.shutdown()
        for engine in self.engines:
            engine.close()
