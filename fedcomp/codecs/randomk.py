"""Random-k sparsification: only a random sample of the coordinates is sent.

The variant by=uniform is described by Konečný et al., "Federated learning: strategies for improving communication efficiency", 2016 (random
masks), and by Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018. It draws k of n coordinates without replacement.
With the option `scaled`, the drawn values are multiplied by n/k, so that the codec is unbiased. The receiver draws the positions again from
the seed in the frame, so they are not sent. Drawn coordinates are sent even if they are zero. Frames with the same seed and values=fp32 can
be added.

The variant by=magnitude is due to Wangni et al., "Gradient sparsification for communication-efficient distributed optimization", NeurIPS
2018. With by=magnitude, coordinate i is sent with the probability p_i = min(1, |x_i|/m), where the threshold m is such that Σ p_i = k. Of
all probabilities with which k coordinates are sent on average, these p_i minimize the variance. With `scaled`, the value sent is x_i/p_i,
which is x_i if |x_i| ≥ m, and ±m otherwise. A frame contains the positions of the sent coordinates. Their number varies, and zeros are
never sent.

In the paper of Wangni et al., the user gives the variance, and algorithm 3 computes the probabilities iteratively. Here, the user gives the
mean number k of coordinates, and the threshold m is computed exactly. Then m is rounded down to float32, so slightly more than k
coordinates can be sent on average.

For both variants, the contraction factor without `scaled` is δ = k/n. With `scaled`, the codec is unbiased with the variance bound ω = n/k
− 1, except that values=fp16 rounds the values, and that scaled values are clipped to the range of float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..kernels import Chosen, Rows, philox, rounding
from . import floats, selection
from .base import Context, expect, require
from .frame import EMPTY, Section, varint
from .levels import LARGEST, round_down
from .selection import Unpacked

# Index of the random stream that draws positions. In a product of codecs, such as `randomk+qsgd`, both codecs get the same seed. The second
# codec may round values with random numbers of stream 0. The drawn positions must be independent of these numbers.
STREAM = 7
# With by=magnitude, `drop_small` also draws from stream 0. It uses the seed XOR DROP_MASK, so that its random numbers differ from those of
# the second codec.
DROP_MASK = 1 << 63
# Flag of values in which magnitudes below the threshold m are replaced by m, with all other values as float32. With float16, the flag is
# larger by 1.
COMMON_MAGNITUDE = 2
CLIP_ELEMENTS = 1 << 24  # number of elements of a vector that are processed at a time


@dataclass(frozen=True)
class RandomK(selection.DensityCodec):
    """A codec that sends a random sample of the coordinates: a uniform sample, or a sample that prefers large magnitudes."""

    density: float = 1 / 100  # Fraction of the coordinates sent
    # `uniform` draws all coordinates with the same probability; `magnitude` prefers coordinates with large magnitudes.
    by: Literal["uniform", "magnitude"] = "uniform"
    # Scale values so that the codec is unbiased. Use this option with the memories `none` and `diana`, but not with error feedback, which
    # would diverge.
    scaled: bool = False
    values: floats.Precision = "fp32"  # precision of the values
    name = "randomk"
    id = 7
    source = "Konečný et al. 2016, Wangni et al. 2018"
    seeded = True

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
        return exact if self.values == "fp32" else exact * (1 - floats.FP16_ERROR)

    def variance(self, numel: int) -> float | None:
        if not self.scaled or self.values != "fp32" or not numel:
            return None
        return numel / max(self.count(numel), 1) - 1

    def max_count(self, numel: int) -> int:
        return self.count(numel) if self.draws else numel

    def value_bytes(self, count: int) -> int:
        return floats.size(count, floats.flag(self.values))

    def longest_section(self, numel: int) -> int | None:
        k = self.count(numel)
        return len(varint(numel)) + 1 + len(varint(k)) + self.value_bytes(k) if self.draws else None

    def draw_positions(self, numel: int, count: int, seed: int) -> np.ndarray:
        return philox.sample(numel, count, seed, STREAM)

    def choose(self, rows: Rows, seeds: Sequence[int]) -> tuple[Chosen, Tensor]:
        numel, device = rows[0].numel(), rows[0].device
        k = self.count(numel)
        # With by=magnitude, each vector has its own threshold m.
        thresholds = [] if self.draws else [drop_threshold(row, k) for row in rows]
        if self.draws:
            positions = [self.draw_positions(numel, k, seed) for seed in seeds]
        else:
            positions = [drop_small(*call) for call in zip(rows, thresholds, seeds, strict=True)]
        counts = np.array([row.size for row in positions], np.int64)
        chosen = Chosen(torch.from_numpy(np.concatenate(positions)).to(device), counts)
        values = kernels.values_at(rows, chosen)
        if self.scaled and self.draws:
            scaled = values.to(torch.float64) * (numel / max(k, 1))
            values = scaled.clamp(-LARGEST, LARGEST).to(torch.float32)
        elif self.scaled:
            m = torch.from_numpy(np.array(thresholds, np.float32).repeat(counts)).to(device)
            values = values.where(values.abs() >= m, m.copysign(values))
        return chosen, values

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        if self.draws or not self.scaled:
            return floats.pack_runs(values, counts, self.values)
        runs = kernels.split_runs(values, counts)
        return [self._pack_scaled(run) if run.size else (0, b"") for run in runs]

    def _pack_scaled(self, values: np.ndarray) -> tuple[int, bytes]:
        magnitudes, flag = np.abs(values), floats.flag(self.values)
        larger = magnitudes > magnitudes.min()
        bits = kernels.pack_signs(larger) + kernels.pack_signs(values[~larger] > 0)
        common = magnitudes.min().astype("<f4").tobytes()
        return flag | COMMON_MAGNITUDE, common + bits + floats.pack(values[larger], flag)

    def unpack_values(self, flag: int, data: memoryview, count: int, seed: int) -> Unpacked:
        if flag < COMMON_MAGNITUDE:
            return floats.unpack(data, count, flag)
        head, rest = selection.take(data, 4)
        m = selection.unpack_magnitude(head)
        bits, rest = selection.take(rest, -(-count // 8))
        larger = kernels.unpack_signs(bits, count)
        n_larger = int(np.count_nonzero(larger))
        expect(n_larger < count, "the frame states a common magnitude, but no value has it")
        signs, rest = selection.take(rest, -(-(count - n_larger) // 8))
        sent, used = floats.unpack(rest, n_larger, flag - COMMON_MAGNITUDE)
        values = np.empty(count, np.float32)
        values[larger] = sent
        values[~larger] = np.where(kernels.unpack_signs(signs, count - n_larger), m, -m)
        return values, len(head) + len(bits) + len(signs) + used

    def _merge_sections(self, sections: Sequence[Section]) -> Section:
        if not any(section.count for section in sections):
            return EMPTY
        read = [self._mergeable_values(section) for section in sections]
        alike = len({s.count for s in sections}) == len({values.size for values in read}) == 1
        require(alike, "frames of different densities cannot be merged; use one density")
        total = floats.add(read)
        head = bytes([selection.DRAWN]) + varint(total.size)
        return Section(sections[0].count, head + floats.pack(total, floats.FP32))

    def _mergeable_values(self, section: Section) -> np.ndarray:
        first, data = selection.take(memoryview(section.body), 1)
        require(
            first[0] == selection.DRAWN,
            "only frames with float32 values at positions drawn from the seed can be merged",
        )
        return self._read_drawn(floats.FP32, data, section.count, 0)


def drop_small(x: Tensor, m: float, seed: int) -> np.ndarray:
    """Drop coordinates of x with small magnitudes at random. Return the positions of the remaining coordinates, as int64, ascending.

    A coordinate with |x_i| < m remains with probability |x_i|/m. Coordinates with |x_i| ≥ m always remain.
    """
    return np.flatnonzero(rounding.to_multiples(x, m, m, seed ^ DROP_MASK))


def drop_threshold(x: Tensor, k: int) -> float:
    """Return the threshold m > 0 for which Σ min(1, |x_i|/m) = k, rounded down to float32.

    If x has at most k nonzeros, return a threshold m ≤ 1 that drops no nonzero.
    """
    selected = x[kernels.top_k([x], k).positions].abs().to(torch.float32)
    largest = np.sort(selected.cpu().numpy()).astype(np.float64)
    if int(x.count_nonzero()) <= k:
        return float(largest.min(initial=1.0))
    cut = 0.0
    for piece in x.split(CLIP_ELEMENTS):
        cut += kernels.norm1(piece.to(torch.float32).clamp(-largest[0], largest[0]))
    # Let j be the number of coordinates, among the k largest, whose magnitude is below m. Then Σ min(1, |x_i|/m) = k − j + S/m, where S is
    # the sum of all magnitudes below m. The sum equals k if m = S/j.
    means = (max(cut - k * largest[0], 0.0) + largest.cumsum()) / np.arange(1, k + 1)
    return round_down(float(means[means >= largest][-1]))
