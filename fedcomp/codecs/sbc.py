"""SBC: sparse binary compression.

Sattler, Wiedemann, Müller, Samek: Sparse binary compression: towards distributed deep learning with minimal communication. IJCNN 2019
(arXiv 2018), algorithm 2.

    top⁺ = the k largest of x, top⁻ = the k largest of −x;  C(x) = μ on top⁺ or −μ on top⁻, whichever has the larger mean μ, else 0

All values have the same magnitude and sign, so there are no sign bits. top⁺ has only positive and top⁻ only negative coordinates, so either
can have fewer than k.

    values   μ as float32; flag 1: the values are −μ; the rest as in codecs/selection.py
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
    """A codec that sends the k largest coordinates of one sign as their mean."""

    density: float = 1 / 100  # fraction of the coordinates sent
    name: ClassVar[str] = "sbc"
    id: ClassVar[int] = 5
    source: ClassVar[str] = "Sattler et al. 2018"

    def contraction(self, numel: int) -> float:
        k = self.count(numel)
        # With the larger mean μ, the sum of each side is at most kμ, and every other coordinate is at most μ.
        return 1 / (1 + k * k + numel)

    def select(self, rows: Rows, seeds: Sequence[int]) -> Chosen:
        return kernels.top_side(rows, self.count(rows[0].numel()))

    def value_bytes(self, count: int) -> int:
        return 4

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        # The flag of each run is that of its first value. The appended flag is for empty runs at the end.
        negative = np.append(values < 0, False)[counts.cumsum() - counts]
        flags = np.where(negative, NEGATIVE, POSITIVE).tolist()
        return list(zip(flags, selection.pack_means(values, counts), strict=True))

    def unpack_values(self, flag: int, data: memoryview, count: int, seed: int) -> Unpacked:
        expect(flag in (POSITIVE, NEGATIVE), "an SBC section has an unknown flag")
        mean, _ = selection.take(data, 4)
        mu = selection.unpack_magnitude(mean)
        return np.full(count, -mu if flag == NEGATIVE else mu, np.float32), 4
