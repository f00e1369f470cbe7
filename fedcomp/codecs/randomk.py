"""Random-k sparsification: random masks, subsampling, dropping.

    C(x)_i = x_i if i is one of k coordinates drawn without replacement, else 0        scaled: n/k·x_i, so that E C(x) = x

Konečný, McMahan, Yu, Richtárik, Suresh, Bacon: Federated learning: strategies for improving communication efficiency. 2016 (random masks);
Stich, Cordonnier, Jaggi: Sparsified SGD with memory. NeurIPS 2018. What is drawn follows from the seed in the frame, so no positions are
sent; zeros that are drawn are sent as well. Frames of one seed add, coordinate by coordinate.

by=magnitude: Wangni, Wang, Liu, Zhang: Gradient sparsification for communication-efficient distributed optimization. NeurIPS 2018.

    coordinate i is kept with p_i = min(1, |x_i|/m), Σ p_i = k: of all ways to keep k in the mean, the one of least variance
    C(x)_i = x_i if it was kept, else 0        scaled: x_i/p_i, which is x_i from m on and ±m below

Here k is given, where the paper is given a variance; m is found exactly, where its algorithm 3 goes by steps, and cut to float32, so that
Σ p_i ≥ k. How many a frame holds varies. Positions are sent, zeros are not.

Without `scaled` both contract, δ = k/n in the mean. With it both are unbiased, ω = n/k − 1, but for values in float16, which are rounded,
and for n/k·x_i above the largest float32, which is cut there.

    values   codecs/floats.py; scaled by magnitude (flag + 2): m as float32, a bit for each value that is larger, a sign for each that is
             not (1 = positive), each padded to a byte, then the larger ones; around them codecs/selection.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..kernels import Chosen, Rows, draw, rounding
from . import floats, selection
from .base import Context, expect
from .frame import EMPTY, Section, read_varint, varint
from .levels import LARGEST, below

STREAM = 7  # of the words that draw positions: those of stream 0 may round the values
APART = 1 << 63  # by this bit another seed drops coordinates than the one that may round them
COMMON = 2  # flag: all but the larger values have one magnitude
PIECE = 1 << 24  # elements that are cut at m together


@dataclass(frozen=True)
class RandomK(selection.Share):
    """Coordinates drawn at random, without their positions; or dropped at random, the more likely the smaller they are."""

    density: float = 1 / 100  # share of coordinates sent
    by: Literal["uniform", "magnitude"] = "uniform"  # what decides how likely a coordinate is sent
    scaled: bool = False  # true: unbiased, for memories none and diana; false: for error feedback
    values: floats.Precision = "fp32"  # precision of what is sent
    name: ClassVar[str] = "randomk"
    id: ClassVar[int] = 7
    source: ClassVar[str] = "Konečný et al. 2016, Wangni et al. 2018"
    seeded: ClassVar[bool] = True

    @property
    def draws(self) -> bool:
        return self.by == "uniform"

    @property
    def linear(self) -> bool:
        return self.draws and self.values == "fp32"

    def contraction(self, numel: int) -> float | None:
        if self.scaled:
            return None
        exact = self.count(numel) / max(numel, 1)
        return exact if self.values == "fp32" else exact * (1 - floats.ROUNDED)

    def variance(self, numel: int) -> float | None:
        if not self.scaled or self.values != "fp32" or not numel:
            return None
        return numel / max(self.count(numel), 1) - 1

    def most(self, numel: int) -> int:
        return self.count(numel) if self.draws else numel

    def value_bytes(self, count: int) -> int:
        return floats.size(count, floats.flag(self.values))

    def longest_section(self, numel: int) -> int | None:
        k = self.count(numel)
        return len(varint(numel)) + 1 + len(varint(k)) + self.value_bytes(k) if self.draws else None

    def implied(self, numel: int, count: int, seed: int) -> np.ndarray:
        return draw.positions(numel, count, seed, STREAM)

    def select(self, rows: Rows, seeds: Sequence[int]) -> Chosen:
        return self._drawn(rows, seeds, self._levels(rows))

    def choose(self, rows: Rows, seeds: Sequence[int]) -> tuple[Chosen, Tensor]:
        levels = self._levels(rows)
        chosen = self._drawn(rows, seeds, levels)
        values = kernels.values_at(rows, chosen)
        if self.scaled and self.draws:
            values = times(values, rows[0].numel() / max(chosen.counts[0], 1))
        elif self.scaled:
            m = np.array(levels, np.float32).repeat(chosen.counts)
            m = torch.from_numpy(m).to(values.device)
            values = values.where(values.abs() >= m, m.copysign(values))
        return chosen, values

    def _levels(self, rows: Rows) -> list[float]:
        """Return m of each vector, 0 where it is not needed."""
        return [0.0 if self.draws else level(row, self.count(row.numel())) for row in rows]

    def _drawn(self, rows: Rows, seeds: Sequence[int], levels: Sequence[float]) -> Chosen:
        numel = rows[0].numel()
        found = [
            self.implied(numel, self.count(numel), seed) if self.draws else kept(row, m, seed)
            for row, seed, m in zip(rows, seeds, levels, strict=True)
        ]
        counts = np.array([positions.size for positions in found], np.int64)
        return Chosen(torch.from_numpy(np.concatenate(found)).to(rows[0].device), counts)

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        if self.draws or not self.scaled:
            return floats.pack_runs(values, counts, self.values)
        runs = selection.runs(values, counts)
        return [self._pack_scaled(run) if run.size else (0, b"") for run in runs]

    def _pack_scaled(self, values: np.ndarray) -> tuple[int, bytes]:
        magnitudes, flag = np.abs(values), floats.flag(self.values)
        larger = magnitudes > magnitudes.min()
        bits = kernels.pack_signs(larger) + kernels.pack_signs(values[~larger] > 0)
        return flag | COMMON, magnitudes.min().astype("<f4").tobytes() + bits + floats.pack(
            values[larger], flag
        )

    def unpack_values(
        self, flag: int, data: memoryview, count: int, seed: int
    ) -> tuple[np.ndarray, int]:
        if flag < COMMON:
            return floats.unpack(data, count, flag)
        head, rest = selection.take(data, 4)
        m = selection.unpack_magnitude(head)
        bits, rest = selection.take(rest, -(-count // 8))
        larger = kernels.unpack_signs(bits, count)
        few = int(np.count_nonzero(larger))
        expect(few < count, "a section has no value of the common magnitude")
        signs, rest = selection.take(rest, -(-(count - few) // 8))
        sent, used = floats.unpack(rest, few, flag - COMMON)
        values = np.empty(count, np.float32)
        values[larger] = sent
        values[~larger] = np.where(kernels.unpack_signs(signs, count - few), m, -m)
        return values, len(head) + len(bits) + len(signs) + used

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        if not any(section.count for section in sections):
            return EMPTY
        read = [_values(section) for section in sections]
        sizes = {
            (section.count, values.size) for section, values in zip(sections, read, strict=True)
        }
        expect(len(sizes) == 1, "frames of different densities cannot be merged")
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.sum(read, axis=0, dtype=np.float32)
        expect(bool(np.isfinite(total).all()), "the sum of the frames is not finite")
        return Section(
            sections[0].count,
            bytes([selection.IMPLIED]) + varint(total.size) + floats.pack(total, floats.FP32),
        )


def kept(x: Tensor, m: float, seed: int) -> np.ndarray:
    """Return positions of the coordinates that are not dropped: |x| is rounded to 0 or to m, and up where it is larger."""
    return np.flatnonzero(rounding.to_multiples(x, m, m, seed ^ APART))


def level(x: Tensor, k: int) -> float:
    """The float32 m > 0 with Σ min(1, |x_i|/m) = k, cut off; where no more than k are not zero, the smallest of them, or 1."""
    largest = np.sort(
        x[kernels.top_k([x], k).positions].abs().to(torch.float32).cpu().numpy()
    ).astype(np.float64)
    if not largest.size or int(x.count_nonzero()) <= k:
        return float(largest.min(initial=1.0)) if largest.size else 1.0
    pieces = (x[start : start + PIECE].to(torch.float32) for start in range(0, x.numel(), PIECE))
    cut = 0.0
    for piece in pieces:
        cut += kernels.norm1(piece.clamp(-largest[0], largest[0]))
    # Where the i smallest of the k largest are not sure to be kept, m is what they and all below them add up to, over i.
    means = (max(cut - k * largest[0], 0.0) + largest.cumsum()) / np.arange(1, k + 1)
    return below(float(means[means >= largest][-1]))


def times(values: Tensor, factor: float) -> Tensor:
    """factor · values in float32, cut at its largest number."""
    return (values.to(torch.float64) * factor).clamp(-LARGEST, LARGEST).to(torch.float32)


def _values(section: Section) -> np.ndarray:
    """The values, float32, in a section of drawn positions. Raises FrameError."""
    first, data = selection.take(memoryview(section.body), 1)
    expect(
        first[0] == selection.IMPLIED,
        "only frames with drawn positions and values in float32 can be merged",
    )
    count, start = read_varint(data)
    expect(
        0 < count <= section.count,
        f"a section claims {count} values for {section.count} coordinates",
    )
    values, used = floats.unpack(data[start:], count, floats.FP32)
    expect(start + used == len(data), "bytes follow the last value of a section")
    return values
