"""One-bit quantization.

Seide, Fu, Droppo, Li, Yu: 1-bit stochastic gradient descent and its application to data-parallel distributed training of speech DNNs.
Interspeech 2014.

    C(x)_ij = the mean of the entries ≥ 0 of column j where x_ij ≥ 0, and of those < 0 elsewhere

A matrix is a tensor [out, in, …], its columns are the entries with one index behind `out`: `in` of a linear layer, in·h·w of
a convolution. Tensors of one dimension, and vectors without a layout, are one column. The paper quantizes with the error feedback that is
memories/residual.py here. A vector of which no mean reaches float32's normal numbers is sent as codecs/spike.py.

Contraction: a side, k entries of one column with the mean m, loses its square less k·m², which is at least its square/k. The sides whose
mean is below 2⁻¹²⁶, which float32 may not hold, lose all they have at worst, together no more than (n−1)²·2⁻²⁵²; as some side has a mean
above that, gains come to more than 2⁻²⁵². So the gains are at least ‖x‖²/n², and ‖x‖²/n where there are no such sides.

    body   for each tensor that is not empty:  signs (one bit each, 1 = not negative, padded to a byte);
           means ≥ 0 of all columns, then means < 0 of all columns, as float32, 0 where a column has no such entry
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from .. import kernels
from ..kernels import sums
from ..layout import Entry, Layout
from . import frame, spike
from .base import Codec, Context, expect
from .frame import Section
from .selection import take
from .update import Bits, Sections, Update

MEAN = np.dtype("<f4")
LEAST = 2.0**-149  # the magnitude next to zero


@dataclass(frozen=True)
class OneBit(Codec):
    """One bit a coordinate: the mean of its side of its column."""

    name: ClassVar[str] = "onebit"
    id: ClassVar[int] = 11
    source: ClassVar[str] = "Seide et al. 2014"

    def contraction(self, numel: int) -> float:
        return (1 - 2.0**-20) / max(numel, 1) ** 2

    def longest_section(self, numel: int) -> int:
        # Columns of one entry take the most.
        return max(len(frame.varint(numel)) + 9 * numel, spike.longest(numel))

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        layout = context.layout or Layout.flat(x.numel())
        x = x.cpu()  # where the sums have an order
        tensors = [x[e.span] for e in layout if e.numel]
        means = [_means(x[e.span], columns(e)) for e in layout if e.numel]
        if spike.needed(max((abs(m).max() for m in means), default=0.0), x.numel()):
            return spike.pack(x)
        parts = [
            kernels.bits.signs(v) + m.astype(MEAN, copy=False).tobytes()
            for v, m in zip(tensors, means, strict=True)
        ]
        return Section(x.numel(), b"".join(parts))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        if section.count < max(layout.numel, 1):
            return _unpack_spike(section, layout)
        parts, largest, rest = [], 0.0, memoryview(section.body)
        for e in layout:
            if e.numel:
                signs, rest = take(rest, (e.numel + 7) // 8)
                means, rest = take(rest, 2 * columns(e) * MEAN.itemsize)
                update = _unpack_tensor(
                    signs, np.frombuffer(means, MEAN).astype(np.float32).reshape(2, -1), e
                )
                parts.append((e.span, update))
                largest = max(largest, update.high.max(), -update.low.min())
        expect(not len(rest), "a section of one-bit tensors goes on")
        expect(
            not spike.needed(largest, layout.numel),
            "a section of one-bit tensors has no mean that float32 holds",
        )
        return parts[0][1] if len(parts) == 1 else Sections(layout.numel, tuple(parts))


def columns(entry: Entry) -> int:
    """Return the number of columns of a nonempty tensor."""
    return entry.numel // entry.shape[0] if len(entry.shape) > 1 else 1


def _means(x: Tensor, columns: int) -> np.ndarray:
    """Return the values of a 1 and a 0 in each column of x, row by row: float32 [2, columns]."""
    totals, counts = sums.column_sides(x, columns)
    return (totals / counts.clip(1)).astype(np.float32)


def _unpack_tensor(signs: memoryview, means: np.ndarray, entry: Entry) -> Bits:
    raw, (high, low) = kernels.bits.read_bits(signs, entry.numel), means
    grid = kernels.bits.flags(raw, 0, entry.numel).reshape(-1, high.size)
    positive, negative = grid.any(axis=0), ~grid.all(axis=0)  # columns that have such entries
    expect(bool(np.isfinite(means).all()), "a one-bit tensor has a mean that is not finite")
    expect(
        not np.signbit(high).any() and not high[~positive].any(),
        "a one-bit tensor has a mean ≥ 0 that is none",
    )
    expect(
        bool((low[negative] < 0).all()) and not low[~negative].view(np.int32).any(),
        "a one-bit tensor has a mean < 0 that is none",
    )
    return Bits(entry.numel, raw, high, low)


def _unpack_spike(section: Section, layout: Layout) -> Update:
    alone = spike.unpack(section, layout.numel)
    for position, value in zip(alone.positions.tolist(), alone.values.tolist(), strict=True):
        entry = layout.entry_at(position)
        rows = entry.numel // columns(entry)
        least = (
            abs(value) + (rows - 1) * LEAST * (value < 0)
        ) / rows  # the mean, were the rest of the column next to nothing
        expect(
            spike.needed(np.float32(least), layout.numel),
            "a section of one coordinate could have been one of bits",
        )
    return alone
