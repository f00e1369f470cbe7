"""What trains the clients of a simulation, as the rest of it sees it: a stack of jobs in, a stack of updates out."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..tasks.base import Data, Task, fixed_draws
from ..tasks.user_errors import client_error
from ..training.local_sgd import NO_TRACES, LocalSGD, SerialEngine, Traces, plan_changes
from .batched import NotMapped


class Job(NamedTuple):
    """Local SGD of one client in a round."""

    round: int
    who: int  # its logical id, or the number of the part of the data: what is drawn is keyed by it
    batches: Sequence[np.ndarray]  # of positions in the data, one a step
    buffers: dict[str, Tensor] | None = None  # what its last round returned
    traces: Traces = NO_TRACES  # float32 [n], changed in place


class Done(NamedTuple):
    loss: float  # mean over the steps of the loss before the step
    buffers: dict[str, Tensor] | None = (
        None  # running statistics that training changed; None when there are none
    )


class Engine(Protocol):
    """Trains clients on its device. The updates do not depend on who is trained with whom, beyond rounding."""

    device: torch.device

    def train(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[Done | Exception]]:
        """Local SGD from `start` (float32 [n]) for every job on `data`, both on the engine's device.

        Returns for each job what came of it, or why it failed, and the updates of those who did not fail, float32 [k, n], in
        their order; the caller may write into them. Raises ConfigError where no client can be trained in this way.
        """

    def resident(self, data: Data) -> Data:
        """The data where this engine reads it."""

    def close(self) -> None:
        """End what the engine started."""


class OneByOne:
    """One client after the other, in this process."""

    def __init__(self, engine: SerialEngine):
        self.engine, self.device = engine, engine.device

    def train(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[Done | Exception]]:
        updates, results, done = (
            torch.empty(len(jobs), len(start), device=self.device, dtype=torch.float32),
            [],
            0,
        )
        for job in jobs:
            results.append(trained(self.engine, start, data, job, sgd, seed, updates[done]))
            done += not isinstance(results[-1], Exception)
        return updates[:done], results

    def resident(self, data: Data) -> Data:
        return moved(data, self.device)

    def close(self) -> None: ...


def trained(
    engine: SerialEngine,
    start: Tensor,
    data: Data,
    job: Job,
    sgd: LocalSGD,
    seed: int,
    into: Tensor,
) -> Done | Exception:
    """One job in this process; its update goes `into` [n]. A child that the model forks does not go on as this process."""
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
        )
        return Done(result.loss, result.buffers)
    except (Exception, SystemExit) as error:
        if os.getpid() != process:
            raise
        return client_error(error)


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


class Together:
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

    def resident(self, data: Data) -> Data:
        return moved(data, self.device)

    def close(self) -> None:
        if self.other is not None:
            self.other.close()


def moved(data: Data, device: torch.device) -> Data:
    return replace(data, inputs=data.inputs.to(device), targets=data.targets.to(device))
