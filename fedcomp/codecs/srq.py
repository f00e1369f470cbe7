"""Stochastic rotated quantization.

Suresh, Yu, Kumar, McMahan: Distributed mean estimation with limited communication. ICML 2017, section 3.

    u = R·x;  C(u)_i = lo + s·(⌊t⌋ + 1 with the probability of the fraction of t, else + 0),  t = (u_i − lo)/s,  s = (hi − lo)/(k − 1)

E C(x) = x, and E‖x − C(x)‖² ≤ ω‖x‖² with ω = min(d/2, 2·ln(2d) + 2)/(k − 1)²: the span is at most √2‖u‖ (theorem 2), and the mean of the
largest u² over the signs of the rotation at most (2·ln(2d) + 2)‖x‖²/d (theorem 3).

Unlike the paper, R turns blocks of d ≤ 2¹⁴ coordinates, lo and hi are a block's own (kernels/hadamard.py), and lo is rounded down and s up
to what is sent.

    body    codecs/rotated.py: k − 1, one byte; a and b; ⌈log₂ k⌉ bits a coordinate (kernels/bit_planes.py)
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import SpecError
from ..kernels import bit_planes, hadamard
from ..kernels.hadamard import Turned
from . import rotated
from .base import expect

ROUNDED = 1 + 2.0**-16  # by less than this lo and s widen a span


@dataclass(frozen=True)
class SRQ(rotated.RotatedCodec):
    """Every rotated coordinate as one of k evenly spaced levels."""

    levels: int = 16  # k, from the smallest to the largest of a block; powers of two waste no bits
    name: ClassVar[str] = "srq"
    id: ClassVar[int] = 16
    source: ClassVar[str] = "Suresh et al. 2017"
    shifts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 2 <= self.levels <= 256:
            raise SpecError(f"levels is {self.levels}; give a number from 2 to 256, such as 16")

    def variance(self, numel: int) -> float:
        d = int(np.diff(hadamard.edges(numel)).max(initial=1))
        return ROUNDED * min(d / 2, 2 * math.log(2 * d) + 2) / (self.levels - 1) ** 2

    def head(self) -> int:
        return self.levels - 1

    def width(self) -> int:
        return (self.levels - 1).bit_length()

    def quantize(self, turned: Turned) -> tuple[np.ndarray, list[np.ndarray]]:
        low, high = turned.extremes()
        low = -rotated.above(-low) + 0.0
        step = rotated.above((high - low) / (self.levels - 1))
        return turned.rounded(low, step, self.levels - 1, self.kind), [step, low]

    def pack_codes(self, codes: np.ndarray) -> bytes:
        return bit_planes.pack(codes, self.width())

    def unpack_codes(
        self, head: int, data: memoryview, count: int, idle: np.ndarray
    ) -> rotated.Codes:
        expect(head > 0, "a section has one level")
        return rotated.unpack_planes(data, count, np.arange(head + 1, dtype=np.float32), idle)
