"""The geometric median: the point with the smallest sum of distances to all updates.

Pillutla, Kakade, Harchaoui: Robust aggregation for federated learning. arXiv:1912.13445, 2019; IEEE TSP 2022, algorithm 2 (smoothed
Weiszfeld).

    z ← Σ β_i x_i / Σ β_i,  β_i = 1 / max(ν, ‖x_i − z‖);   starting from z = 0, until ‖Σ β_i (x_i − z)‖ ≤ tolerance · n

x_i are the n updates, at most f of them Byzantine; n > 2f is required. z is a weighted mean of the updates, so a step needs only their
inner products and takes n² operations. The paper starts from a point in the convex hull of the updates. Here, z is in the convex hull after
the first step. The paper stops when the sum of the distances hardly changes. With distant Byzantine vectors, the sum hardly changes from
the first step on. So the iteration here stops when the norm of the gradient is small. Each vector contributes at most 1 to the gradient.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import spec
from .robust import ByDistance, RobustOptions, distances_to_mean


@dataclass(frozen=True)
class GeometricMedianOptions(RobustOptions):
    iterations: int = 1000  # largest number of iterations
    # The iteration stops when the norm 0..1 of the mean gradient is at most this
    tolerance: float = 1e-6
    smoothing: float = 1e-6  # ν: smaller distances are replaced by ν

    def __post_init__(self) -> None:
        super().__post_init__()
        spec.check_ranges(self, iterations=(1, 10_000), tolerance=(0, 1), smoothing=(1e-30, 1e30))


class GeometricMedian(ByDistance):
    """The smoothed geometric median."""

    name: ClassVar[str] = "geometric-median"
    options: GeometricMedianOptions
    Options: ClassVar[type] = GeometricMedianOptions

    def vector_weights(self, products: np.ndarray) -> np.ndarray:
        weights = np.zeros(len(products))
        for _ in range(self.options.iterations):
            lengths = distances_to_mean(products, weights)
            inverse = 1 / lengths.clip(self.options.smoothing)
            before, weights = weights, inverse / inverse.sum()
            step = inverse.sum() * (weights - before)  # a step of gradient descent
            if step @ products @ step <= (self.options.tolerance * len(products)) ** 2:
                break
        return weights
