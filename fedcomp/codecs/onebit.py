"""One-bit quantization with two means per column.

Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech DNNs", Interspeech
2014.

An entry ≥ 0 of a matrix is decoded as the mean of all entries ≥ 0 of its column. A negative entry is decoded as the mean of all negative
entries of its column. A tensor with two or more dimensions is treated as a matrix: the rows are the first dimension, and the columns are
all other dimensions, flattened. Tensors of one dimension, and vectors without a layout, are treated as one column. The paper combines the
quantizer with error feedback (memories/residual.py). If all means are subnormal float32 numbers, only the largest coordinate is sent
(codecs/spike.py).

For a vector of n coordinates, the contraction factor is at least 1/n if all means are normal float32 numbers: replacing k entries of one
sign by their mean leaves a squared error of at most (1 − 1/k) times their squared norm. If some means are subnormal, and thus less exact,
the contraction factor is at least 1/n².

Format of the body (see codecs/frame.py), for each nonempty tensor:

    the signs, one bit each (0 = negative), padded to a byte;
    the mean of the entries ≥ 0 of each column, as float32, or 0 for a column without such entries;
    the mean of the negative entries of each column, as float32, or 0 for a column without such entries.
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
SMALLEST = 2.0**-149  # the smallest positive float32


@dataclass(frozen=True)
class OneBit(Codec):
    """A codec that sends one bit per coordinate. The bit selects one of two means of the coordinate's column."""

    name: ClassVar[str] = "onebit"
    id: ClassVar[int] = 11
    source: ClassVar[str] = "Seide et al. 2014"

    def contraction(self, numel: int) -> float:
        return (1 - 2.0**-20) / max(numel, 1) ** 2

    def longest_section(self, numel: int) -> int:
        # A section is longest if every column of the layout has only one entry.
        return max(len(frame.varint(numel)) + 9 * numel, spike.max_bytes(numel))

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        layout = context.layout or Layout.flat(x.numel())
        x = x.cpu()  # On the CPU, sums are computed in a fixed order
        tensors = [x[e.span] for e in layout if e.numel]
        means = [_means(x[e.span], columns(e)) for e in layout if e.numel]
        if spike.is_needed(max((abs(m).max() for m in means), default=0.0), x.numel()):
            return spike.pack(x)
        pairs = zip(map(kernels.bits.signs, tensors), means, strict=True)
        parts = [signs + mean.astype(MEAN, copy=False).tobytes() for signs, mean in pairs]
        return Section(x.numel(), b"".join(parts))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        if section.count < max(layout.numel, 1):
            return _unpack_spike(section, layout)
        parts, largest, rest = [], 0.0, memoryview(section.body)
        for e in layout:
            if e.numel:
                signs, rest = take(rest, (e.numel + 7) // 8)
                means, rest = take(rest, 2 * columns(e) * MEAN.itemsize)
                update = _unpack_tensor(signs, np.frombuffer(means, MEAN).astype(np.float32), e)
                parts.append((e.span, update))
                largest = max(largest, update.high.max(), -update.low.min())
        expect(not len(rest), f"{len(rest)} bytes follow the data of the last tensor")
        is_normal = not spike.is_needed(largest, layout.numel)
        expect(is_normal, "all means are subnormal; expected only the largest coordinate")
        return parts[0][1] if len(parts) == 1 else Sections(layout.numel, tuple(parts))


def columns(entry: Entry) -> int:
    """Return the number of columns of a nonempty tensor."""
    return entry.numel // entry.shape[0] if len(entry.shape) > 1 else 1


def _means(x: Tensor, columns: int) -> np.ndarray:
    """Return the means of the entries ≥ 0 and of the negative entries in each column of x [rows · columns], as float32 [2, columns]."""
    totals, counts = sums.column_sides(x, columns)
    return (totals / counts.clip(1)).astype(np.float32)


def _unpack_tensor(signs: memoryview, means: np.ndarray, entry: Entry) -> Bits:
    raw, (high, low) = kernels.bits.read_bits(signs, entry.numel), means.reshape(2, -1)
    grid = kernels.bits.flags(raw, 0, entry.numel).reshape(-1, high.size)
    # for each column: does it have entries ≥ 0, and does it have negative entries?
    positive, negative = grid.any(axis=0), ~grid.all(axis=0)
    expect(bool(np.isfinite(means).all()), "a column mean is NaN or infinity")
    high_fits = not np.signbit(high).any() and not high[~positive].any()
    low_fits = bool((low[negative] < 0).all()) and not low[~negative].view(np.int32).any()
    expect(
        high_fits,
        "a column has an invalid mean of its entries ≥ 0",
    )
    expect(
        low_fits,
        "a column has an invalid mean of its negative entries",
    )
    return Bits(entry.numel, raw, high, low)


def _unpack_spike(section: Section, layout: Layout) -> Update:
    update = spike.unpack(section, layout.numel)
    for position, value in zip(update.positions.tolist(), update.values.tolist(), strict=True):
        entry = layout.entry_at(position)
        rows = entry.numel // columns(entry)
        # The column has the smallest possible mean magnitude if all its other entries are 0, or −SMALLEST if the value is negative.
        smallest_mean = (abs(value) + (rows - 1) * SMALLEST * (value < 0)) / rows
        is_needed = spike.is_needed(np.float32(smallest_mean), layout.numel)
        expect(is_needed, "only the largest coordinate is encoded; expected signs and means")
    return update
