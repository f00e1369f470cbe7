"""Sparse ternary compression.

Sattler, Wiedemann, Müller, Samek: Robust and communication-efficient federated learning from non-i.i.d. data. IEEE TNNLS 2019, algorithm 1.

    C(x)_i = μ·sign(x_i) if |x_i| is among the k largest, else 0;  μ = the mean magnitude of those k

Unlike the paper, ties at the k-th magnitude are cut by position and zeros are never sent, so a frame never holds more than k.

    body   first byte (codecs/selection.py), μ as float32, signs (one bit each, 1 = positive, padded to a byte), gaps
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import kernels
from . import selection
from .base import expect
from .frame import CodecId, Section


@dataclass(frozen=True)
class STC(selection.Selective):
    """The k largest coordinates as one mean magnitude and a sign each."""

    density: float = 1 / 400  # share of coordinates sent
    name: ClassVar[str] = "stc"
    id: ClassVar[CodecId] = CodecId.STC
    source: ClassVar[str] = "Sattler et al. 2019"

    def contraction(self, numel: int) -> float:
        k = self.count(numel)
        return min(k / max(numel, 1), 1 / max(k, 1))  # attained by a constant vector and by a single spike over tiny values

    def section(self, positions: np.ndarray, values: np.ndarray, numel: int) -> Section:
        first, gaps = selection.pack_positions(positions, numel)
        return Section(positions.size, first + selection.pack_mean(values) + kernels.pack_signs(values > 0) + gaps)

    def read(self, count: int, body: memoryview, numel: int) -> tuple[np.ndarray, np.ndarray]:
        first, mean, signs, gaps = selection.split(body, 1, 4, -(-count // 8))
        expect(first[0] <= selection.RICE, "an STC section has an unknown flag")
        mu = selection.unpack_mean(mean)
        positive = kernels.unpack_signs(signs, count)
        return selection.unpack_positions(first[0], gaps, count, numel), np.where(positive, mu, -mu)
