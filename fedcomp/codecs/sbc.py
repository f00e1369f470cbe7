"""SBC: sparse binary compression.

Sattler et al., "Sparse binary compression: towards distributed deep learning with minimal communication", IJCNN 2019, algorithm 2.

The codec forms two groups: the k largest positive coordinates, and the k negative coordinates with the largest magnitudes. If the vector
has fewer than k coordinates of one sign, the group of this sign is smaller. Only the group with the larger mean magnitude is sent. Let μ be
this mean magnitude. The coordinates of the group are decoded as μ if they are positive, and as −μ if they are negative. All other
coordinates are decoded as 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import kernels
from ..kernels import Chosen, Rows
from . import selection
from .base import Context, expect
from .selection import Unpacked

POSITIVE, NEGATIVE = 0, 1  # flags


@dataclass(frozen=True)
class SBC(selection.Largest):
    """A codec that sends the k largest coordinates of one sign, all with the same value: their mean."""

    density: float = 1 / 100  # fraction of the coordinates sent
    name = "sbc"
    id = 5
    source = "Sattler et al. 2018"

    def contraction(self, numel: int) -> float:
        k = self.count(numel)
        # Let μ be the larger mean magnitude of the two groups. The magnitudes of each group add up to at most k·μ, and all other
        # magnitudes are at most μ. So ‖x‖² is at most (1 + k² + n)·‖C(x)‖², and sending C(x) reduces the squared error by ‖C(x)‖².
        return 1 / (1 + k * k + numel)

    def select(self, rows: Rows, seeds: Sequence[int]) -> Chosen:
        return kernels.top_side(rows, self.count(rows[0].numel()))

    def value_bytes(self, count: int) -> int:
        return 4

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        # All values of a vector have the same sign, so read the sign of its first value. The appended False is read if the last vector has
        # no values.
        negative = np.append(values < 0, False)[counts.cumsum() - counts]
        flags = np.where(negative, NEGATIVE, POSITIVE).tolist()
        return list(zip(flags, selection.pack_means(values, counts), strict=True))

    def unpack_values(self, flag: int, data: memoryview, count: int, seed: int) -> Unpacked:
        expect(flag in (POSITIVE, NEGATIVE), f"the values have the unknown format {flag}")
        mean, _ = selection.take(data, 4)
        mu = selection.unpack_magnitude(mean)
        return np.full(count, -mu if flag == NEGATIVE else mu, np.float32), 4
