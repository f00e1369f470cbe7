"""Updates of many clients side by side, one block of coordinates after the other: m dense vectors are never held.

What is held beside the updates as they arrived is one block of all of them, float32 [m, BLOCK], and a CHUNK of it in float64. What an
update holds is its codec's: frames with few coordinates or few bits stay as short as they came, those of `qsgd`, `terngrad`, `natural`,
`adaptive` and `fp16` were spread out when they were opened, and a sketch that is read at density 1 is spread out when it is first read.

Distances come from inner products, which are added up in float64, one CHUNK after the other, whatever the block. A squared distance is
right to about 10⁻¹⁶ of the squared lengths of its two vectors: differences that float32 can tell apart.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from ..codecs import Update

BLOCK = 1 << 17  # coordinates read at a time: whole blocks of rotations
CHUNK = 1 << 13  # coordinates whose products are added up at a time; divides every block
LARGEST = float(np.finfo(np.float32).max)


class UpdateMatrix:
    """Updates [numel] as the rows of a matrix [m, numel]; None is a row of zeros. Values beyond float32 are read as its ends."""

    block: ClassVar[int] = BLOCK

    def __init__(self, updates: Sequence[Update | None], numel: int):
        self.updates, self.numel = list(updates), numel

    def __len__(self) -> int:
        return len(self.updates)

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (where, values [m, width] float32), from the first coordinate to the last. The values are overwritten by the next."""
        memory = np.empty(len(self) * min(self.block, self.numel), np.float32)
        for start in range(0, self.numel, self.block):
            stop = min(start + self.block, self.numel)
            values = memory[: len(self) * (stop - start)].reshape(len(self), stop - start)
            for row, update in zip(values, self.updates, strict=True):
                row[:] = _finite(update.block(start, stop)) if update is not None else 0
            yield slice(start, stop), values

    def products(self) -> np.ndarray:
        """Return the inner products of all pairs: float64 [m, m], symmetric."""
        total = np.zeros((len(self), len(self)))
        for _, values in self.blocks():
            for start in range(0, values.shape[1], CHUNK):
                part = values[:, start : start + CHUNK]
                part = part[:, part.any(axis=0)].astype(
                    np.float64
                )  # sparse updates leave most columns empty
                total += part @ part.T
        return (total + total.T) / 2

    def combine(self, weights: np.ndarray, into: Tensor) -> None:
        """Write Σ wᵢ·rowᵢ into float32 [numel], summed in float64 in the order of the rows. A row of weight 0 is not read."""
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
    found = (squares[:, None] + squares[None] - 2 * products).clip(0)
    np.fill_diagonal(found, 0)
    return found


def lengths_from(products: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return ‖xᵢ − Σ wⱼ xⱼ‖ of every row, float64 [m], from inner products."""
    towards = products @ weights
    return np.sqrt((products.diagonal() - 2 * towards + weights @ towards).clip(0))
