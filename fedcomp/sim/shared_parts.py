"""Parts of the data that several clients of a round train on: each is trained once, and all who hold it share the result, bit for bit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..clients.client import shard_of
from ..errors import ConfigError, ProtocolError
from ..messages import Assignment
from ..strategies.client_algorithm import ClientAlgorithm, DataPartition
from ..tasks.base import Data
from ..training.batches import plan_batches
from ..training.engine import Engine, Job
from ..training.local_sgd import LocalSGD

Kept = tuple[Any, float]  # what the client half keeps of a part's update, and the loss


class SharedParts:
    """What came of the parts of the round that runs. `piece`: parts whose updates are held at once."""

    def __init__(
        self,
        algorithm: ClientAlgorithm,
        engine: Engine,
        shards: Sequence[np.ndarray],
        sgd: LocalSGD,
        seed: int,
        piece: int,
    ):
        self.algorithm, self.engine, self.shards, self.sgd, self.seed, self.piece = (
            algorithm,
            engine,
            shards,
            sgd,
            seed,
            piece,
        )
        self._round = 0
        self._done: dict[
            tuple[int, DataPartition], Kept | Exception
        ] = {}  # by which data, and which part of it

    def updates(
        self, asked: Sequence[Assignment], data: Data, start: Tensor
    ) -> list[tuple[Tensor, float] | Exception]:
        """For each client its update [numel] and its mean loss, or why it cannot train. `start`: the weights of all, on the device."""
        found: list[tuple[Tensor, float] | Exception] = []
        for a, parts in self._trained(asked, data, start):
            try:
                kept = [self._result(data, part) for part in parts]
                x = self.algorithm.combine(a, [what for what, _ in kept], start.numel(), self.seed)
                found.append((x, sum(loss for _, loss in kept) / len(kept)))
            except ConfigError:
                raise
            except Exception as error:
                found.append(error)
        return found

    def _trained(
        self, asked: Sequence[Assignment], data: Data, start: Tensor
    ) -> list[tuple[Assignment, Sequence[DataPartition]]]:
        if self._round != asked[0].round:
            self._round, self._done = asked[0].round, {}
        parts = [(a, self.algorithm.partitions(a)) for a in asked]
        missing = sorted(
            {p for _, mine in parts for p in mine if (id(data), p) not in self._done},
            key=lambda p: p.number,
        )
        for first in range(0, len(missing), self.piece):
            self._train(missing[first : first + self.piece], data, asked[0], start)
        return parts

    def _result(self, data: Data, part: DataPartition) -> Kept:
        done = self._done[id(data), part]
        if isinstance(done, Exception):
            raise done
        return done

    def _train(
        self, parts: Sequence[DataPartition], data: Data, a: Assignment, start: Tensor
    ) -> None:
        jobs: dict[DataPartition, Job] = {}
        try:
            sgd = self.sgd.as_told(a.lr, a.steps, a.batch_size)
        except ProtocolError as error:
            self._done |= {(id(data), part): error for part in parts}
            return
        for part in parts:
            try:
                jobs[part] = Job(
                    a.round,
                    part.number,
                    plan_batches(sgd, shard_of(part, self.shards), self.seed, a.round, part.number),
                )
            except ConfigError:
                raise
            except Exception as error:
                self._done[id(data), part] = error
        updates, results = self.engine.train(start, data, list(jobs.values()), sgd, seed=self.seed)
        rows = iter(updates)
        for part, result in zip(jobs, results, strict=True):
            self._done[id(data), part] = (
                result
                if isinstance(result, Exception)
                else self._kept(part, next(rows), result.loss, a)
            )

    def _kept(
        self, part: DataPartition, update: Tensor, loss: float, a: Assignment
    ) -> Kept | Exception:
        try:
            return self.algorithm.summarize(part, update, self.seed, a.round), loss
        except ConfigError:
            raise
        except Exception as error:
            return error
