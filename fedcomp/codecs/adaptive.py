"""Quantization to levels that follow the distribution of the values.

Lloyd, "Least squares quantization in PCM", IEEE Transactions on Information Theory 1982 (written 1957). Max, "Quantizing for minimum
distortion", IRE Transactions on Information Theory 1960. Stochastic rounding follows section 3 of Faghri et al., "Adaptive gradient
quantization for data-parallel SGD", NeurIPS 2020.

With rounding=nearest, every value is rounded to the nearest level. The values are divided into groups, and each level is the mean of a
group. The option `placement` determines the groups.

With rounding=stochastic, a value between two adjacent levels is rounded to one of these two levels at random, so that its expected value
does not change. The smallest value and the largest value are levels, and so is 0 if the vector has values of both signs. All remaining
levels are placed to keep the variance of the rounding error small. Let v_1 ≤ v_2 ≤ … be the values above a level a and up to a level c. For
one level between a and c, the position with the smallest variance is v_j with j = ⌈Σ_i (c − v_i)/(c − a)⌉.

With placement=quantiles, the levels (or, with rounding=nearest, the boundaries between groups) are quantiles of a distribution whose
density is proportional to the cube root of the density of the values. If there are many levels, this distribution minimizes the squared
error (Panter and Dite, "Quantization distortion in pulse-count modulation with nonuniform spacing of levels", Proceedings of the IRE 1951).
The code raises the density to the power 5/16 instead of 1/3, because square roots, unlike cube roots, are computed with the same bits on
every machine. With placement=lloyd, the levels of placement=quantiles are improved iteratively. With rounding=nearest, each iteration of
Lloyd's algorithm replaces each level by the mean of the values that are nearest to it. With rounding=stochastic, each iteration moves each
level to the position v_j.

With rounding=nearest, the squared error is at most ‖x‖², because rounding a group of values to their mean has no larger squared error than
rounding the values to 0. With rounding=stochastic, the codec is unbiased, with the variance bound ω = (√n − 1)/2 for n coordinates, as for
the codec `terngrad`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from .. import spec
from ..kernels import rounding
from ..layout import Layout
from . import floats
from . import levels as symbols
from .base import Codec, Context, expect
from .frame import Section, varint
from .selection import take
from .update import Dense, Update

MAX_LEVELS = 256
MAX_ITERATIONS = 100  # maximum number of iterations of Lloyd's algorithm


@dataclass(frozen=True)
class Adaptive(Codec):
    """A codec that quantizes every coordinate to one of at most 256 levels. The levels are part of the frame."""

    levels: int = 16  # More levels give longer frames and less quantization noise
    # Stochastic rounding is unbiased, but has a larger error than rounding to the nearest level.
    rounding: Literal["nearest", "stochastic"] = "nearest"
    # `quantiles` computes the levels in one step; the error is nearly as small as with `lloyd`.
    placement: Literal["lloyd", "quantiles"] = "lloyd"
    name = "adaptive"
    id = 13
    source = "Lloyd 1957, Faghri et al. 2020"
    whole = True

    def __post_init__(self) -> None:
        min_levels = 2 if self.rounding == "nearest" else 3
        spec.check_ranges(self, levels=(min_levels, MAX_LEVELS))

    def contraction(self, numel: int) -> float | None:
        return 0.0 if self.rounding == "nearest" else None

    def variance(self, numel: int) -> float | None:
        return None if self.rounding == "nearest" else (math.sqrt(max(numel, 1)) - 1) / 2

    def longest_section(self, numel: int) -> int:
        table = 1 + floats.size(self.levels, floats.FP32)
        return len(varint(numel)) + table + symbols.packed_bytes(numel, self.levels)

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        x = x.detach().cpu()
        levels = self.quantization_levels(x)
        codes = rounding.to_levels(x, levels, self.rounding == "nearest", seed)
        used = rounding.count(codes, levels.size) > 0
        if not used.all():
            levels = levels[used]
            codes = (used.cumsum() - 1).astype(np.uint8)[codes]
        body = bytes([levels.size - 1]) + floats.pack(levels, floats.FP32)
        if levels.size > 1:
            body += symbols.pack(codes, levels.size)
        return Section(x.numel(), body)

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        numel = layout.numel
        head, data = take(memoryview(section.body), 1)
        levels, used = floats.unpack(data, head[0] + 1, floats.FP32)
        expect(bool((levels[1:] > levels[:-1]).all()), "the quantization levels do not ascend")
        if levels.size == 1:
            expect(len(data) == used, "more bytes follow the only quantization level")
            return Dense(levels.repeat(numel).astype(np.float32))
        return Dense(levels.astype(np.float32)[symbols.unpack(data[used:], numel, levels.size)])

    def quantization_levels(self, x: Tensor) -> np.ndarray:
        """Return the quantization levels for a nonempty vector x [n] on the CPU, as float32, ascending."""
        values, counts = rounding.histogram(x)
        if self.rounding == "nearest":
            levels = _cell_means(values, counts, self.levels, self.placement)
        else:
            ends = rounding.extremes(x)
            levels = _least_variance(values, counts, ends, self.levels, self.placement)
        return np.unique(levels.astype(np.float32) + np.float32(0))  # −0 becomes 0


def _quantiles(values: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    """Divide ascending values into `size` cells between quantiles. Return the cell of each value. `counts`: how often each value occurs."""
    widths = np.gradient(values)
    density = counts / widths
    weights = widths * np.sqrt(np.sqrt(density * np.sqrt(np.sqrt(density))))
    ends = weights.cumsum()
    return np.minimum(((ends - weights / 2) * (size / ends[-1])).astype(np.int64), size - 1)


def _cell_means(values: np.ndarray, counts: np.ndarray, size: int, placement: str) -> np.ndarray:
    """Return at most `size` levels for rounding to the nearest level. The arguments are those of `_quantiles`."""
    if values.size <= size:
        return values
    cells, sums = _quantiles(values, counts, size), counts * values
    for _ in range(MAX_ITERATIONS):
        totals = np.bincount(cells, counts)
        levels = np.bincount(cells, sums)[totals > 0] / totals[totals > 0]
        before, cells = cells, np.searchsorted((levels[1:] + levels[:-1]) / 2, values, side="right")
        if placement == "quantiles" or np.array_equal(before, cells):
            break
    return levels


def _least_variance(
    values: np.ndarray, counts: np.ndarray, ends: tuple[float, float], size: int, placement: str
) -> np.ndarray:
    """Return at most `size` levels for stochastic rounding. `values`, `counts`: see `_quantiles`; `ends`: smallest and largest value."""
    fixed = np.unique([*ends, np.clip(0.0, *ends)])
    grid = np.unique(np.concatenate([fixed, values[(values > ends[0]) & (values < ends[1])]]))
    if grid.size <= size:
        return grid
    totals = np.zeros(grid.size)
    totals[np.searchsorted(grid, values.clip(*ends))] = counts
    cells = size - fixed.size + 1
    chosen = np.searchsorted(_quantiles(values, counts, cells), np.arange(1, cells))
    levels = np.concatenate([fixed, values[np.minimum(chosen, values.size - 1)]])
    at = np.unique(np.searchsorted(grid, levels))
    if placement == "lloyd":
        ranks, sums = totals.cumsum(), (totals * grid).cumsum()
        free = np.flatnonzero(~np.isin(grid[at], fixed))
        for _ in range(MAX_ITERATIONS):
            before = at.copy()
            # Move the levels with even indices, and then those with odd indices, so that the neighbors of a moving level stay in place.
            for parity in (0, 1):
                moved = free[free % 2 == parity]
                below, above = at[moved - 1], at[moved + 1]
                missing = grid[above] * (ranks[above] - ranks[below]) - (sums[above] - sums[below])
                rank = ranks[below] + missing / (grid[above] - grid[below])
                at[moved] = np.clip(np.searchsorted(ranks, rank), below + 1, above - 1)
            if np.array_equal(before, at):
                break
    return grid[at]
