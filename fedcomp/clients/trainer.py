"""The local training of a session's clients."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, DataError, ProtocolError
from ..messages import Assignment
from ..strategies.base import ClientAlgorithm, DataPartition
from ..tasks.data import Examples
from ..training.engine import Engine, Job, JobResult
from ..training.local_sgd import NO_TRACES, LocalSGD, Traces, plan_batches
from .state import ClientState

# By client: the indices of its examples.
Shards = list[np.ndarray] | dict[int, np.ndarray]


class ClientResult(NamedTuple):
    """The result of one client's training, without the update."""

    assignment: Assignment
    result: JobResult
    traces: Traces = NO_TRACES  # further vectors of local SGD, such as the momentum
    lr_sum: float = 0.0  # sum of the learning rates of all local steps


# The results of the clients that did not fail, and their updates [clients, numel].
TrainedClients = tuple[list[ClientResult], Tensor]


class Trainer:
    """The local training of a session's clients, with the options `sgd`. `shards[client]`: indices of the client's examples in `data`."""

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
        """`all_shards`: the shards of all clients of the run, for algorithms that train on data partitions; by default `shards`. `at_once`:
        number of clients or partitions whose updates are in memory at the same time.
        """
        self.engine, self.data, self.shards, self.sgd = engine, data, shards, sgd
        self.algorithm, self.seed, self.at_once = algorithm, seed, at_once
        self.all_shards = shards if all_shards is None else all_shards
        self._round = 0
        # In the current round, by Python id of the data and partition: the summary of the update or an exception, and the mean loss.
        self._results: dict[tuple[int, DataPartition], tuple[Any, float]] = {}

    def examples(self, client: int) -> int:
        return len(self.shards[client])

    def train(
        self,
        assignments: Sequence[Assignment],
        data: Examples,
        global_state: Tensor,
        state_of: Callable[[int], ClientState],
        failures: dict[int, Exception],
    ) -> TrainedClients:
        """Train the clients of the assignments on `data`, starting from `global_state`. `state_of` returns a client's state.

        If a client fails, its exception is added to `failures`, and the client has no result.
        """
        start = self.algorithm.model_weights(global_state).to(self.engine.device)
        if self.algorithm.trains_on_partitions:
            return self._train_on_partitions(assignments, data, start, failures)
        empty = start.new_empty(0, len(start))
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
                    trained.append(ClientResult(a, result, job.traces, sgd.lr * len(job.batches)))
        return trained, stacks[0] if len(stacks) == 1 else torch.cat([empty, *stacks])

    def _jobs(
        self,
        assignments: Sequence[Assignment],
        sgd: LocalSGD,
        start: Tensor,
        global_state: Tensor,
        state_of: Callable[[int], ClientState],
    ) -> list[Job]:
        """Return one training job for each assignment. `sgd`: training options of all assignments in this round."""
        jobs = []
        for a in assignments:
            state, shard = state_of(a.client), self.shards[a.client]
            plan = plan_batches(sgd, shard, self.seed, a.round, a.client)
            correction = self.algorithm.gradient_correction(
                global_state, state.buffers or {}, self.sgd
            )
            traces = Traces.for_round(
                self.sgd, state.memory.needs_moments, start, state.momentum, correction
            )
            jobs.append(Job(a.round, a.client, plan, state.buffers, traces, shard, state.training))
        return jobs

    # Training on partitions: in each round, the session trains once on each partition, for all clients that need its result.

    def _train_on_partitions(
        self,
        assignments: Sequence[Assignment],
        data: Examples,
        start: Tensor,
        failures: dict[int, Exception],
    ) -> TrainedClients:
        empty = start.new_empty(0, len(start))
        if not assignments:
            return [], empty
        if self._round != assignments[0].round:
            self._round, self._results = assignments[0].round, {}
        partitions = {a.client: _attempt(self.algorithm.partitions, a) for a in assignments}
        failures |= {c: error for c, error in partitions.items() if isinstance(error, Exception)}
        valid = [a for a in assignments if a.client not in failures]
        wanted = {
            p for a in valid for p in partitions[a.client] if (id(data), p) not in self._results
        }
        missing = sorted(wanted, key=lambda p: p.number)
        for first in range(0, len(missing), self.at_once):
            self._train_partitions(
                missing[first : first + self.at_once], data, assignments[0], start
            )
        trained, updates = [], []
        for a in valid:
            results = [self._results[id(data), p] for p in partitions[a.client]]
            summaries, losses = zip(*results, strict=True)
            errors = [summary for summary in summaries if isinstance(summary, Exception)]
            combine = self.algorithm.combine
            update = errors[0] if errors else _attempt(combine, a, summaries, len(start), self.seed)
            if isinstance(update, Exception):
                failures[a.client] = update
            else:
                trained.append(ClientResult(a, JobResult(sum(losses) / len(losses))))
                updates.append(update)
        return trained, torch.stack(updates).to(start.device) if updates else empty

    def _train_partitions(
        self, partitions: Sequence[DataPartition], data: Examples, a: Assignment, start: Tensor
    ) -> None:
        """Train on data partitions with the round and the settings of assignment `a`, and add the results to `self._results`."""
        jobs: dict[DataPartition, Job] = {}
        for partition in partitions:
            job = _attempt(self._partition_job, partition, a)
            if isinstance(job, Exception):
                self._results[id(data), partition] = job, math.nan
            else:
                jobs[partition] = job
        if not jobs:
            return
        sgd = self.sgd.for_round(a.lr, a.steps, a.batch_size)
        updates, results = self.engine.train(start, data, list(jobs.values()), sgd, seed=self.seed)
        rows = iter(updates)
        for partition, result in zip(jobs, results, strict=True):
            if isinstance(result, Exception):
                self._results[id(data), partition] = result, math.nan
            else:
                arguments = partition, next(rows), self.seed, a.round
                summary = _attempt(self.algorithm.summarize, *arguments)
                self._results[id(data), partition] = summary, result.loss

    def _partition_job(self, partition: DataPartition, a: Assignment) -> Job:
        """Return the training job of a partition. Raises ProtocolError if some of its data are missing."""
        sgd = self.sgd.for_round(a.lr, a.steps, a.batch_size)
        try:
            shard = np.concatenate([self.all_shards[client] for client in partition.clients])
        except LookupError as error:
            raise ProtocolError(
                f"this client must train on data of other clients (partition {partition.number}), but does not have them; give this client "
                "the data of the whole task, and set --partition-id"
            ) from error
        plan = plan_batches(sgd, shard, self.seed, a.round, partition.number)
        return Job(a.round, partition.number, plan, rows=shard)


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function`, and return its result or the exception that it raised. A ConfigError is not caught, since it affects all clients."""
    try:
        return function(*arguments)
    except ConfigError:
        raise
    except Exception as error:
        return error
