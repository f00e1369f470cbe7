"""STC: sparse ternary compression.

Sattler et al., "Robust and communication-efficient federated learning from non-i.i.d. data", IEEE TNNLS 2019, algorithm 1.

The k coordinates with the largest magnitudes are decoded as μ·sign(x_i), where μ is the mean of these k magnitudes. All other coordinates
are decoded as 0. Unlike in the paper, a frame never has more than k coordinates: among equal magnitudes, those at lower positions are
selected first, and zeros are not sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import kernels
from . import selection
from .base import Context, expect
from .selection import Unpacked


@dataclass(frozen=True)
class STC(selection.Largest):
    """A codec that sends the k largest coordinates: a sign for each, and one common magnitude."""

    density: float = 1 / 100  # fraction of the coordinates sent
    name = "stc"
    id = 4
    source = "Sattler et al. 2019"

    def contraction(self, numel: int) -> float:
        k = self.count(numel)
        # If k of n coordinates are sent, the factor is k/n for a vector of equal coordinates, and close to 1/k if one coordinate is much
        # larger than all others. The smaller of these two bounds holds for every vector.
        return min(k / max(numel, 1), 1 / max(k, 1))

    def value_bytes(self, count: int) -> int:
        return 4 + (count + 7) // 8

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        means, signs = selection.pack_means(values, counts), kernels.split_runs(values > 0, counts)
        return [(0, mean + kernels.pack_signs(run)) for mean, run in zip(means, signs, strict=True)]

    def unpack_values(self, flag: int, data: memoryview, count: int, seed: int) -> Unpacked:
        expect(flag == 0, f"the values have the unknown format {flag}")
        size = self.value_bytes(count)
        sent, _ = selection.take(data, size)
        mean, raw = selection.unpack_magnitude(sent[:4]), kernels.bits.read_bits(sent[4:], count)
        return kernels.sign_values(raw, count, mean), size
