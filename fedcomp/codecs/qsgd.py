"""Stochastic quantization to evenly spaced levels.

Alistarh, Grubic, Li, Tomioka, Vojnović: QSGD: communication-efficient SGD via gradient quantization and encoding. NeurIPS 2017.

    C(x)_i = u·sign(x_i)·(⌊|x_i|/u⌋ + 1 with the probability of the fraction, else + 0),  u = ‖x‖₂/s

E C(x) = x and E‖x − C(x)‖² ≤ ω‖x‖² with ω = min(n/s², √n/s) (lemma 3.1). Error feedback diverges with it; C/(1 + ω), `damped`, contracts
with δ = 1/(1 + ω).

Unlike the paper, u is sent in the place of the norm, so that a frame is read without s: a float32 that is at most ‖x‖₂/s, and such that
no level is above the largest float32. The wire is that of codecs/levels.py.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from .. import kernels
from ..errors import SpecError
from ..kernels import rounding
from ..layout import Layout
from . import levels as wire
from .base import Codec, Context
from .frame import Section
from .update import Update

MOST = 1000  # levels that may be asked for


@dataclass(frozen=True)
class QSGD(Codec):
    """Every coordinate as one of 2s + 1 levels."""

    levels: int = 16  # s, between 0 and the norm; more = longer frames, less noise
    damped: bool = False  # divide what is sent by 1 + ω, as error feedback needs it
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
        norm = kernels.norm2(x)
        if norm == 0:
            return wire.pack_multiples(np.zeros(x.numel(), np.int8), 0.0)
        unit = _unit(norm, self.levels)
        rounded = rounding.to_multiples(x, unit, min(norm, wire.LARGEST // unit * unit), seed)
        sent = wire.below(unit / (1 + self.omega(x.numel()))) if self.damped else unit
        return wire.pack_multiples(rounded, sent)

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        return wire.open_multiples(section)


def _unit(norm: float, s: int) -> float:
    """norm/s as a float32, cut off; where a level near the largest float32 would be above it, so that one lies on it."""
    unit = wire.below(norm / s)
    if unit * (s + 2) > wire.LARGEST:
        unit = wire.below(wire.LARGEST / math.ceil(wire.LARGEST / unit))
    return unit
