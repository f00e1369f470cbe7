"""Stochastic rotated quantization to evenly spaced levels.

Suresh, Yu, Kumar, McMahan: Distributed mean estimation with limited communication. ICML 2017, section 3.

    u = R·x;  C(u)_i = lo + s·⌊t + r⌋ with r uniform in [0, 1),  t = (u_i − lo)/s,  s = (hi − lo)/(k − 1),  lo = min u,  hi = max u

E C(x) = x, and E‖x − C(x)‖² ≤ ω‖x‖² with ω = min(d/2, 2·ln(2d) + 2)/(k − 1)²: hi − lo is at most √2‖u‖ (theorem 2), and the mean of the
largest u² over the signs of the rotation is at most (2·ln(2d) + 2)‖x‖²/d (theorem 3).

Unlike in the paper, R rotates blocks of d ≤ 2¹⁴ coordinates (kernels/hadamard.py), each with its own lo and hi; lo is rounded down, and s
up, to the numbers that are sent.

    body    as in codecs/rotated.py: k − 1, one byte; a and b; the codes, ⌈log₂ k⌉ bits each (kernels/bit_planes.py)
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import SpecError
from ..kernels import bit_planes, hadamard
from ..kernels.hadamard import RotatedBlocks
from . import rotated
from .base import expect

ROUNDING = 1 + 2.0**-16  # bound of the factor by which rounding lo and s widens hi − lo


@dataclass(frozen=True)
class SRQ(rotated.RotatedCodec):
    """Every rotated coordinate as one of k evenly spaced levels."""

    levels: int = (
        16  # k, between the smallest and the largest value of a block; best a power of two
    )
    name: ClassVar[str] = "srq"
    id: ClassVar[int] = 16
    source: ClassVar[str] = "Suresh et al. 2017"
    shifts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 2 <= self.levels <= 256:
            raise SpecError(f"levels is {self.levels}; give a number from 2 to 256, such as 16")

    def variance(self, numel: int) -> float:
        d = int(np.diff(hadamard.edges(numel)).max(initial=1))
        return ROUNDING * min(d / 2, 2 * math.log(2 * d) + 2) / (self.levels - 1) ** 2

    def head(self) -> int:
        return self.levels - 1

    def width(self) -> int:
        return (self.levels - 1).bit_length()

    def quantize(self, blocks: RotatedBlocks) -> tuple[np.ndarray, list[np.ndarray]]:
        low, high = blocks.extremes()
        low = -rotated.round_up(-low) + 0.0
        step = rotated.round_up((high - low) / (self.levels - 1))
        return blocks.rounded(low, step, self.levels - 1, self.code_type), [step, low]

    def pack_codes(self, codes: np.ndarray) -> bytes:
        return bit_planes.pack(codes, self.width())

    def unpack_codes(
        self, head: int, data: memoryview, count: int, is_zero: np.ndarray
    ) -> rotated.Codes:
        expect(head > 0, "a section has only one level")
        return rotated.unpack_planes(data, count, np.arange(head + 1, dtype=np.float32), is_zero)
