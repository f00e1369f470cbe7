"""The geometric median: the point whose distances to all updates add up to the least.

Pillutla, Kakade, Harchaoui: Robust aggregation for federated learning. arXiv:1912.13445, 2019; IEEE TSP 2022, algorithm 2 (smoothed
Weiszfeld).

    z ← Σ β_i x_i / Σ β_i,  β_i = 1 / max(ν, ‖x_i − z‖);   from z = 0, until ‖Σ β_i (x_i − z)‖ ≤ tolerance · n

It needs n > 2f. z is a weighted mean of the updates, so a step needs their inner products alone: n² operations. The paper starts in the
convex hull of the updates, which one step from 0 leads to, and ends when the sum of the distances hardly changes. With Byzantine vectors
that are far away, or 0, the sum hardly changes from the first step on. The gradient, to which each vector adds 1 at most, is small at the
end alone.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import spec
from .blocks import lengths_from
from .robust import ByDistance
from .robust import Options as RobustOptions


@dataclass(frozen=True)
class Options(RobustOptions):
    iterations: int = 1000  # at most
    tolerance: float = 1e-6  # of the length of the mean gradient, 0..1, at which they end
    smoothing: float = 1e-6  # ν: distances below it count like it

    def __post_init__(self) -> None:
        super().__post_init__()
        spec.check_ranges(self, iterations=(1, 10_000), tolerance=(0, 1), smoothing=(1e-30, 1e30))


class GeometricMedian(ByDistance):
    """The smoothed geometric median."""

    name: ClassVar[str] = "geometric-median"
    options: Options
    Options: ClassVar[type] = Options

    def needs(self) -> int:
        return 2 * self.f + 1

    def weigh(self, products: np.ndarray) -> np.ndarray:
        weights = np.zeros(len(products))
        for _ in range(self.options.iterations):
            lengths = lengths_from(products, weights)
            inverse = 1 / lengths.clip(self.options.smoothing)
            before, weights = weights, inverse / inverse.sum()
            step = inverse.sum() * (weights - before)  # down the gradient
            if step @ products @ step <= (self.options.tolerance * len(products)) ** 2:
                break
        return weights
