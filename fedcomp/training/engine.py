"""The interface of training engines: they take a list of jobs and return a stack of updates."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layout import Layout
from ..tasks.base import Task
from ..tasks.data import Examples
from ..tasks.user_errors import client_error
from .local_sgd import ClientEngine, LocalSGD, SerialEngine
from .local_sgd import Job as Job
from .own_loop import OwnLoopEngine


class JobResult(NamedTuple):
    """The results of a job besides its update."""

    loss: float  # mean over the steps of the loss before the step
    buffers: dict[str, Tensor] | None = None  # buffers that training changed, or None
    state: dict[str, Any] | None = (
        None  # of the optimizer or the user's loop, if the client keeps it
    )
    metrics: Mapping[str, float] = {}  # further numbers of the user's loop
    examples: int | None = None  # that the user's loop reports


@dataclass(frozen=True)
class DeviceResults:
    """The jobs of one device and their results; updates and traces are on that device."""

    jobs: Sequence[Job]
    updates: Tensor  # float32 [k, n], of the jobs that succeeded
    results: list[JobResult | Exception]  # of all jobs


class Engine(ABC):
    """Trains clients on a device. Apart from rounding, an update does not depend on the other clients in the list."""

    device: torch.device

    @abstractmethod
    def train(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        """Train every job from `start` (float32 [n]) on `data`, both on the engine's device.

        Return the updates of the jobs that succeeded, float32 [k, n] in the order of the jobs, and for each job its result or its
        exception. The caller may change the updates. Raises ConfigError if the options do not suit any client.
        """

    def train_apart(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> list[DeviceResults]:
        """Train like `train`, but leave the updates on the devices that computed them. Each device gets consecutive jobs."""
        return [DeviceResults(jobs, *self.train(start, data, jobs, sgd, seed=seed))]

    def resident(self, data: Examples) -> Examples:
        """Return the data on the device that this engine reads it from."""
        return data.to(self.device)

    def close(self) -> None:
        """Stop the processes that the engine started."""


class SequentialJobs(Engine):
    """Trains one client after the other, in this process."""

    def __init__(self, engine: ClientEngine):
        self.engine, self.device = engine, engine.device

    def train(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        updates = torch.empty(len(jobs), len(start), device=self.device, dtype=torch.float32)
        results: list[JobResult | Exception] = []
        succeeded = 0
        for job in jobs:
            results.append(try_job(self.engine, start, data, job, sgd, seed, updates[succeeded]))
            succeeded += not isinstance(results[-1], Exception)
        return updates[:succeeded], results


def try_job(
    engine: ClientEngine,
    start: Tensor,
    data: Examples,
    job: Job,
    sgd: LocalSGD,
    seed: int,
    into: Tensor,
) -> JobResult | Exception:
    """Train one job and write its update into `into` [n]. Return the exception if training fails.

    A process that the user's code forks ends with its exception; it must not go on as a second copy of this one.
    """
    process = os.getpid()
    try:
        result = engine.train_job(start, data, job, sgd, seed, into)
        return JobResult(result.loss, result.buffers, result.state, result.metrics, result.examples)
    except (Exception, SystemExit) as error:
        if os.getpid() != process:
            raise
        return client_error(error)


def client_engine(
    task: Task, model: nn.Module, layout: Layout, device: torch.device | str
) -> ClientEngine:
    """Return the engine that trains one client at a time: by the task's `train_fn`, or by an optimizer."""
    engine = OwnLoopEngine if task.train_fn is not None else SerialEngine
    return engine(task, model, layout, device)
