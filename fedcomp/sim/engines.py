"""Engines of a simulation that train clients together, and how to tell whether two engines train alike."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..tasks.base import Data, Task, fixed_draws
from ..tasks.user_errors import client_error
from ..training.engine import Done, Engine, Job
from ..training.local_sgd import LocalSGD, SerialEngine, Traces, plan_changes
from .batched import NotMapped


def likeness(engine: SerialEngine, start: Tensor, data: Data) -> str:
    """What the engine's model is and makes of the first examples, to the bit on one thread: a digest of buffers, update and loss."""
    told = hashlib.blake2b(engine.layout.fingerprint.encode(), digest_size=16)
    for name, buffer in sorted(engine.initial_buffers.items()):
        told.update(name.encode() + _bytes(buffer))
    batch = np.arange(min(2, len(data)))
    try:
        with fixed_draws(0):
            made = engine.train(start, data, [batch], LocalSGD(steps=1, batch_size=len(batch)))
        told.update(_bytes(made.update) + repr(made.loss).encode())
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # the clients' to fail with
        told.update(type(error).__name__.encode())
    return told.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Batched(Protocol):
    """An engine that trains clients together, such as batched.BatchedEngine."""

    task: Task
    device: torch.device

    def train(
        self,
        start: Tensor,
        data: Data,
        plans: Sequence[Sequence[np.ndarray]],
        sgd: LocalSGD,
        **also: Any,
    ) -> tuple[Tensor, Tensor]: ...


class Together(Engine):
    """Stacks of clients; where a stack fails each client by itself, so that only those fail that must.

    `instead` makes the engine that goes on where the model shows, in whatever round, that it cannot be batched.
    """

    def __init__(self, engine: Batched, instead: Callable[[NotMapped], Engine] | None = None):
        self.engine, self.device, self.instead = engine, engine.device, instead
        self.other: Engine | None = None

    def train(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[Done | Exception]]:
        if not jobs:
            return start.new_empty(0, len(start)), []
        if self.other is not None:
            return self.other.train(start, data, jobs, sgd, seed=seed)
        try:
            return self._train(start, data, jobs, sgd, seed)
        except NotMapped as error:
            if self.instead is None:
                raise
            self.other = self.instead(error)
            return self.other.train(start, data, jobs, sgd, seed=seed)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            if len(jobs) == 1:
                return start.new_empty(0, len(start)), [client_error(error)]
        alone = [self.train(start, data, [job], sgd, seed=seed) for job in jobs]
        return torch.cat([updates for updates, _ in alone]), [
            result for _, results in alone for result in results
        ]

    def _train(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, seed: int
    ) -> tuple[Tensor, list[Done | Exception]]:
        stack = Traces.stack([job.traces for job in jobs])
        also: dict[str, Any] = {"traces": stack} if stack else {}
        if sgd.augment:
            also["changes"] = [
                plan_changes(self.engine.task, sgd, job.batches, seed, job.round, job.who)
                for job in jobs
            ]
        updates, losses = self.engine.train(start, data, [job.batches for job in jobs], sgd, **also)
        for i, job in enumerate(jobs):
            job.traces.take(stack, i)
        return updates, [Done(loss) for loss in losses.tolist()]

    def close(self) -> None:
        if self.other is not None:
            self.other.close()
