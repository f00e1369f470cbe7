"""One-bit quantization with two means per column.

Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech DNNs", Interspeech
2014.

An entry ≥ 0 of a matrix is decoded as the mean of all entries ≥ 0 of its column. A negative entry is decoded as the mean of all negative
entries of its column. A tensor with two or more dimensions is treated as a matrix: the rows are the first dimension, and the columns are
all other dimensions, flattened. Tensors of one dimension, and vectors without a layout, are treated as one column. The paper combines the
quantizer with error feedback (memories/residual.py). If all means are subnormal float32 numbers, only the largest coordinate is sent
(codecs/largest_coordinate.py).

For vectors of n coordinates, the contraction factor is δ = 1/n if no mean is subnormal. If some means are subnormal, and thus less exact,
it is δ = 1/n², which is therefore the declared factor.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .. import kernels
from ..kernels import sums
from ..layout import Entry, Layout
from . import floats, frame, largest_coordinate
from .base import Codec, Context, expect
from .frame import Section
from .selection import take
from .update import Bits, Sections, Update


@dataclass(frozen=True)
class OneBit(Codec):
    """A codec that sends one bit per coordinate. The bit selects one of two means of the coordinate's column."""

    name = "onebit"
    id = 11
    source = "Seide et al. 2014"

    def contraction(self, numel: int) -> float:
        return (1 - 2.0**-20) / max(numel, 1) ** 2

    def longest_section(self, numel: int) -> int:
        # A section is longest if every column of the layout has only one entry.
        return max(len(frame.varint(numel)) + 9 * numel, largest_coordinate.max_bytes(numel))

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        layout = context.layout or Layout.flat(x.numel())
        x = x.cpu()  # On the CPU, sums are computed in a fixed order
        tensors = [x[e.span] for e in layout if e.numel]
        means = [_means(x[e.span], columns(e)) for e in layout if e.numel]
        if largest_coordinate.is_needed(max((abs(m).max() for m in means), default=0.0), x.numel()):
            return largest_coordinate.pack(x)
        pairs = zip(map(kernels.bits.signs, tensors), means, strict=True)
        parts = [signs + floats.pack(mean, floats.FP32) for signs, mean in pairs]
        return Section(x.numel(), b"".join(parts))

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        if section.count < max(layout.numel, 1):
            return largest_coordinate.unpack(section, layout.numel)
        parts, rest = [], memoryview(section.body)
        for e in layout:
            if e.numel:
                signs, rest = take(rest, (e.numel + 7) // 8)
                means, used = floats.unpack(rest, 2 * columns(e), floats.FP32)
                parts.append((e.span, _unpack_tensor(signs, means.astype(np.float32), e)))
                rest = rest[used:]
        expect(not len(rest), f"{len(rest)} bytes follow the data of the last tensor")
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
    # For each column: whether it has entries ≥ 0, and whether it has negative entries
    positive, negative = grid.any(axis=0), ~grid.all(axis=0)
    high_fits = not np.signbit(high).any() and not high[~positive].any()
    low_fits = bool((low[negative] < 0).all()) and not low[~negative].view(np.int32).any()
    expect(high_fits, "a column has an invalid mean of its entries ≥ 0")
    expect(low_fits, "a column has an invalid mean of its negative entries")
    return Bits(entry.numel, raw, high, low)
