"""Decoded updates in compact form: nonzeros for sparse updates, bits for signs, and views of the frame for dense updates."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

import numpy as np
import torch
from torch import Tensor

from .. import kernels

BLOCK = 1 << 16  # number of coordinates processed at a time


def add_all(updates: "Sequence[Update]", weights: Sequence[float], into: Tensor) -> None:
    """Add Σ wᵢ·updateᵢ to `into` in place, in the order of the updates.

    Updates that are sketches (codecs/sketch.py) are added before they are decoded, so only their sum is decoded.
    """
    classes = {type(update) for update in updates}
    (classes.pop() if len(classes) == 1 else Update)._add_each(updates, weights, into)


class Update(ABC):
    """A decoded vector with `numel` elements."""

    numel: int
    # positions of the values in the vector, int64, ascending; None = values for all coordinates
    positions: np.ndarray | None

    @property
    def nonzeros(self) -> int:
        """Number of coordinates for which the update has a value, even if this value is 0."""
        return self.numel if self.positions is None else self.positions.size

    def add_to(self, into: Tensor, weight: float = 1.0) -> None:
        """Multiply the update by `weight` and add it to `into` [numel] in place, in float32."""
        # Products are rounded to float32 before they are added (as in kernels.add_all_at), so that CPUs and GPUs compute the same bits.
        factor, total = np.float32(weight), into.detach()
        for start in range(0, self.numel, BLOCK):
            with np.errstate(over="ignore", invalid="ignore"):
                product = factor * self.block(start, min(start + BLOCK, self.numel))
            total[start : start + BLOCK] += torch.from_numpy(product).to(into.device)

    @abstractmethod
    def block(self, start: int, stop: int) -> np.ndarray:
        """Return the coordinates start..stop-1 of the update as float32."""

    @classmethod
    def _add_each(cls, updates: "Sequence[Update]", weights: Sequence[float], into: Tensor) -> None:
        """Implement `add_all` for updates of this class."""
        for update, weight in zip(updates, weights, strict=True):
            update.add_to(into, weight)

    def copy_to(self, into: Tensor) -> None:
        """Copy the update into `into` [numel]."""
        for start in range(0, self.numel, BLOCK):
            block = np.array(self.block(start, min(start + BLOCK, self.numel)), np.float32)
            into[start : start + BLOCK].copy_(torch.from_numpy(block))

    def dense(self, device: torch.device | str | None = None) -> Tensor:
        """Return the update as a float32 vector [numel] on `device`, by default the CPU."""
        return torch.from_numpy(np.array(self.block(0, self.numel), np.float32)).to(device or "cpu")


@dataclass
class Dense(Update):
    """An update with a value for every coordinate."""

    values: np.ndarray  # [numel] float32
    positions = None

    @property
    def numel(self) -> int:
        return self.values.size

    def block(self, start: int, stop: int) -> np.ndarray:
        return self.values[start:stop]


@dataclass
class Sparse(Update):
    """An update with values for some coordinates; all other coordinates are 0."""

    numel: int
    positions: np.ndarray  # int64, ascending
    values: np.ndarray  # float32 values at `positions`

    @classmethod
    def zero(cls, numel: int) -> Self:
        """Return the update of a zero vector [numel]."""
        return cls(numel, np.empty(0, np.int64), np.empty(0, np.float32))

    def add_to(self, into: Tensor, weight: float = 1.0) -> None:
        kernels.add_all_at(into, [self.positions], [self.values], [weight])

    @classmethod
    def _add_each(cls, updates: "Sequence[Sparse]", weights: Sequence[float], into: Tensor) -> None:
        kernels.add_all_at(
            into, [u.positions for u in updates], [u.values for u in updates], weights
        )

    def block(self, start: int, stop: int) -> np.ndarray:
        out = np.zeros(stop - start, np.float32)
        a, b = np.searchsorted(self.positions, (start, stop))
        out[self.positions[a:b] - start] = self.values[a:b]
        return out


@dataclass
class Bits(Update):
    """An update with one bit per coordinate.

    The coordinates are in c columns: coordinate i is in column i mod c. Each column has two values, and the bit selects one of them.
    """

    numel: int
    raw: np.ndarray  # bits, uint8 [⌈numel/8⌉] (kernels/bits.py)
    high: np.ndarray  # value of the coordinates with bit 1 in each column, float32 [c], c ≥ 1
    low: np.ndarray  # value of the coordinates with bit 0 in each column, float32 [c]
    positions = None

    def block(self, start: int, stop: int) -> np.ndarray:
        return kernels.bits.values(self.raw, start, stop, self.high, self.low)


@dataclass
class Sections(Update):
    """An update that consists of the updates of consecutive parts of a vector, such as tensors."""

    numel: int
    # pairs of a slice and its update; the slices cover the vector in order
    parts: tuple[tuple[slice, Update], ...]

    @property
    def positions(self) -> np.ndarray | None:
        each = [(span, part.positions) for span, part in self.parts]
        if each and all(at is None for _, at in each):
            return None
        shifted = [np.arange(s.start, s.stop) if at is None else at + s.start for s, at in each]
        return np.concatenate(shifted or [np.empty(0, np.int64)])

    def add_to(self, into: Tensor, weight: float = 1.0) -> None:
        for span, part in self.parts:
            part.add_to(into[span], weight)

    @classmethod
    def _add_each(
        cls, updates: "Sequence[Sections]", weights: Sequence[float], into: Tensor
    ) -> None:
        for column in zip(*(update.parts for update in updates), strict=True):
            add_all([part for _, part in column], weights, into[column[0][0]])

    def block(self, start: int, stop: int) -> np.ndarray:
        cut = [np.empty(0, np.float32)]
        first_part = bisect_right(self.parts, start, key=lambda part: part[0].stop)
        for span, part in islice(self.parts, first_part, None):
            if span.start >= stop:
                break
            first, last = max(start, span.start), min(stop, span.stop)
            cut.append(part.block(first - span.start, last - span.start))
        return np.concatenate(cut)
