"""Matrices of updates that are read in blocks of coordinates, so that m dense vectors are never in memory.

Besides the updates themselves, memory holds one block of all of them, float32 [m, BLOCK], and a CHUNK of it in float64. The codec
determines the size of an update: sparse and low-bit updates stay compressed; those of `qsgd`, `terngrad`, `natural`, `adaptive` and `fp16`
are dense from the start, and a sketch that is read at density 1 becomes dense at the first read.

Distances are computed from inner products, which are summed in float64 by CHUNK, independently of BLOCK. The error of a squared distance is
about 10⁻¹⁶ of the squared lengths of its two vectors, which is smaller than float32 rounding.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from ..codecs import Update

BLOCK = 1 << 17  # coordinates read at a time; a multiple of the block size of rotations
CHUNK = 1 << 13  # coordinates per inner product; divides every block
LARGEST = float(np.finfo(np.float32).max)


class UpdateMatrix:
    """Updates [numel] as the rows of a matrix [m, numel]; None is a row of zeros. Infinite values become the largest float32."""

    block: ClassVar[int] = BLOCK

    def __init__(self, updates: Sequence[Update | None], numel: int):
        self.updates, self.numel = list(updates), numel

    def __len__(self) -> int:
        return len(self.updates)

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (slice of the coordinates, values [m, width] float32) in order. The next block overwrites the values."""
        buffer = np.empty(len(self) * min(self.block, self.numel), np.float32)
        for start in range(0, self.numel, self.block):
            stop = min(start + self.block, self.numel)
            values = buffer[: len(self) * (stop - start)].reshape(len(self), stop - start)
            for row, update in zip(values, self.updates, strict=True):
                row[:] = _finite(update.block(start, stop)) if update is not None else 0
            yield slice(start, stop), values

    def products(self) -> np.ndarray:
        """Return the inner products of all pairs: float64 [m, m], symmetric."""
        total = np.zeros((len(self), len(self)))
        for _, values in self.blocks():
            for start in range(0, values.shape[1], CHUNK):
                part = values[:, start : start + CHUNK]
                # Sparse updates leave most columns empty.
                part = part[:, part.any(axis=0)].astype(np.float64)
                total += part @ part.T
        return (total + total.T) / 2

    def combine(self, weights: np.ndarray, into: Tensor) -> None:
        """Write Σ wᵢ·rowᵢ into `into`, float32 [numel], summed in float64 in the order of the rows. Rows of weight 0 are not read."""
        pairs = list(zip(weights.tolist(), self.updates, strict=True))
        out = into.numpy()
        for start in range(0, self.numel, self.block):
            stop = min(start + self.block, self.numel)
            total = np.zeros(stop - start)
            for weight, update in pairs:
                if weight and update is not None:
                    total += weight * _finite(update.block(start, stop)).astype(np.float64)
            out[start:stop] = total.clip(-LARGEST, LARGEST, out=total)


def _finite(values: np.ndarray) -> np.ndarray:
    return values if np.isfinite(values).all() else np.nan_to_num(values)


def squared_distances(products: np.ndarray) -> np.ndarray:
    """Return ‖xᵢ − xⱼ‖² of all pairs, float64 [m, m], from inner products; the diagonal is 0."""
    squares = products.diagonal()
    distances = (squares[:, None] + squares[None] - 2 * products).clip(0)
    np.fill_diagonal(distances, 0)
    return distances


def distances_to_mean(products: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return ‖xᵢ − Σ wⱼ xⱼ‖ of every row, float64 [m], from inner products."""
    projections = products @ weights
    return np.sqrt((products.diagonal() - 2 * projections + weights @ projections).clip(0))
