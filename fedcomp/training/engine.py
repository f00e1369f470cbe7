"""The interface of everything that trains clients: a list of jobs in, a stack of updates out."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..layout import Layout
from ..tasks.base import Task
from ..tasks.data import Examples
from ..tasks.user_errors import client_error
from .local_sgd import NO_TRACES, LocalSGD, SerialEngine, Traces
from .own_loop import OwnLoopEngine


class Job(NamedTuple):
    """Local SGD of one client in a round."""

    round: int
    who: int  # logical id of the client, or number of the part of the data; keys what is drawn
    batches: Sequence[np.ndarray]  # positions in the data, one array a step
    buffers: dict[str, Tensor] | None = None  # those of the client after its last round
    traces: Traces = NO_TRACES  # float32 [n], changed in place
    rows: np.ndarray | None = None  # positions of all examples of the client, for a train_fn
    state: dict[str, Any] | None = None  # of the optimizer or the user's loop after the last round


class Done(NamedTuple):
    """What training gave besides the update."""

    loss: float  # mean over the steps of the loss before the step
    buffers: dict[str, Tensor] | None = None  # buffers that training changed; None without any
    state: dict[str, Any] | None = (
        None  # of the optimizer or the user's loop, if the client keeps it
    )
    metrics: Mapping[str, float] = {}  # further numbers of the user's loop
    examples: int | None = None  # that the user's loop reports


@dataclass(frozen=True)
class Share:
    """The jobs that one device trained, with their updates and traces on that device."""

    jobs: Sequence[Job]
    updates: Tensor  # float32 [k, n], of the jobs that did not fail
    results: list[Done | Exception]  # of all jobs


class Engine(ABC):
    """Trains clients on its device. Beyond rounding, an update does not depend on which clients are trained together."""

    device: torch.device

    @abstractmethod
    def train(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[Done | Exception]]:
        """Train every job from `start` (float32 [n]) on `data`, both on the engine's device.

        Return the updates of the jobs that did not fail, float32 [k, n], in their order, and for each job its result or the exception
        that ended it. The caller may write into the updates. Raises ConfigError where no client can be
        trained in this way.
        """

    def train_apart(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> list[Share]:
        """`train`, with updates left on the devices that computed them: consecutive jobs for each device."""
        return [Share(jobs, *self.train(start, data, jobs, sgd, seed=seed))]

    def resident(self, data: Examples) -> Examples:
        """Return the data where this engine reads it."""
        return data.to(self.device)

    def close(self) -> None:
        """End what the engine started."""


class OneByOne(Engine):
    """One client after the other, in this process."""

    def __init__(self, engine: SerialEngine | OwnLoopEngine):
        self.engine, self.device = engine, engine.device

    def train(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[Done | Exception]]:
        updates = torch.empty(len(jobs), len(start), device=self.device, dtype=torch.float32)
        results: list[Done | Exception] = []
        done = 0
        for job in jobs:
            results.append(trained(self.engine, start, data, job, sgd, seed, updates[done]))
            done += not isinstance(results[-1], Exception)
        return updates[:done], results


def trained(
    engine: SerialEngine | OwnLoopEngine,
    start: Tensor,
    data: Examples,
    job: Job,
    sgd: LocalSGD,
    seed: int,
    into: Tensor,
) -> Done | Exception:
    """Train one job in this process and write its update `into` [n]. A process that the model forks does not continue as this one."""
    process = os.getpid()
    try:
        result = engine.train(
            start,
            data,
            job.batches,
            sgd,
            seed=seed,
            round=job.round,
            who=job.who,
            buffers=job.buffers,
            traces=job.traces,
            into=into,
            rows=job.rows,
            state=job.state,
        )
        return Done(result.loss, result.buffers, result.state, result.metrics, result.examples)
    except (Exception, SystemExit) as error:
        if os.getpid() != process:
            raise
        return client_error(error)


def one_at_a_time(
    task: Task, model: nn.Module, layout: Layout, device: torch.device | str
) -> SerialEngine | OwnLoopEngine:
    """Return what trains one client after the other: the task's `train_fn` or an optimizer."""
    made = OwnLoopEngine if task.train_fn is not None else SerialEngine
    return made(task, model, layout, device)
