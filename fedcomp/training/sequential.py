"""Training of the clients of a cohort one after the other, in this process."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..layout import Layout
from ..tasks.base import Task
from ..tasks.data import Examples
from ..tasks.user_errors import client_error
from .engine import ClientEngine, Engine, Job, JobResult
from .local_sgd import LocalSGD
from .own_loop import OwnLoopEngine
from .serial_engine import SerialEngine


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


def client_engine(
    task: Task, model: nn.Module, layout: Layout, device: torch.device | str
) -> ClientEngine:
    """Return the engine that trains one client at a time: by the task's `train_fn`, or by an optimizer."""
    engine = OwnLoopEngine if task.train_fn is not None else SerialEngine
    return engine(task, model, layout, device)
