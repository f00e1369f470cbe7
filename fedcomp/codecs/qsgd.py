"""Stochastic quantization to evenly spaced levels.

Alistarh, Grubic, Li, Tomioka, Vojnović: QSGD: communication-efficient SGD via gradient quantization and encoding. NeurIPS 2017.

    C(x)_i = u·sign(x_i)·(⌊|x_i|/u⌋ + 1 with the probability of the fraction, else + 0),  u = ‖x‖₂/s

E C(x) = x and E‖x − C(x)‖² ≤ ω‖x‖² with ω = min(n/s², √n/s) (lemma 3.1). Error feedback diverges with it; C/(1 + ω), `damped`, contracts
with δ = 1/(1 + ω).

Unlike the paper, u is sent in the place of the norm, so that a frame is read without s: a float32 that is at most ‖x‖₂/s, and such that
no level is above the largest float32. The wire is that of codecs/levels.py. With @chunk, the buckets of the paper, a frame has the units
of all chunks, float32, and then one section of the levels of all, whose unit is 1.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from .. import kernels
from ..errors import SpecError
from ..kernels import rounding
from ..kernels.parallel import starmap
from ..layout import Layout
from . import levels as wire
from .base import Codec, Context, chunk_seeds, expect, stacks
from .frame import Section
from .selection import take
from .update import Update

UNIT = np.dtype("<f4")
MOST = 1000  # levels that may be asked for


@dataclass(frozen=True)
class QSGD(Codec):
    """Every coordinate as one of 2s + 1 levels."""

    levels: int = 16  # s, between 0 and the norm; more = longer frames, less noise
    damped: bool = False  # divide what is sent by 1 + ω, as error feedback needs it
    norm: Literal["l2", "max"] = "l2"  # max: u = max|x|/s, less noise for the same levels
    name: ClassVar[str] = "qsgd"
    id: ClassVar[int] = 12
    source: ClassVar[str] = "Alistarh et al. 2017"
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= MOST:
            raise SpecError(f"levels is {self.levels}; give a number from 1 to {MOST}, such as 16")

    def omega(self, numel: int) -> float:
        """ω of the quantizer that is not damped."""
        return min(numel / self.levels**2, math.sqrt(numel) / self.levels)

    def contraction(self, numel: int) -> float | None:
        return 1 / (1 + self.omega(numel)) if self.damped else None

    def variance(self, numel: int) -> float | None:
        return None if self.damped else self.omega(numel)

    def longest_section(self, numel: int) -> int:
        # Twice as many where the unit is among the smallest float32s.
        return wire.longest_multiples(numel, 2 * self.levels + 2)

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        return wire.pack_multiples(*self._rounded(x, seed))

    def _rounded(self, x: Tensor, seed: int) -> tuple[np.ndarray, float]:
        """Return the levels of a vector [n], int8 or int16, and the unit that is sent, 0 of zeros."""
        norm = kernels.norm2(x) if self.norm == "l2" else rounding.largest(x)
        if norm == 0:
            return np.zeros(x.numel(), np.int8), 0.0
        unit = _unit(norm, self.levels)
        rounded = rounding.to_multiples(x, unit, min(norm, wire.LARGEST // unit * unit), seed)
        return rounded, wire.below(unit / (1 + self.omega(x.numel()))) if self.damped else unit

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        return wire.open_multiples(section)

    def _encode_chunks(self, x: Tensor, size: int, seed: int, context: Context) -> bytes:
        def work(first: int, rows: Tensor) -> list[tuple[np.ndarray, float]]:
            return list(map(self._rounded, rows, chunk_seeds(seed, first, len(rows))))

        made = [one for each in starmap(work, stacks(x, size)) for one in each]
        levels, units = zip(*made, strict=True)
        body = wire.pack_multiples(np.concatenate(levels), 1.0).body
        return np.array(units, UNIT).tobytes() + body

    def _decode_chunks(self, data: memoryview, numel: int, size: int, seed: int) -> Update:
        head, rest = take(data, UNIT.itemsize * -(-numel // size))
        units = np.frombuffer(head, UNIT)
        update = wire.open_multiples(Section(numel, rest))
        with np.errstate(over="ignore", invalid="ignore"):
            for at, unit in zip(range(0, numel, size), units, strict=True):
                update.values[at : at + size] *= unit
        expect(kernels.all_finite(update.values), "a level is beyond float32")
        return update


def _unit(norm: float, s: int) -> float:
    """norm/s as a float32, cut off; where a level near the largest float32 would be above it, so that one lies on it."""
    unit = wire.below(norm / s)
    if unit * (s + 2) > wire.LARGEST:
        unit = wire.below(wire.LARGEST / math.ceil(wire.LARGEST / unit))
    return unit
