"""Tensors as matrices: the base of codecs that send factors.

A tensor of two or more dimensions is the matrix [first, all the others], so that a kernel of a convolution is [out, in·h·w]; any other is a
vector. A section counts every coordinate, and its body holds the tensors one after the other, empty ones left out:

    matrix   k in one byte; left [rows, k] and right [columns, k], with k·(rows + columns) below rows·columns
             or 255 and the values, where factors are no shorter or float32 cannot carry them
    vector   the values

all float32, little-endian, row after row. The update is left·rightᵀ; the columns of `left` have the length 1. Products and factorisations
differ from device to device, but a frame is read by sums in a fixed order: the same bits everywhere.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, FrameError
from ..layout import Entry, Layout
from .base import Codec, Context, expect
from .frame import Section
from .selection import take
from .update import Dense, Sections, Update

FLOAT = np.dtype("<f4")
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-100  # of a matrix's largest value: below it float32 is too coarse for factors
VALUES, MOST = 255, 254  # first byte: the values follow; most columns of factors
CHUNK = 1 << 16  # elements of a product that are made at a time


def shape_of(entry: Entry) -> tuple[int, int] | None:
    """Rows and columns of a tensor, None for a vector."""
    return (entry.shape[0], math.prod(entry.shape[1:])) if len(entry.shape) > 1 else None


@dataclass(frozen=True)
class Product(Update):
    """left · rightᵀ, row after row."""

    left: np.ndarray  # [rows, k] float32
    right: np.ndarray  # [columns, k] float32
    positions: ClassVar[None] = None

    @property
    def numel(self) -> int:
        return len(self.left) * len(self.right)

    def add_to(self, into: Tensor, weight: float = 1.0) -> None:
        Dense(self.block(0, self.numel)).add_to(into, weight)

    def block(self, start: int, stop: int) -> np.ndarray:
        columns, right = len(self.right), self.right.astype(np.float64)
        first, last, step = start // columns, -(-stop // columns), max(1, CHUNK // columns)
        made = np.empty((last - first, columns), np.float32)
        for a in range(first, last, step):
            rows = self.left[a : min(a + step, last)].astype(np.float64)
            total = np.zeros((len(rows), columns))
            for u, v in zip(rows.T, right.T, strict=True):
                total += np.multiply.outer(u, v)
            made[a - first : a - first + len(rows)] = total.clip(-LARGEST, LARGEST)
        return made.ravel()[start - first * columns : stop - first * columns]


@dataclass(frozen=True)
class MatrixCodec(Codec):
    """A codec that sends factors of matrices. An author writes `factor`."""

    portable: ClassVar[bool] = False

    @abstractmethod
    def factor(
        self, matrix: Tensor, tensor: int, seed: int, context: Context
    ) -> tuple[Tensor, Tensor] | None:
        """left [rows, k] and right [columns, k] of a finite matrix that is not zero, all float64; None: its values are sent.

        `tensor` is its index in the layout, 0 under @layer.
        """

    def needs_layout(self) -> bool:
        return True

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        layout = self._known(context.layout)
        return Section(
            x.numel(),
            b"".join(
                self._tensor(x[e.span], i, e, seed, context)
                for i, e in enumerate(layout)
                if e.numel
            ),
        )

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        expect(section.count == layout.numel, "a section of matrices has another length")
        parts, data = [], memoryview(section.body)
        for e in layout:
            update, data = _read(e, data)
            parts.append((e.span, update))
        expect(not len(data), "bytes follow the last tensor")
        return Sections(layout.numel, tuple(parts))

    def open_batch(
        self, frames: Sequence[bytes], numel: int, layout: Layout | None = None
    ) -> list[Update | FrameError]:
        self._known(layout)
        return super().open_batch(frames, numel, layout)

    def _known(self, layout: Layout | None) -> Layout | None:
        if layout is None and self.needs_layout():
            raise ConfigError(
                f"{self} needs layout=…, which has the shapes of the tensors; or use a codec for vectors, such as stc"
            )
        return layout

    def _tensor(self, x: Tensor, tensor: int, entry: Entry, seed: int, context: Context) -> bytes:
        shape = shape_of(entry)
        if shape is None:
            return values(x)
        matrix = x.reshape(shape).contiguous().to(torch.float64)
        largest = float(matrix.abs().max())
        if not largest:
            return bytes([0])
        factors = self.factor(matrix, tensor, seed, context) if largest > SMALLEST else None
        if factors is None or not bool((factors[1].abs() <= LARGEST).all()):
            return bytes([VALUES]) + values(x)
        return bytes([factors[0].shape[1]]) + values(factors[0]) + values(factors[1])


def values(x: Tensor) -> bytes:
    """A tensor as float32, row after row."""
    return x.detach().to(torch.float32).cpu().numpy().astype(FLOAT, copy=False).tobytes()


def shaped(data: bytes | memoryview, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Arrays of these shapes, one after the other in `data`, without a copy. Raises FrameError unless it holds just them, all finite."""
    expect(len(data) == FLOAT.itemsize * size(shapes), "values of matrices have another length")
    flat = np.frombuffer(data, FLOAT)
    expect(bool(np.isfinite(flat).all()), "values of matrices hold NaN or infinity")
    return cut(flat, shapes)


def size(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return how many numbers arrays of these shapes hold."""
    return sum(map(math.prod, shapes))


def cut(flat: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """A vector [size(shapes)] as views of these shapes."""
    ends = itertools.accumulate(map(math.prod, shapes))
    return [
        flat[end - math.prod(shape) : end].reshape(shape)
        for end, shape in zip(ends, shapes, strict=True)
    ]


def _read(entry: Entry, data: memoryview) -> tuple[Update, memoryview]:
    """Return the update of one tensor, and the rest of the body."""
    shape, k = shape_of(entry), VALUES
    if shape and entry.numel:
        first, data = take(data, 1)
        k = first[0]
    if k == VALUES:
        mine, rest = take(data, FLOAT.itemsize * entry.numel)
        return Dense(*shaped(mine, [(entry.numel,)])), rest
    rows, columns = shape
    expect(k * (rows + columns) < entry.numel, "factors are longer than their matrix")
    mine, rest = take(data, FLOAT.itemsize * k * (rows + columns))
    left, right = shaped(mine, [(rows, k), (columns, k)])
    lengths = np.square(left, dtype=np.float64).sum(0)
    expect(
        bool((abs(lengths - 1) < 1e-5).all()), "a left factor has columns of another length than 1"
    )
    return Product(left, right), rest
