"""Local training of the clients of a session, which returns a stack of their updates [k, n]."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, DataError, ProtocolError
from ..messages import Assignment
from ..strategies.base import ClientAlgorithm, DataPartition
from ..tasks.data import Examples
from ..training.engine import Engine, Job
from ..training.local_sgd import NO_TRACES, LocalSGD, Traces, plan_all_batches, plan_batches
from .state import ClientState

Shards = Sequence[np.ndarray] | Mapping[int, np.ndarray]  # client → positions of its examples
PartitionResult = tuple[Any, float]  # summary of a partition's update, and mean loss


class ClientResult(NamedTuple):
    """The result of one client's training, without its update."""

    assignment: Assignment
    loss: float
    buffers: dict[str, Tensor] | None = None
    traces: Traces = NO_TRACES
    lr_sum: float = 0.0  # sum of the learning rates of the steps
    # State of the optimizer or of the user's train_fn, if the client keeps it between rounds.
    state: dict[str, Any] | None = None
    metrics: Mapping[str, float] = {}  # further metrics from the user's train_fn
    examples: int | None = None  # number of examples that the user's train_fn returned


Stack = tuple[list[ClientResult], Tensor]  # k clients that did not fail, and their updates [k, n]


class Trainer:
    """The training of the clients of a session. `shards[client]` are the rows of the client's examples in `data`."""

    def __init__(
        self,
        engine: Engine,
        data: Examples,
        shards: Shards,
        sgd: LocalSGD,
        algorithm: ClientAlgorithm,
        seed: int,
        *,
        all_shards: Shards | None = None,
        at_once: int = 1,
    ):
        """`all_shards`: the shards of all clients of the run, for algorithms that train on partitions; by default `shards`.

        `at_once`: number of clients whose updates are in memory at the same time.
        """
        self.engine, self.data, self.shards, self.sgd = engine, data, shards, sgd
        self.algorithm, self.seed, self.at_once = algorithm, seed, at_once
        self.partitions = PartitionTraining(
            algorithm, engine, shards if all_shards is None else all_shards, sgd, seed, at_once
        )

    def examples(self, client: int) -> int:
        """Return the number of examples of a client."""
        return len(self.shards[client])

    def train(
        self,
        assignments: Sequence[Assignment],
        data: Examples,
        global_state: Tensor,
        state_of: Callable[[int], ClientState],
        failures: dict[int, Exception],
    ) -> Stack:
        """Train the clients of the assignments on `data`, starting from `global_state`. Return their results and updates.

        Clients that fail are left out and added to `failures`.
        """
        start = self.algorithm.model_weights(global_state).to(self.engine.device)
        if self.algorithm.trains_on_partitions:
            return self._train_on_partitions(assignments, data, start, failures)
        by_settings: dict[tuple[Any, ...], list[Assignment]] = {}
        for a in assignments:
            if self.examples(a.client):
                by_settings.setdefault((a.lr, a.steps, a.batch_size), []).append(a)
            else:
                failures[a.client] = DataError(
                    f"client {a.client} has no examples; give fewer --clients or another --partition"
                )
        trained: list[ClientResult] = []
        stacks = []
        for group in by_settings.values():
            try:
                sgd = self.sgd.for_round(group[0].lr, group[0].steps, group[0].batch_size)
            except ProtocolError as error:
                failures |= {a.client: error for a in group}
                continue
            jobs = self._jobs(group, sgd, start, global_state, state_of)
            updates, results = self.engine.train(start, data, jobs, sgd, seed=self.seed)
            stacks.append(updates)
            for a, job, result in zip(group, jobs, results, strict=True):
                if isinstance(result, Exception):
                    failures[a.client] = result
                else:
                    loss, buffers, state, metrics, examples = result
                    lr_sum = sgd.lr * len(job.batches)
                    trained.append(
                        ClientResult(a, loss, buffers, job.traces, lr_sum, state, metrics, examples)
                    )
        return trained, stacks[0] if len(stacks) == 1 else torch.cat([_none(start), *stacks])

    def _jobs(
        self,
        assignments: Sequence[Assignment],
        sgd: LocalSGD,
        start: Tensor,
        global_state: Tensor,
        state_of: Callable[[int], ClientState],
    ) -> list[Job]:
        """Return one job for each assignment. All of them have the learning rate, steps and batch size of `sgd`."""
        shards = [self.shards[a.client] for a in assignments]
        plans = plan_all_batches(sgd, shards, self.seed, [(a.round, a.client) for a in assignments])
        jobs = []
        for a, plan, shard in zip(assignments, plans, shards, strict=True):
            state = state_of(a.client)
            correction = self.algorithm.gradient_correction(
                global_state, state.buffers or {}, self.sgd
            )
            traces = Traces.for_round(
                self.sgd, state.memory.needs_moments, start, state.momentum, correction
            )
            jobs.append(Job(a.round, a.client, plan, state.buffers, traces, shard, state.training))
        return jobs

    def _train_on_partitions(
        self,
        assignments: Sequence[Assignment],
        data: Examples,
        start: Tensor,
        failures: dict[int, Exception],
    ) -> Stack:
        trained, updates = [], []
        results = self.partitions.updates(assignments, data, start) if assignments else []
        for a, result in zip(assignments, results, strict=True):
            if isinstance(result, Exception):
                failures[a.client] = result
            else:
                trained.append(ClientResult(a, result[1]))
                updates.append(result[0])
        return trained, torch.stack(updates).to(start.device) if updates else _none(start)


def _none(start: Tensor) -> Tensor:
    """Return the updates of no clients: float32 [0, n]."""
    return torch.empty(0, len(start), dtype=torch.float32, device=start.device)


class PartitionTraining:
    """The training of clients that share data partitions. In each round, a partition is trained once, for all clients that have it.

    `at_once`: number of partitions whose updates are in memory at the same time.
    """

    def __init__(
        self,
        algorithm: ClientAlgorithm,
        engine: Engine,
        shards: Shards,
        sgd: LocalSGD,
        seed: int,
        at_once: int,
    ):
        self.algorithm, self.engine, self.shards = algorithm, engine, shards
        self.sgd, self.seed, self.at_once = sgd, seed, at_once
        self._round = 0
        # (id(data), partition) → result in the current round.
        self._results: dict[tuple[int, DataPartition], PartitionResult | Exception] = {}

    def updates(
        self, assignments: Sequence[Assignment], data: Examples, start: Tensor
    ) -> list[tuple[Tensor, float] | Exception]:
        """Return the update [numel] and mean loss of each client, or its error. `start`: the initial weights, on the engine's device."""
        if self._round != assignments[0].round:
            self._round, self._results = assignments[0].round, {}
        partitions = [_attempt(self.algorithm.partitions, a) for a in assignments]
        wanted = {p for own in partitions if not isinstance(own, Exception) for p in own}
        missing = sorted(
            (p for p in wanted if (id(data), p) not in self._results), key=lambda p: p.number
        )
        for first in range(0, len(missing), self.at_once):
            self._train(missing[first : first + self.at_once], data, assignments[0], start)
        return [
            own
            if isinstance(own, Exception)
            else self._combine(a, [self._results[id(data), p] for p in own], start.numel())
            for a, own in zip(assignments, partitions, strict=True)
        ]

    def _combine(
        self, a: Assignment, results: Sequence[PartitionResult | Exception], numel: int
    ) -> tuple[Tensor, float] | Exception:
        summaries, losses = [], []
        for result in results:
            if isinstance(result, Exception):
                return result
            summaries.append(result[0])
            losses.append(result[1])
        update = _attempt(self.algorithm.combine, a, summaries, numel, self.seed)
        return update if isinstance(update, Exception) else (update, sum(losses) / len(losses))

    def _train(
        self, partitions: Sequence[DataPartition], data: Examples, a: Assignment, start: Tensor
    ) -> None:
        jobs: dict[DataPartition, Job] = {}
        sgd = _attempt(self.sgd.for_round, a.lr, a.steps, a.batch_size)
        for partition in partitions:
            job = sgd if isinstance(sgd, Exception) else _attempt(self._job, partition, sgd, a)
            if isinstance(job, Exception):
                self._results[id(data), partition] = job
            else:
                jobs[partition] = job
        if not jobs or isinstance(sgd, Exception):
            return
        updates, results = self.engine.train(start, data, list(jobs.values()), sgd, seed=self.seed)
        rows = iter(updates)
        for partition, result in zip(jobs, results, strict=True):
            outcome: PartitionResult | Exception
            if isinstance(result, Exception):
                outcome = result
            else:
                outcome = _attempt(self._summary, partition, next(rows), result.loss, a.round)
            self._results[id(data), partition] = outcome

    def _summary(
        self, partition: DataPartition, update: Tensor, loss: float, round: int
    ) -> PartitionResult:
        return self.algorithm.summarize(partition, update, self.seed, round), loss

    def _job(self, partition: DataPartition, sgd: LocalSGD, a: Assignment) -> Job:
        """Return the job of a partition. Raises ProtocolError if this process lacks data of the partition."""
        hosted = self.shards.keys() if isinstance(self.shards, Mapping) else range(len(self.shards))
        if not set(partition.clients) <= set(hosted):
            raise ProtocolError(
                f"this client lacks data of partition {partition.number}; give the client the data of all partitions, and --partition-id"
            )
        shard = np.concatenate([self.shards[client] for client in partition.clients])
        plan = plan_batches(sgd, shard, self.seed, a.round, partition.number)
        return Job(a.round, partition.number, plan, rows=shard)


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function. Return its result or the exception that it raised. A ConfigError is raised instead, since it affects all clients."""
    try:
        return function(*arguments)
    except ConfigError:
        raise
    except Exception as error:
        return error
