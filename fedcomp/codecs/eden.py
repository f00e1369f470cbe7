"""One to four bits for each coordinate of a rotated vector.

Vargaftik, Ben-Basat, Portnoy, Mendelson, Ben-Itzhak, Mitzenmacher: DRIVE: one-bit distributed mean estimation. NeurIPS 2021. The same:
EDEN: communication-efficient and robust distributed mean estimation for federated learning. ICML 2022.

    u = R·x;  q_i = the value nearest to u_i·√d/‖u‖ of those that are best for a normal variable (Lloyd 1982, Max 1960)
    C(x) = R⁻¹(S·q),  S = ‖x‖²/⟨u, q⟩;  damped: S = ⟨u, q⟩/‖q‖²

DRIVE is the case of one bit. With R uniform over all rotations E C(x) = x, and E‖x − C(x)‖²/‖x‖² tends to 0.571, 0.133, 0.036, 0.0096
for one to four bits; of the mean over m clients it is a share of 1/m.

Unlike in the theorems, R is a randomized Hadamard rotation of blocks of d ≤ 2¹⁴ coordinates, each with an S of its own
(kernels/hadamard.py). Where few coordinates of a block hold nearly all of its length, u is far from normal and C is biased: of
(1, ½, 0, …, 0) one bit always makes (1¼, 0, …, 0). So no variance is promised.

The damped S is the one with the least error, for error feedback. It contracts for every x, in the mean over signs, by δ = 0.5, 0.67, 0.89,
0.96: z = u·√d/‖u‖ has E z² = 1, E z⁴ ≤ 3 and E|z| ≥ 1/√2 (Szarek 1976), so E(z − q)² ≤ A + B + 3C wherever (z − q)² ≤ A + B·z² + C·z⁴
for all z; and for one bit E(z − sign(z)/√2)² ≤ ½.

    body    codecs/rotated.py: bits, one byte; a; that many bits a coordinate (kernels/bit_planes.py): 1 = positive, then the
            number of the magnitude
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..kernels import bit_planes
from ..kernels.hadamard import Turned
from . import rotated
from .base import expect

MAGNITUDES = {
    1: (0.7978845834732056,),
    2: (0.4527800381183624, 1.5104175806045532),
    3: (0.2450941801071167, 0.7560052871704102, 1.3439092636108398, 2.1519455909729004),
    4: (
        0.12839503586292267,
        0.38804829120635986,
        0.6567591428756714,
        0.9423404335975647,
        1.2562311887741089,
        1.6180464029312134,
        2.069017171859741,
        2.7325894832611084,
    ),
}  # the values for each number of bits, of a normal variable: float32
DELTAS = {1: 0.5, 2: 0.67, 3: 0.89, 4: 0.96}


def table(bits: int) -> np.ndarray:
    """Return the values of the codes, float32 [2^bits]."""
    return np.array([sign * v for v in MAGNITUDES[bits] for sign in (-1, 1)], np.float32)


def thresholds(bits: int) -> np.ndarray:
    """Return the midpoints between magnitudes: float64 [2^(bits − 1) − 1]."""
    magnitudes = np.array(MAGNITUDES[bits])
    return (magnitudes[1:] + magnitudes[:-1]) / 2


@dataclass(frozen=True)
class Eden(rotated.RotatedCodec):
    """Every rotated coordinate as one to four bits."""

    bits: Literal[1, 2, 3, 4] = 2  # a coordinate; each one more = about a quarter of the error
    damped: bool = False  # the scale of least error in the place of the unbiased one, as error feedback needs it
    name: ClassVar[str] = "eden"
    id: ClassVar[int] = 19
    source: ClassVar[str] = "Vargaftik et al. 2022"

    def contraction(self, numel: int) -> float | None:
        return DELTAS[self.bits] if self.damped else None

    def head(self) -> int:
        return self.bits

    def width(self) -> int:
        return self.bits

    def quantize(self, turned: Turned) -> tuple[np.ndarray, list[np.ndarray]]:
        square = turned.squares()
        # ‖x‖, of which the rotated coordinates are normal multiples.
        norm = np.sqrt(square / turned.sizes)
        codes = turned.bins((norm[..., None] * thresholds(self.bits)).astype(np.float32))
        along, squared = turned.products(table(self.bits), codes)
        parts = (along, squared) if self.damped else (square, along)
        return codes, [
            rotated.nearest(np.divide(*parts, where=square > 0, out=np.zeros_like(square)))
        ]

    def pack_codes(self, codes: np.ndarray) -> bytes:
        return bit_planes.pack(codes, self.bits)

    def unpack_codes(
        self, head: int, data: memoryview, count: int, idle: np.ndarray
    ) -> rotated.Codes:
        expect(head in MAGNITUDES, f"a section has {head} bits a coordinate")
        return rotated.unpack_planes(data, count, table(head), idle)


@dataclass(frozen=True)
class Drive(Eden):
    """Every rotated coordinate as its sign."""

    bits: ClassVar[int] = 1
    damped: bool = False  # the scale of least error in the place of the unbiased one, as error feedback needs it
    name: ClassVar[str] = "drive"
    id: ClassVar[int] = 18
    source: ClassVar[str] = "Vargaftik et al. 2021"

    def unpack_codes(
        self, head: int, data: memoryview, count: int, idle: np.ndarray
    ) -> rotated.Codes:
        expect(head == 1, f"a section of one bit a coordinate has {head}")
        return super().unpack_codes(head, data, count, idle)
