"""Training engines: a `ClientEngine` trains one client, an `Engine` the clients of a cohort."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..layout import Layout
from ..tasks.base import Task
from ..tasks.data import Examples
from ..tasks.user_errors import client_error
from .local_sgd import NO_TRACES, LocalSGD, Traces


class Job(NamedTuple):
    """The local training of one client in a round."""

    round: int
    client: int  # logical id, or the number of a data partition; random draws depend on it
    batches: Sequence[np.ndarray]  # positions in the data, one array for each step
    buffers: dict[str, Tensor] | None = None  # those of the client after its last round
    traces: Traces = NO_TRACES  # float32 [n], changed in place
    rows: np.ndarray | None = None  # positions of all examples of the client, for a train_fn
    state: dict[str, Any] | None = None  # of the optimizer or the train_fn after the last round


class JobResult(NamedTuple):
    """The results of a job besides its update."""

    loss: float  # mean over the steps of the loss before the step
    buffers: dict[str, Tensor] | None = None  # copies of the buffers that training changed, or None
    state: dict[str, Any] | None = None  # of the optimizer or the train_fn, if the client keeps it
    metrics: Mapping[str, float] = {}  # further numbers that the train_fn returned
    examples: int | None = None  # number that the train_fn returned; None: all of the client


class LocalUpdate(NamedTuple):
    """The update of one client, and the other results of its training."""

    update: Tensor  # float32 [n]: the weights after the last step minus those before the first
    result: JobResult


class ClientEngine(ABC):
    """Trains one client at a time, in one model that stays in memory. Moves `model` to `device`."""

    def __init__(self, task: Task, model: nn.Module, layout: Layout, device: torch.device | str):
        self.task, self.layout, self.device = task, layout, torch.device(device)
        self.model = model.to(self.device)
        self.initial_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    @abstractmethod
    def train_job(
        self,
        start: Tensor,
        data: Examples,
        job: Job,
        sgd: LocalSGD,
        seed: int,
        out: Tensor | None = None,
    ) -> LocalUpdate:
        """Train a client from `start` (float32 [n]) on `data`, both on the engine's device.

        The update is written into `out` (float32 [n]) if it is given. Buffers that the job does not have are those of the initial model.
        Random draws of the model depend on the seed, the round and the client only; torch's generators are left unchanged.
        """

    def train(
        self,
        start: Tensor,
        data: Examples,
        batches: Sequence[np.ndarray],
        sgd: LocalSGD,
        *,
        seed: int = 0,
        round: int = 0,
        client: int = 0,
        **fields: Any,
    ) -> LocalUpdate:
        """Call `train_job` with a job of these batches. `fields` are further fields of `Job`."""
        return self.train_job(start, data, Job(round, client, batches, **fields), sgd, seed)

    def load_buffers(self, buffers: dict[str, Tensor] | None) -> None:
        """Load a client's buffers into the model. Buffers that are not given are those of the initial model."""
        for name, buffer in self.model.named_buffers():
            buffer.copy_((buffers or {}).get(name, self.initial_buffers[name]))

    def changed_buffers(self) -> dict[str, Tensor] | None:
        """Return copies of the buffers that differ from those of the initial model; None if there are none."""
        changed = {
            name: buffer.clone()
            for name, buffer in self.model.named_buffers()
            if not torch.equal(buffer, self.initial_buffers[name])
        }
        return changed or None


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

    def train_on_devices(
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
    """Trains one job after the other with a client engine."""

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
    out: Tensor,
) -> JobResult | Exception:
    """Train one job and write its update into `out` [n]. Return the exception if training fails.

    A process that the user's code forks ends with its exception; it must not continue as a second copy of this one.
    """
    process = os.getpid()
    try:
        return engine.train_job(start, data, job, sgd, seed, out).result
    except (Exception, SystemExit) as error:
        if os.getpid() != process:
            raise
        return client_error(error)


@contextmanager
def seeded_torch(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators of the CPU and of `device` within a `with` block. Faster than torch.random.fork_rng."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(
            torch.cuda.default_generators[
                torch.cuda.current_device() if device.index is None else device.index
            ]
        )
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
