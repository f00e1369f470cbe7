"""The geometric median: the point with the smallest sum of distances to all updates.

Pillutla, Kakade, Harchaoui: Robust aggregation for federated learning. arXiv:1912.13445, 2019; IEEE TSP 2022, algorithm 2 (smoothed
Weiszfeld). A round has n updates x_i, at most f < n/2 of them Byzantine. The server starts from z = 0, and repeats the step

    z ← Σ β_i x_i / Σ β_i   with β_i = 1 / max(ν, ‖x_i − z‖)

until ‖Σ β_i (x_i − z)‖, the norm of the gradient of the sum of distances, is at most n times the option `tolerance`. Since z is always a
weighted sum of the updates, the server computes the inner products of the updates once. A step then takes n² operations. In the paper, the
server stops when a step reduces the sum of distances by only a small fraction. This would be too early if distant Byzantine updates make
the sum large.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import spec
from .robust import ByDistance, RobustOptions, distances_to_mean


@dataclass(frozen=True)
class GeometricMedianOptions(RobustOptions):
    iterations: int = 1000  # maximum number of steps in a round
    # From 0 to 1: the server stops when the gradient of the mean distance has at most this norm
    tolerance: float = 1e-6
    smoothing: float = 1e-6  # ν: smallest distance to divide by; smaller distances count as ν

    def __post_init__(self) -> None:
        super().__post_init__()
        spec.check_ranges(self, iterations=(1, 10_000), tolerance=(0, 1), smoothing=(1e-30, 1e30))


class GeometricMedian(ByDistance):
    """The smoothed geometric median of the updates."""

    name: ClassVar[str] = "geometric-median"
    options: GeometricMedianOptions
    Options: ClassVar[type] = GeometricMedianOptions

    def vector_weights(self, products: np.ndarray) -> np.ndarray:
        weights = np.zeros(len(products))
        for _ in range(self.options.iterations):
            lengths = distances_to_mean(products, weights)
            inverse = 1 / lengths.clip(self.options.smoothing)
            before, weights = weights, inverse / inverse.sum()
            # Coefficients of the vectors in Σ β_i (x_i − z).
            step = inverse.sum() * (weights - before)
            if step @ products @ step <= (self.options.tolerance * len(products)) ** 2:
                break
        return weights
