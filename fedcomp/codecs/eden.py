"""DRIVE and EDEN: one to four bits for each coordinate of a rotated vector.

Vargaftik et al., "DRIVE: one-bit distributed mean estimation", NeurIPS 2021. Vargaftik et al., "EDEN: communication-efficient and robust
distributed mean estimation for federated learning", ICML 2022.

A vector x of d coordinates is decoded as C(x):

    u = R·x, where R is a random rotation of d coordinates;
    q_i = the level nearest to u_i·√d/‖u‖, where the levels are optimal for a normal variable (Lloyd 1982, Max 1960);
    C(x) = R⁻¹(S·q), where the scale is S = ‖x‖²/⟨u, q⟩, or S = ⟨u, q⟩/‖q‖² with the option `damped`.

DRIVE (the codec `drive`) is EDEN with one bit. If R is a uniformly random rotation, and without `damped`, the codec is unbiased. Its
relative error E‖x − C(x)‖²/‖x‖² is, for large d, 0.571 with one bit, 0.133 with two bits, 0.036 with three bits and 0.0096 with four bits.
Averaging the vectors of m clients divides the relative error by about m.

The theorems of both papers assume a uniformly random rotation. Here, R is a randomized Hadamard rotation (kernels/hadamard.py) of blocks of
d ≤ 2¹⁴ coordinates, and each block has its own scale. If a few coordinates of a block are much larger than all others, the rotated
coordinates are far from normally distributed, and the codec is biased. For example, DRIVE always decodes (1, ½, 0, …, 0) as (1¼, 0, …, 0).
The codec therefore declares no variance bound.

With the option `damped`, the scale S minimizes the squared error. The codec is then contractive for every x, as error feedback requires.
The contraction factor δ, averaged over the random signs of the rotation, is at least 0.5 (see DELTAS). The factor for one bit follows from
Szarek's inequality (1976). The factors for two to four bits are proved in tests/codecs/test_eden.py.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..kernels.hadamard import RotatedBlocks
from . import rotated
from .base import expect

# Bits per coordinate → magnitudes of the levels that are optimal for a standard normal variable, as float32. Each magnitude stands for two
# levels, one positive and one negative.
MAGNITUDES = {
    1: (0.7978845834732056,),
    2: (0.4527800381183624, 1.5104175806045532),
    3: (0.2450941801071167, 0.7560052871704102, 1.3439092636108398, 2.1519455909729004),
    4: (0.12839503586292267, 0.38804829120635986, 0.6567591428756714, 0.9423404335975647)
    + (1.2562311887741089, 1.6180464029312134, 2.069017171859741, 2.7325894832611084),
}
# Bits per coordinate → contraction factor δ with the option `damped`.
DELTAS = {1: 0.5, 2: 0.67, 3: 0.89, 4: 0.96}


def values_of(bits: int) -> np.ndarray:
    """Return the decoded value of each code, as float32 [2^bits]."""
    return np.array([sign * v for v in MAGNITUDES[bits] for sign in (-1, 1)], np.float32)


def thresholds(bits: int) -> np.ndarray:
    """Return the midpoints between adjacent magnitudes, as float64 [2^(bits − 1) − 1]."""
    magnitudes = np.array(MAGNITUDES[bits])
    return (magnitudes[1:] + magnitudes[:-1]) / 2


@dataclass(frozen=True)
class Eden(rotated.RotatedCodec):
    """A codec that rotates the vector and quantizes every rotated coordinate to one to four bits."""

    # Bits per coordinate. Each additional bit divides the squared error by about four.
    bits: Literal[1, 2, 3, 4] = 2
    # Use the scale S with the smallest squared error, which makes the codec biased. Error feedback needs this option.
    damped: bool = False
    name = "eden"
    id = 19
    source = "Vargaftik et al. 2022"

    def contraction(self, numel: int) -> float | None:
        return DELTAS[self.bits] if self.damped else None

    def first_byte(self) -> int:
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

    def table(self, first_byte: int) -> np.ndarray:
        expect(
            first_byte in MAGNITUDES,
            f"the values have {first_byte} bits per coordinate; expected 1 to 4",
        )
        return values_of(first_byte)


@dataclass(frozen=True)
class Drive(Eden):
    """A codec that sends the sign of every coordinate of the rotated vector."""

    bits: ClassVar[int] = 1
    # Use the scale S with the smallest squared error, which makes the codec biased. Error feedback needs this option.
    damped: bool = False
    name = "drive"
    id = 18
    source = "Vargaftik et al. 2021"

    def table(self, first_byte: int) -> np.ndarray:
        expect(first_byte == 1, f"the values have {first_byte} bits per coordinate; expected 1")
        return super().table(first_byte)
