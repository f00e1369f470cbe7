"""Training on partitions that clients of a round share. Each partition is trained once; all its clients get identical updates."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import ConfigError, ProtocolError
from ..messages import Assignment
from ..strategies.base import ClientAlgorithm, DataPartition
from ..tasks.data import Examples
from ..training.batches import plan_batches
from ..training.engine import Engine, Job
from ..training.local_sgd import LocalSGD

Shards = Sequence[np.ndarray] | Mapping[int, np.ndarray]  # by client: positions of its examples
PartitionResult = tuple[Any, float]  # summary of a partition's update, and mean loss


class PartitionTraining:
    """Trains the partitions of the current round. `at_once`: number of partitions whose updates are in memory together."""

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
        self._results: dict[
            tuple[int, DataPartition], PartitionResult | Exception
        ] = {}  # by id(data) and partition

    def updates(
        self, assignments: Sequence[Assignment], data: Examples, start: Tensor
    ) -> list[tuple[Tensor, float] | Exception]:
        """Return the update [numel] and mean loss of each client, or the error. `start`: the weights, on the engine's device."""
        if self._round != assignments[0].round:
            self._round, self._results = assignments[0].round, {}
        partitions = [self._partitions(a) for a in assignments]
        missing = sorted(
            {
                p
                for mine in partitions
                if not isinstance(mine, Exception)
                for p in mine
                if (id(data), p) not in self._results
            },
            key=lambda p: p.number,
        )
        for first in range(0, len(missing), self.at_once):
            self._train(missing[first : first + self.at_once], data, assignments[0], start)
        return [
            mine
            if isinstance(mine, Exception)
            else self._combine(a, [self._results[id(data), p] for p in mine], start.numel())
            for a, mine in zip(assignments, partitions, strict=True)
        ]

    def _partitions(self, a: Assignment) -> Sequence[DataPartition] | ProtocolError:
        try:
            return self.algorithm.partitions(a)
        except ProtocolError as error:
            return error

    def _combine(
        self, a: Assignment, results: Sequence[PartitionResult | Exception], numel: int
    ) -> tuple[Tensor, float] | Exception:
        summaries, losses = [], []
        for result in results:
            if isinstance(result, Exception):
                return result
            summaries.append(result[0])
            losses.append(result[1])
        try:
            return self.algorithm.combine(a, summaries, numel, self.seed), sum(losses) / len(losses)
        except ConfigError:
            raise
        except Exception as error:
            return error

    def _train(
        self, partitions: Sequence[DataPartition], data: Examples, a: Assignment, start: Tensor
    ) -> None:
        jobs: dict[DataPartition, Job] = {}
        for partition in partitions:
            try:
                sgd = self.sgd.for_round(a.lr, a.steps, a.batch_size)
                shard = self._shard(partition)
                plan = plan_batches(sgd, shard, self.seed, a.round, partition.number)
                jobs[partition] = Job(a.round, partition.number, plan, rows=shard)
            except ConfigError:
                raise
            except Exception as error:
                self._results[id(data), partition] = error
        if not jobs:
            return
        updates, results = self.engine.train(start, data, list(jobs.values()), sgd, seed=self.seed)
        rows = iter(updates)
        for partition, result in zip(jobs, results, strict=True):
            self._results[id(data), partition] = (
                result
                if isinstance(result, Exception)
                else self._summarize(partition, next(rows), result.loss, a)
            )

    def _summarize(
        self, partition: DataPartition, update: Tensor, loss: float, a: Assignment
    ) -> PartitionResult | Exception:
        try:
            return self.algorithm.summarize(partition, update, self.seed, a.round), loss
        except ConfigError:
            raise
        except Exception as error:
            return error

    def _shard(self, partition: DataPartition) -> np.ndarray:
        """Return the examples of a partition. Raises ProtocolError if this process lacks data of the partition."""
        hosted = self.shards.keys() if isinstance(self.shards, Mapping) else range(len(self.shards))
        if not set(partition.clients) <= set(hosted):
            raise ProtocolError(
                f"partition {partition.number} has data that this client does not have; give the client all data, with --partition-id"
            )
        return np.concatenate([self.shards[client] for client in partition.clients])
