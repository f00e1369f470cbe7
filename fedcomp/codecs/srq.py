"""Stochastic quantization of rotated vectors to evenly spaced levels. The codec `srq` sends codes of equal length, and the codec `vlc`
sends codes of variable length.

Suresh et al., "Distributed mean estimation with limited communication", ICML 2017, sections 3 and 4.

Let u = R·x be the rotated vector of d coordinates. It is quantized as C(u), where r is uniform in [0, 1), so that the codec is unbiased:

    C(u)_i = lo + s·⌊(u_i − lo)/s + r⌋, where lo is the lowest level and s is the step;
    for `srq` with k levels (option `levels`): lo = min u and s = (max u − min u)/(k − 1);
    for `vlc`: lo = 0 and s = step·‖u‖/√d, where `step` is an option (√2 in the paper).

For `srq` with k levels, theorems 2 and 3 of the paper give the variance bound ω = min(d/2, 2·ln(2d) + 2)/(k − 1)². For `vlc`, the variance
bound is ω = min(step²/4, step), which is ½ for the paper's step √2. With the step √2, nearly all coordinates are rounded to a few levels.
With codes of variable length, `vlc` therefore sends only about 1.8 bits per coordinate (theorem 4).

Unlike in the paper, blocks of d ≤ 2¹⁴ coordinates are rotated separately (kernels/hadamard.py), and each block has its own lowest level lo
and step s. Both are sent with 32 bits. For this purpose, `srq` rounds lo down and s up, so that the levels still cover all values of the
block. `vlc` does not send lo, which is always 0.
"""

import math
from dataclasses import dataclass

import numpy as np

from .. import spec
from ..kernels import hadamard, range_coder
from ..kernels.hadamard import RotatedBlocks
from . import rotated
from .base import expect
from .frame import read_varint, varint

# The variance bounds are multiplied by this factor, because rounding the step s to the 32 bits that are sent can increase the variance.
ROUNDING = 1 + 2.0**-16
FIRST_BYTE = 1  # The first byte of the body of `vlc`
# Range of the option `step`. With the step MIN_STEP, the quantized coordinates of a block have at most 2051 different values.
MIN_STEP, MAX_STEP = 1 / 8, 8.0


@dataclass(frozen=True)
class SRQ(rotated.RotatedCodec):
    """A codec that rotates the vector and quantizes every rotated coordinate to one of k evenly spaced levels."""

    # k: number of evenly spaced levels, from the smallest to the largest value of a block. A code takes ⌈log₂ k⌉ bits.
    levels: int = 16
    name = "srq"
    id = 16
    source = "Suresh et al. 2017"
    shifts = True

    def __post_init__(self) -> None:
        spec.check_ranges(self, levels=(2, 256))

    def variance(self, numel: int) -> float:
        d = int(np.diff(hadamard.edges(numel)).max(initial=1))
        return ROUNDING * min(d / 2, 2 * math.log(2 * d) + 2) / (self.levels - 1) ** 2

    def first_byte(self) -> int:
        return self.levels - 1

    def width(self) -> int:
        return (self.levels - 1).bit_length()

    def quantize(self, blocks: RotatedBlocks) -> tuple[np.ndarray, list[np.ndarray]]:
        low, high = blocks.extremes()
        low = -rotated.round_up(-low) + 0.0
        step = rotated.round_up((high - low) / (self.levels - 1))
        return blocks.rounded(low, step, self.levels - 1, self.code_type), [step, low]

    def table(self, first_byte: int) -> np.ndarray:
        expect(first_byte > 0, "the values have one quantization level; expected at least two")
        return np.arange(first_byte + 1, dtype=np.float32)


@dataclass(frozen=True)
class VLC(rotated.RotatedCodec):
    """A codec that rotates the vector, quantizes every rotated coordinate to a multiple of a step, and entropy-codes the multiples."""

    # The step s divided by the root mean square of the block's coordinates. Halving the step costs one bit per coordinate and quarters the
    # squared error.
    step: float = math.sqrt(2)
    name = "vlc"
    id = 17
    source = "Suresh et al. 2017"
    code_type = np.int16

    def __post_init__(self) -> None:
        spec.check_ranges(self, step=(MIN_STEP, MAX_STEP))

    def variance(self, numel: int) -> float:
        return ROUNDING * min(self.step**2 / 4, self.step)

    def first_byte(self) -> int:
        return FIRST_BYTE

    def quantize(self, blocks: RotatedBlocks) -> tuple[np.ndarray, list[np.ndarray]]:
        step = rotated.round_nearest(self.step * np.sqrt(blocks.squares() / blocks.sizes))
        top = np.iinfo(np.int16).max
        return blocks.rounded(np.zeros_like(step), step, top, self.code_type), [step]

    def pack_codes(self, codes: np.ndarray) -> bytes:
        smallest, largest = int(codes.min()), int(codes.max())
        size = largest - smallest + 1
        coded = range_coder.encode((codes - np.int16(smallest)).astype(np.uint16), max(size, 2))
        return varint(2 * smallest if smallest >= 0 else -2 * smallest - 1) + varint(size) + coded

    def unpack_codes(
        self, first_byte: int, data: memoryview, count: int, is_zero: np.ndarray
    ) -> rotated.ReadCodes:
        expect(first_byte == FIRST_BYTE, f"the values have the unknown format {first_byte}")
        folded, start = read_varint(data)
        size, used = read_varint(data[start:])
        smallest = -(folded + 1) // 2 if folded & 1 else folded // 2
        in_range = abs(smallest) < range_coder.LARGEST and 1 <= size <= range_coder.LARGEST
        expect(in_range, "the quantized values are out of range")
        symbols = range_coder.decode(data[start + used :], count, max(size, 2))
        both_occur = int(symbols.min()) == 0 and int(symbols.max()) == size - 1
        expect(both_occur, "no value equals the smallest or largest multiple that the frame states")
        zeros_fit = bool((symbols.reshape(-1, 8)[is_zero] == -smallest).all())
        expect(zeros_fit, "a block with scale 0 has nonzero values")
        return lambda start, stop: symbols[start:stop].astype(np.float32) + np.float32(smallest)
