"""Centered clipping: the server limits the distance of each update from the previous aggregate, and averages the limited updates.

Karimireddy, He, Jaggi: Learning from history for Byzantine robust optimization. ICML 2021, algorithm 2. A round has n updates x_i, at most
f < n/2 of them Byzantine. The server starts from the aggregate v of the previous round (0 in the first round). It repeats the step

    v ← v + Σ (x_i − v)·min(1, τ / ‖x_i − v‖) / n,

and the last v is the aggregate of the round. The number of steps is the option `iterations`, and the clipping radius τ is the option
`radius`. A round that does not update the model leaves v unchanged. The paper's proof needs f ≤ n/10, a τ proportional to the distances
between honest updates, and momentum on the clients, which reduces these distances. Unlike in the paper, the default τ is the median of the
distances ‖x_i − v‖. Byzantine clients cannot raise this median above the largest distance between v and an honest update.
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
from .robust import ByDistance, RobustOptions, distances_to_mean

CENTER = "center"  # name of the aggregate v in a checkpoint


@dataclass(frozen=True)
class CenteredClippingOptions(RobustOptions):
    radius: float = 0.0  # τ: clipping radius, an L2 norm; 0 = the median of the distances to v
    iterations: int = 1  # number of steps in a round

    def __post_init__(self) -> None:
        super().__post_init__()
        spec.check_ranges(self, radius=(0, 1e30), iterations=(1, 10_000))


class CenteredClipping(ByDistance):
    """The previous aggregate plus the mean of the clipped differences between the updates and the previous aggregate."""

    name: ClassVar[str] = "centered-clipping"
    options: CenteredClippingOptions
    Options: ClassVar[type] = CenteredClippingOptions

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.center: Tensor | None = None  # v [numel]; None = 0
        self._next: Tensor | None = None  # new aggregate v, stored if this round updates the model

    def server_vectors(self) -> Sequence[Update | None]:
        return [None if self.center is None else Dense(self.center.numpy())]

    def vector_weights(self, products: np.ndarray) -> np.ndarray:
        weights = np.zeros(len(products))
        weights[-1] = 1  # the last vector is the previous aggregate v
        for _ in range(self.options.iterations):
            lengths = distances_to_mean(products, weights)[:-1]
            radius = self.options.radius or float(np.median(lengths))
            factors = np.divide(radius, lengths, out=np.ones_like(lengths), where=lengths > radius)
            weights *= 1 - factors.mean()
            weights[:-1] += factors / factors.size
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
