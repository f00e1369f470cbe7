"""Quantization to levels that follow the distribution of the values.

Lloyd: Least squares quantization in PCM. IEEE Trans. Inf. Theory 1982 (written 1957); Max: Quantizing for minimum distortion. IRE Trans.
Inf. Theory 1960. For stochastic rounding: Faghri, Tabrizian, Markov, Alistarh, Roy, Ramezani-Kebrya: Adaptive gradient quantization for
data-parallel SGD. NeurIPS 2020, section 3.

    nearest      level j is the mean of cell j; a value goes to the nearest level
    stochastic   a value between two levels goes to either, with itself as the mean; levels are min x, max x, 0 if it lies between, and
                 others: between the levels a and c lies the value above a whose rank is Σ(c − v)/(c − a), over a < v ≤ c

`quantiles` are those of the cube root of the density, the best for many levels (Panter, Dite: Quantization distortion in pulse-count
modulation with nonuniform spacing of levels. Proc. IRE 1951); we take the power 5/16, which square roots make the same on every machine.
`lloyd` goes on from there by the rules above. Both work on a histogram with the exact mean of each bin (`rounding.histogram`).

Nearest: ‖x − C(x)‖² ≤ ‖x‖², since a cell lies nearer to its mean than to 0. Stochastic: E C(x) = x and ω = (√n − 1)/2, as for TernGrad.

    body    one byte, how many levels there are, less one; these, float32, ascending, each of which occurs
            if there are two or more, the codes: codecs/levels.py
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from ..errors import SpecError
from ..kernels import rounding
from ..layout import Layout
from . import levels as wire
from .base import Codec, Context, expect
from .frame import Section, varint
from .update import Dense, Update

LEVEL = np.dtype("<f4")
MOST = 256  # levels
SWEEPS = 100  # of Lloyd's iteration, at most


@dataclass(frozen=True)
class Adaptive(Codec):
    """Every coordinate as one of few levels, which the frame names."""

    levels: int = 16  # more = longer frames, less noise
    rounding: Literal["nearest", "stochastic"] = "nearest"  # stochastic: unbiased, larger error
    placement: Literal["lloyd", "quantiles"] = "lloyd"  # quantiles: one step, nearly as good
    name: ClassVar[str] = "adaptive"
    id: ClassVar[int] = 13
    source: ClassVar[str] = "Lloyd 1957, Faghri et al. 2020"
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        least = 2 if self.rounding == "nearest" else 3
        if not least <= self.levels <= MOST:
            raise SpecError(
                f"levels is {self.levels}; give a number from {least} to {MOST}, such as 16"
            )

    def contraction(self, numel: int) -> float | None:
        return 0.0 if self.rounding == "nearest" else None

    def variance(self, numel: int) -> float | None:
        return None if self.rounding == "nearest" else (math.sqrt(max(numel, 1)) - 1) / 2

    def longest_section(self, numel: int) -> int:
        table = 1 + LEVEL.itemsize * self.levels
        return len(varint(numel)) + table + wire.packed_bytes(numel, self.levels)

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        x = x.detach().cpu()
        placed = self.place(x)
        codes = rounding.to_levels(x, placed, self.rounding == "nearest", seed)
        used = rounding.count(codes, placed.size) > 0
        if not used.all():
            placed = placed[used]
            codes = rounding.spread(codes, (used.cumsum() - 1).astype(np.uint8))
        body = bytes([placed.size - 1]) + placed.astype(LEVEL).tobytes()
        return Section(x.numel(), body + wire.pack(codes, placed.size) if placed.size > 1 else body)

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        numel, data = layout.numel, memoryview(section.body)
        end = 1 + LEVEL.itemsize * (data[0] + 1) if len(data) else 1
        expect(len(data) >= end, "levels are cut short")
        placed = np.frombuffer(data[1:end], LEVEL)
        expect(
            bool(np.isfinite(placed).all() and (placed[1:] > placed[:-1]).all()),
            "levels do not ascend",
        )
        expect(not (np.signbit(placed) & (placed == 0)).any(), "a level is minus zero")
        expect(placed.size > 1 or len(data) == end, "bytes follow the only level")
        codes = (
            wire.unpack(data[end:], numel, placed.size)
            if placed.size > 1
            else np.zeros(numel, np.uint8)
        )
        expect(bool(rounding.count(codes, placed.size).all()), "a level does not occur")
        return Dense(rounding.spread(codes, placed.astype(np.float32)))

    def place(self, x: Tensor) -> np.ndarray:
        """Levels for x [n > 0] in main memory: float32, ascending."""
        values, counts = rounding.histogram(x)
        if self.rounding == "nearest":
            placed = _cell_means(values, counts, self.levels, self.placement)
        else:
            placed = _least_variance(
                values, counts, rounding.extremes(x), self.levels, self.placement
            )
        return np.unique(placed.astype(np.float32) + np.float32(0))  # not minus zero


def _quantiles(values: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    """Return which of `size` cells each value falls into, ascending: cells hold equal parts of p^(5/16), p the density."""
    widths = np.gradient(values)
    density = counts / widths
    # A cube root is not the same on every machine.
    weights = widths * np.sqrt(np.sqrt(density * np.sqrt(np.sqrt(density))))
    ends = weights.cumsum()
    return np.minimum(((ends - weights / 2) * (size / ends[-1])).astype(np.int64), size - 1)


def _cell_means(values: np.ndarray, counts: np.ndarray, size: int, placement: str) -> np.ndarray:
    """At most `size` levels, each the mean of its cell."""
    if values.size <= size:
        return values
    cells, sums = _quantiles(values, counts, size), counts * values
    for _ in range(SWEEPS):
        held = np.bincount(cells, counts)
        placed = np.bincount(cells, sums)[held > 0] / held[held > 0]
        before, cells = cells, np.searchsorted((placed[1:] + placed[:-1]) / 2, values, side="right")
        if placement == "quantiles" or np.array_equal(before, cells):
            break
    return placed


def _least_variance(
    values: np.ndarray, counts: np.ndarray, ends: tuple[float, float], size: int, placement: str
) -> np.ndarray:
    """At most `size` levels, among them both ends and 0, for which stochastic rounding has little variance."""
    fixed = np.unique([*ends, np.clip(0.0, *ends)])
    grid = np.unique(np.concatenate([fixed, values[(values > ends[0]) & (values < ends[1])]]))
    if grid.size <= size:
        return grid
    held = np.zeros(grid.size)
    held[np.searchsorted(grid, values.clip(*ends))] = counts
    chosen = np.searchsorted(
        _quantiles(values, counts, size - fixed.size + 1), np.arange(1, size - fixed.size + 1)
    )
    at = np.unique(
        np.searchsorted(grid, np.concatenate([fixed, values[np.minimum(chosen, values.size - 1)]]))
    )
    if placement == "lloyd":
        ranks, sums = held.cumsum(), (held * grid).cumsum()
        free = np.flatnonzero(~np.isin(grid[at], fixed))
        for _ in range(SWEEPS):
            before = at.copy()
            for moved in (free[free % 2 == 0], free[free % 2 == 1]):  # the neighbours of each stay
                below, above = at[moved - 1], at[moved + 1]
                missing = grid[above] * (ranks[above] - ranks[below]) - (sums[above] - sums[below])
                rank = ranks[below] + missing / (grid[above] - grid[below])
                at[moved] = np.clip(np.searchsorted(ranks, rank), below + 1, above - 1)
            if np.array_equal(before, at):
                break
    return grid[at]
