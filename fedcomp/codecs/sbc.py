"""SBC: sparse binary compression.

Sattler et al., "Sparse binary compression: towards distributed deep learning with minimal communication", IJCNN 2019, algorithm 2.

The codec computes the mean of the k largest positive coordinates, and the mean magnitude of the k largest negative coordinates. Of these
positive and negative groups, only the one with the larger mean magnitude μ is sent, with every coordinate decoded as μ or −μ. A group is
smaller than k if the vector has fewer coordinates of its sign.

The magnitude μ is sent as float32; a flag of 1 means that the values are −μ. For the rest of the body, see codecs/selection.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import kernels
from ..kernels import Chosen, Rows
from . import selection
from .base import Context, expect
from .selection import Unpacked

POSITIVE, NEGATIVE = 0, 1  # flags


@dataclass(frozen=True)
class SBC(selection.Largest):
    """A codec that sends k coordinates of one sign, the largest of this sign, all as their mean."""

    density: float = 1 / 100  # fraction of the coordinates sent
    name: ClassVar[str] = "sbc"
    id: ClassVar[int] = 5
    source: ClassVar[str] = "Sattler et al. 2018"

    def contraction(self, numel: int) -> float:
        k = self.count(numel)
        # The sum of the k largest coordinates of either sign is at most kμ, and every other magnitude is at most μ, where μ is the larger
        # mean.
        return 1 / (1 + k * k + numel)

    def select(self, rows: Rows, seeds: Sequence[int]) -> Chosen:
        return kernels.top_side(rows, self.count(rows[0].numel()))

    def value_bytes(self, count: int) -> int:
        return 4

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        # The sign of a vector's first value determines its flag. The appended False is read for vectors without values at the end.
        negative = np.append(values < 0, False)[counts.cumsum() - counts]
        flags = np.where(negative, NEGATIVE, POSITIVE).tolist()
        return list(zip(flags, selection.pack_means(values, counts), strict=True))

    def unpack_values(self, flag: int, data: memoryview, count: int, seed: int) -> Unpacked:
        expect(flag in (POSITIVE, NEGATIVE), f"the values have the unknown format {flag}")
        mean, _ = selection.take(data, 4)
        mu = selection.unpack_magnitude(mean)
        return np.full(count, -mu if flag == NEGATIVE else mu, np.float32), 4
