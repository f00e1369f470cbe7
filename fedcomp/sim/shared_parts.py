"""Parts of the data that several clients of a round train on: each is trained once, and all who hold it share the result, bit for bit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..clients.client import shard_of
from ..clients.local_sgd import LocalSGD, SerialEngine, plan_batches
from ..clients.work import Part, Work
from ..errors import ConfigError
from ..messages import Assignment
from ..tasks.base import Data
from .batched import BatchedEngine

Kept = tuple[Any, float]  # what the client half keeps of a part's update, and the loss


class SharedParts:
    """What came of the parts of the round that runs. `piece`: parts whose updates are held at once."""

    def __init__(
        self, work: Work, engine: SerialEngine | BatchedEngine, shards: Sequence[np.ndarray], sgd: LocalSGD, seed: int, piece: int
    ):
        self.work, self.engine, self.shards, self.sgd, self.seed, self.piece = work, engine, shards, sgd, seed, piece
        self._round = 0
        self._done: dict[tuple[int, Part], Kept | Exception] = {}  # by which data, and which part of it

    def updates(self, asked: Sequence[Assignment], data: Data, start: Tensor) -> list[tuple[Tensor, float] | Exception]:
        """For each client its update [numel] and its mean loss, or why it cannot train. `start`: the weights of all, on the device."""
        found: list[tuple[Tensor, float] | Exception] = []
        for a, parts in self._trained(asked, data, start):
            try:
                kept = [self._result(data, part) for part in parts]
                x = self.work.join(a, [what for what, _ in kept], start.numel(), self.seed)
                found.append((x, sum(loss for _, loss in kept) / len(kept)))
            except ConfigError:
                raise
            except Exception as error:
                found.append(error)
        return found

    def _trained(self, asked: Sequence[Assignment], data: Data, start: Tensor) -> list[tuple[Assignment, Sequence[Part]]]:
        if self._round != asked[0].round:
            self._round, self._done = asked[0].round, {}
        parts = [(a, self.work.parts(a)) for a in asked]
        missing = sorted({p for _, mine in parts for p in mine if (id(data), p) not in self._done}, key=lambda p: p.number)
        for first in range(0, len(missing), self.piece):
            self._train(missing[first : first + self.piece], data, asked[0], start)
        return parts

    def _result(self, data: Data, part: Part) -> Kept:
        done = self._done[id(data), part]
        if isinstance(done, Exception):
            raise done
        return done

    def _train(self, parts: Sequence[Part], data: Data, a: Assignment, start: Tensor) -> None:
        """Together where the engine can; where that fails each by itself, so that only those fail that must."""
        try:
            plans = [plan_batches(self.sgd, shard_of(p, self.shards), self.seed, a.round, p.number) for p in parts]
            updates, losses = self._updates(parts, plans, data, a, start)
            for part, update, loss in zip(parts, updates, losses, strict=True):
                self._done[id(data), part] = self.work.keep(part, update, self.seed, a.round), loss
        except ConfigError:
            raise
        except Exception as error:
            if len(parts) == 1:
                self._done[id(data), parts[0]] = error
            else:
                for part in parts:
                    self._train([part], data, a, start)

    def _updates(
        self, parts: Sequence[Part], plans: Sequence[Sequence[np.ndarray]], data: Data, a: Assignment, start: Tensor
    ) -> tuple[Tensor, list[float]]:
        sgd = self.sgd.at_rate(a.lr)
        if isinstance(self.engine, BatchedEngine):
            updates, losses = self.engine.train(start, data, plans, sgd)
            return updates, losses.tolist()
        each = [self.engine.train(start, data, plan, sgd, seed=self.seed, round=a.round, who=part.number)
                for part, plan in zip(parts, plans, strict=True)]
        return torch.stack([t.update for t in each]), [t.loss for t in each]
