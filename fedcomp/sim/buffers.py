"""A model's buffers in a row of bytes, each at a place of its own."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Buffers:
    """Names, shapes and dtypes of the buffers of a model, in its order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "Buffers":
        named = dict(model.named_buffers())
        return cls(
            tuple(named),
            tuple(tuple(b.shape) for b in named.values()),
            tuple(b.dtype for b in named.values()),
        )

    @cached_property
    def places(self) -> list[int]:
        """The first byte of each, and the number of bytes of all."""
        sizes = (
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        return list(
            itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
        )

    def read(self, row: Tensor, which: Iterable[int]) -> dict[str, Tensor]:
        """Copies of some of the buffers in `row` (uint8)."""
        return {self.names[i]: self._view(row, i).clone() for i in which}

    def write(self, row: Tensor, values: Mapping[str, Tensor]) -> list[int]:
        """Put values in their places in `row` (uint8). Returns which."""
        which = [i for i, name in enumerate(self.names) if name in values]
        for i in which:
            self._view(row, i).copy_(values[self.names[i]])
        return which

    def _view(self, row: Tensor, i: int) -> Tensor:
        place = self.places[i]
        return (
            row[place : place + math.prod(self.shapes[i]) * self.dtypes[i].itemsize]
            .view(self.dtypes[i])
            .view(self.shapes[i])
        )
