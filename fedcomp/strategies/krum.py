"""Krum selects the update that is closest to its nearest neighbours. Multi-Krum averages several such updates.

Blanchard, El Mhamdi, Guerraoui, Stainer: Machine learning with adversaries: Byzantine tolerant gradient descent. NeurIPS 2017. A round has
n updates x_i, at most f of them Byzantine. The server computes the scores s(i) and the aggregate y:

    s(i) = Σ_j ‖x_i − x_j‖² over the n − f − 2 other updates x_j that are nearest to x_i.
    Krum:         y = the update x_i with the smallest score s(i).
    Multi-Krum:   y = the mean of the updates with the smallest scores. The option `keep` is the number of these updates, by default n − f.

Both rules need n > 2f + 2, and Multi-Krum also needs n ≥ `keep` + f. If two updates have equal scores, the update of the client with the
smaller id comes first.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import spec
from .robust import ByDistance, RobustOptions, squared_distances


class Krum(ByDistance):
    """The update with the smallest sum of squared distances to its nearest other updates."""

    name: ClassVar[str] = "krum"

    def min_vectors(self) -> int:
        return 2 * self.f + 3

    def vector_weights(self, products: np.ndarray) -> np.ndarray:
        best = np.argsort(scores(products, self.f), kind="stable")[: self.keep(len(products))]
        weights = np.zeros(len(products))
        weights[best] = 1 / len(best)
        return weights

    def keep(self, vectors: int) -> int:
        """Return the number of updates to average, out of `vectors` updates."""
        return 1


@dataclass(frozen=True)
class MultiKrumOptions(RobustOptions):
    # Number of updates to average; 0 = n − f, where n is the number of accepted updates
    keep: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        spec.check_ranges(self, keep=(0, math.inf))


class MultiKrum(Krum):
    """The mean of the updates with the smallest sums of squared distances to their nearest other updates."""

    name: ClassVar[str] = "multi-krum"
    options: MultiKrumOptions
    Options: ClassVar[type] = MultiKrumOptions

    def min_vectors(self) -> int:
        return max(super().min_vectors(), self.options.keep + self.f)

    def keep(self, vectors: int) -> int:
        return self.options.keep or vectors - self.f


def scores(products: np.ndarray, f: int) -> np.ndarray:
    """Return the Krum scores of n updates, float64 [n], given their inner products [n, n]."""
    n = len(products)
    distances = squared_distances(products)
    np.fill_diagonal(distances, np.inf)
    return np.sort(distances, axis=1)[:, : n - f - 2].sum(axis=1)
