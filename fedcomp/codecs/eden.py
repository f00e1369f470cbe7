"""DRIVE and EDEN: one to four bits for each coordinate of a rotated vector.

Vargaftik, Ben-Basat, Portnoy, Mendelson, Ben-Itzhak, Mitzenmacher: DRIVE: one-bit distributed mean estimation. NeurIPS 2021; and EDEN:
communication-efficient and robust distributed mean estimation for federated learning. ICML 2022.

    u = R·x, R a random rotation of d coordinates
    q_i = the level nearest to u_i·√d/‖u‖, with the optimal levels for a normal variable (Lloyd 1982, Max 1960)
    C(x) = R⁻¹(S·q),  S = ‖x‖²/⟨u, q⟩;  with `damped`, S = ⟨u, q⟩/‖q‖²

DRIVE is EDEN with one bit. If R is uniform over all rotations, E C(x) = x, and the relative error E‖x − C(x)‖²/‖x‖² tends to 0.571, 0.133,
0.036 and 0.0096 for one to four bits. The relative error of the mean over m clients tends to 1/m of these values.

The theorems of both papers assume a uniform rotation R. Here R is a randomized Hadamard rotation of blocks of d ≤ 2¹⁴ coordinates, and each
block has its own scale S (kernels/hadamard.py). If a few coordinates of a block have nearly all of its norm, the coordinates of u are far
from normal and C is biased: with one bit, (1, ½, 0, …, 0) always becomes (1¼, 0, …, 0). The codec declares no variance because C is biased.

The S of `damped` minimizes the error; use `damped` with error feedback. With `damped`, C contracts for every x, in the mean over the random
signs of R, with δ = 0.5, 0.67, 0.89 and 0.96 for one to four bits. Proof: z = u·√d/‖u‖ has E z² = 1, E z⁴ ≤ 3 and E|z| ≥ 1/√2 (Szarek
1976). So E(z − q)² ≤ A + B + 3C if C ≥ 0 and (z − q)² ≤ A + B·z² + C·z⁴ for all z. For one bit, E(z − sign(z)/√2)² ≤ ½.

    body    as in codecs/rotated.py: number of bits of a code, one byte; a; the codes (kernels/bit_planes.py), whose lowest bit is 1 for
            positive, and whose other bits are the index of the magnitude
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..kernels.hadamard import RotatedBlocks
from . import rotated
from .base import expect

# Optimal magnitudes for a normal variable, float32, by number of bits.
MAGNITUDES = {
    1: (0.7978845834732056,),
    2: (0.4527800381183624, 1.5104175806045532),
    3: (0.2450941801071167, 0.7560052871704102, 1.3439092636108398, 2.1519455909729004),
    4: (0.12839503586292267, 0.38804829120635986, 0.6567591428756714, 0.9423404335975647)
    + (1.2562311887741089, 1.6180464029312134, 2.069017171859741, 2.7325894832611084),
}
DELTAS = {1: 0.5, 2: 0.67, 3: 0.89, 4: 0.96}


def values_of(bits: int) -> np.ndarray:
    """Return the value of each code, float32 [2^bits]."""
    return np.array([sign * v for v in MAGNITUDES[bits] for sign in (-1, 1)], np.float32)


def thresholds(bits: int) -> np.ndarray:
    """Return the midpoints between magnitudes: float64 [2^(bits − 1) − 1]."""
    magnitudes = np.array(MAGNITUDES[bits])
    return (magnitudes[1:] + magnitudes[:-1]) / 2


@dataclass(frozen=True)
class Eden(rotated.RotatedCodec):
    """A codec that sends every rotated coordinate as one to four bits."""

    # Bits per coordinate; one more = about a quarter of the squared error
    bits: Literal[1, 2, 3, 4] = 2
    damped: bool = False  # use the scale with the least error, for error feedback
    name: ClassVar[str] = "eden"
    id: ClassVar[int] = 19
    source: ClassVar[str] = "Vargaftik et al. 2022"

    def contraction(self, numel: int) -> float | None:
        return DELTAS[self.bits] if self.damped else None

    def head(self) -> int:
        return self.bits

    def width(self) -> int:
        return self.bits

    def quantize(self, blocks: RotatedBlocks) -> tuple[np.ndarray, list[np.ndarray]]:
        square = blocks.squares()
        rms = np.sqrt(square / blocks.sizes)  # root mean square of the rotated coordinates
        codes = blocks.bins((rms[..., None] * thresholds(self.bits)).astype(np.float32))
        product, squared = blocks.products(values_of(self.bits), codes)
        ratio = (product, squared) if self.damped else (square, product)
        scale = np.divide(*ratio, where=square > 0, out=np.zeros_like(square))
        return codes, [rotated.round_nearest(scale)]

    def table(self, head: int) -> np.ndarray:
        expect(head in MAGNITUDES, f"a section has {head} bits per coordinate; expected 1 to 4")
        return values_of(head)


@dataclass(frozen=True)
class Drive(Eden):
    """A codec that sends the sign of every rotated coordinate."""

    bits: ClassVar[int] = 1
    damped: bool = False  # use the scale with the least error, for error feedback
    name: ClassVar[str] = "drive"
    id: ClassVar[int] = 18
    source: ClassVar[str] = "Vargaftik et al. 2021"

    def table(self, head: int) -> np.ndarray:
        expect(head == 1, f"a section has {head} bits per coordinate; expected 1")
        return super().table(head)
