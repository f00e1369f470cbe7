"""Centered clipping: updates are cut to a radius around what came out before.

Karimireddy, He, Jaggi: Learning from history for Byzantine robust optimization. ICML 2021, algorithm 2.

    v ← v + Σ (x_i − v)·min(1, τ / ‖x_i − v‖) / n;   from the v that the round before ended with, 0 in the first

v is kept over rounds that moved the model, and with the checkpoint. It needs n > 2f; the paper's proof asks for f ≤ n/10, a τ that goes
with how far honest updates lie apart, and momentum of the clients, which brings them closer. Unlike in the paper, τ is the median of
the ‖x_i − v‖ unless a radius is given: with n > 2f no larger than the largest distance of an honest update.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from .. import spec
from ..codecs import Update
from ..codecs.update import Dense
from ..memories.base import Changes, ReadValue, ReadVector
from .base import Aggregation, RoundUpdates
from .blocks import lengths_from
from .robust import ByDistance
from .robust import Options as RobustOptions

CENTER = "center"  # in a checkpoint


@dataclass(frozen=True)
class Options(RobustOptions):
    radius: float = 0.0  # τ, in the L2 norm of updates; 0 = the median distance
    iterations: int = 1  # steps in a round

    def __post_init__(self) -> None:
        super().__post_init__()
        spec.check_ranges(self, radius=(0, 1e30), iterations=(1, 10_000))


class CenteredClipping(ByDistance):
    """Steps from the last center, each client's of a bounded length."""

    name: ClassVar[str] = "centered-clipping"
    options: Options
    Options: ClassVar[type] = Options

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.center: Tensor | None = None  # v [numel]; None = 0
        self._next: Tensor | None = None  # v, if the model moves

    def needs(self) -> int:
        return 2 * self.f + 1

    def kept(self) -> Sequence[Update | None]:
        return [None if self.center is None else Dense(self.center.numpy())]

    def weigh(self, products: np.ndarray) -> np.ndarray:
        weights = np.zeros(len(products))  # the last is that of the center
        weights[-1] = 1
        for _ in range(self.options.iterations):
            lengths = lengths_from(products, weights)[:-1]
            radius = self.options.radius or float(np.median(lengths))
            share = np.divide(radius, lengths, out=np.ones_like(lengths), where=lengths > radius)
            weights *= 1 - share.mean()
            weights[:-1] += share / share.size
        return weights

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        aggregation = super().aggregate(updates, into)
        self._next = into.clone()
        return aggregation

    def on_round_end(self, round: int, broadcast: bytes | None) -> None:
        if broadcast is not None:
            self.center = self._next
        self._next = None

    def take_changes(self) -> Changes:
        return ({} if self.center is None else {CENTER: self.center}), {}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        self.center = vector(CENTER)
