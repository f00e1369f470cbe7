"""The base class of codecs that send matrices as products of two factors.

A tensor with two or more dimensions is treated as a matrix: the rows are the first dimension, and the columns are all other dimensions,
flattened. A matrix is decoded as left·rightᵀ, where `left` [rows, k] and `right` [columns, k] are its factors, and the columns of `left`
have norm 1. The values of a matrix are sent instead of its factors if the factors would not be smaller, or if a number in a factor would
exceed the range of float32. Tensors with fewer than two dimensions are always sent as values. Values and factors are sent as float32.

The bytes of a frame depend on the CPU or GPU of the encoder, because numerical libraries factorize differently. The decoder computes sums
in a fixed order, so every machine decodes a frame to the same bits.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, FrameError
from ..layout import Entry, Layout
from . import floats
from .base import Codec, Context, expect
from .frame import Section
from .levels import LARGEST
from .selection import take
from .update import Dense, Sections, Update

FLOAT = np.dtype("<f4")
# If no entry of a matrix has a magnitude above SMALLEST, the matrix is sent as values, because factors would be imprecise.
SMALLEST = 2.0**-100
# The first byte of an encoded matrix is VALUES if its values are sent, and otherwise the number of columns of its factors, at most MAX_RANK
# (0 for a zero matrix).
VALUES, MAX_RANK = 255, 254
CHUNK = 1 << 16  # number of elements of left·rightᵀ that are computed at a time


def shape_of(entry: Entry) -> tuple[int, int] | None:
    """Return (rows, columns) of a tensor that is treated as a matrix, or None for a tensor with fewer than two dimensions."""
    return (entry.shape[0], math.prod(entry.shape[1:])) if len(entry.shape) > 1 else None


@dataclass(frozen=True)
class LowRankUpdate(Update):
    """The update of a matrix, stored as two factors: left · rightᵀ, flattened in row-major order."""

    left: np.ndarray  # [rows, k] float32
    right: np.ndarray  # [columns, k] float32
    positions = None

    @property
    def numel(self) -> int:
        return len(self.left) * len(self.right)

    def add_to(self, into: Tensor, weight: float = 1.0) -> None:
        Dense(self.block(0, self.numel)).add_to(into, weight)

    def block(self, start: int, stop: int) -> np.ndarray:
        columns, right = len(self.right), self.right.astype(np.float64)
        first, last, step = start // columns, -(-stop // columns), max(1, CHUNK // columns)
        out = np.empty((last - first, columns), np.float32)
        for a in range(first, last, step):
            rows = self.left[a : min(a + step, last)].astype(np.float64)
            total = np.zeros((len(rows), columns))
            for u, v in zip(rows.T, right.T, strict=True):
                total += np.multiply.outer(u, v)
            out[a - first : a - first + len(rows)] = total.clip(-LARGEST, LARGEST)
        return out.ravel()[start - first * columns : stop - first * columns]


@dataclass(frozen=True)
class MatrixCodec(Codec):
    """A codec that sends matrices as two factors. Subclasses implement `factor`."""

    portable = False

    @abstractmethod
    def factor(
        self, matrix: Tensor, tensor: int, seed: int, context: Context
    ) -> tuple[Tensor, Tensor] | None:
        """Factor a finite nonzero float64 matrix. Return float64 factors left [rows, k] and right [columns, k] with left · rightᵀ ≈ matrix.

        Return None to send the matrix as values. `tensor`: index of the matrix in `context.layout`, which is 0 with @layer.
        """

    def needs_layout(self) -> bool:
        """Return whether the codec needs the shapes of the tensors."""
        return True

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        if context.layout is None:
            raise self._needs_shapes()
        filled = ((i, e) for i, e in enumerate(context.layout) if e.numel)
        tensors = [self._tensor(x[e.span], i, e, seed, context) for i, e in filled]
        return Section(x.numel(), b"".join(tensors))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        expect(
            section.count == layout.numel,
            f"{section.count} coordinates are encoded; expected {layout.numel}",
        )
        parts, data = [], memoryview(section.body)
        for e in layout:
            update, data = _read(e, data)
            parts.append((e.span, update))
        expect(not len(data), "bytes follow the data of the last tensor")
        return Sections(layout.numel, tuple(parts))

    def open_batch(
        self, frames: Sequence[bytes], numel: int, layout: Layout | None = None
    ) -> list[Update | FrameError]:
        if layout is None and self.needs_layout():
            raise self._needs_shapes()
        return super().open_batch(frames, numel, layout)

    def _needs_shapes(self) -> ConfigError:
        return ConfigError(
            f"{self} needs the shapes of the tensors; give layout=fedcomp.Layout.of(model), or use a codec for vectors, such as stc"
        )

    def _tensor(self, x: Tensor, tensor: int, entry: Entry, seed: int, context: Context) -> bytes:
        shape = shape_of(entry)
        if shape is None:
            return to_bytes(x)
        matrix = x.reshape(shape).contiguous().to(torch.float64)
        largest = float(matrix.abs().max())
        if not largest:
            return bytes([0])
        factors = self.factor(matrix, tensor, seed, context) if largest > SMALLEST else None
        if factors is None or not bool((factors[1].abs() <= LARGEST).all()):
            return bytes([VALUES]) + to_bytes(x)
        return bytes([factors[0].shape[1]]) + to_bytes(factors[0]) + to_bytes(factors[1])


def to_bytes(x: Tensor) -> bytes:
    """Convert the elements of a tensor to float32, in row-major order, and return their bytes."""
    return floats.pack(x.detach().to(torch.float32).cpu().numpy(), floats.FP32)


def read_arrays(data: bytes | memoryview, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Split `data` into consecutive float32 arrays of the given shapes, without copying.

    Raises ValueError if `data` has the wrong length or holds NaN or infinity.
    """
    count = total_numel(shapes)
    if len(data) != FLOAT.itemsize * count:
        raise ValueError(f"{len(data)} bytes cannot hold {count} float32 values")
    flat = np.frombuffer(data, FLOAT)
    if not np.isfinite(flat).all():
        raise ValueError("the float32 values contain NaN or infinity")
    return as_arrays(flat, shapes)


def total_numel(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the total number of elements in arrays of the given shapes."""
    return sum(map(math.prod, shapes))


def as_arrays(flat: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Split a vector into consecutive views of the given shapes."""
    ends = itertools.accumulate(map(math.prod, shapes))
    runs = np.split(flat, list(ends)[:-1])
    return [run.reshape(shape) for run, shape in zip(runs, shapes)]


def _read(entry: Entry, data: memoryview) -> tuple[Update, memoryview]:
    """Decode the next tensor in a body, and return its update and the remaining bytes."""
    shape, k = shape_of(entry), VALUES
    if shape and entry.numel:
        first, data = take(data, 1)
        k = first[0]
    if shape is None or k == VALUES:
        values, used = floats.unpack(data, entry.numel, floats.FP32)
        return Dense(values), data[used:]
    rows, columns = shape
    numbers = k * (rows + columns)
    expect(numbers < entry.numel, "the factors of a matrix are not smaller than the matrix")
    values, used = floats.unpack(data, numbers, floats.FP32)
    left, right = as_arrays(values, [(rows, k), (columns, k)])
    has_norm_1 = abs(np.square(left, dtype=np.float64).sum(0) - 1) < 1e-5
    expect(bool(has_norm_1.all()), "a column of a matrix factor does not have norm 1")
    return LowRankUpdate(left, right), data[used:]
