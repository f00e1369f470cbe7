"""STC: sparse ternary compression.

Sattler, Wiedemann, Müller, Samek: Robust and communication-efficient federated learning from non-i.i.d. data. IEEE TNNLS 2019, algorithm 1.

    C(x)_i = μ·sign(x_i) if |x_i| is among the k largest, else 0;  μ = the mean magnitude of those k

Unlike in the paper, a frame never has more than k coordinates: ties at the k-th magnitude go to the lower positions, and zeros are not
sent.

    values   μ as float32; signs, one bit each, 1 = positive, padded to a byte; the rest as in codecs/selection.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import kernels
from . import selection
from .base import Context, expect
from .selection import Unpacked


@dataclass(frozen=True)
class STC(selection.Largest):
    """A codec that sends the k largest coordinates as one mean magnitude and a sign each."""

    density: float = 1 / 100  # fraction of the coordinates sent
    name: ClassVar[str] = "stc"
    id: ClassVar[int] = 4
    source: ClassVar[str] = "Sattler et al. 2019"

    def contraction(self, numel: int) -> float:
        k = self.count(numel)
        # Attained by a constant vector, and in the limit by a vector with one large coordinate.
        return min(k / max(numel, 1), 1 / max(k, 1))

    def value_bytes(self, count: int) -> int:
        return 4 + (count + 7) // 8

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        means, signs = selection.pack_means(values, counts), kernels.split_runs(values > 0, counts)
        return [(0, mean + kernels.pack_signs(run)) for mean, run in zip(means, signs, strict=True)]

    def unpack_values(self, flag: int, data: memoryview, count: int, seed: int) -> Unpacked:
        expect(flag == 0, "an STC section has an unknown flag")
        size = self.value_bytes(count)
        sent, _ = selection.take(data, size)
        mean, raw = selection.unpack_magnitude(sent[:4]), kernels.bits.read_bits(sent[4:], count)
        return kernels.sign_values(raw, count, mean), size
