"""Stochastic rotated quantization with codes of variable length.

Suresh, Yu, Kumar, McMahan: Distributed mean estimation with limited communication. ICML 2017, section 4.

    u = R·x;  C(u)_i = s·(⌊u_i/s⌋ + 1 with the probability of the fraction, else + 0),  s = √2·‖u‖/(k − 1) with k = √d + 1

E C(x) = x, and E‖x − C(x)‖² ≤ ω‖x‖² with ω = min(s²/4, s), s in units of the root mean square ‖u‖/√d: ½ for the paper's s = √2, which takes
about 1.8 bits a coordinate whatever d is (theorem 4), since few of the k levels are used.

Unlike the paper, levels are multiples of s, so no least one is sent; x is rotated, in blocks of d ≤ 2¹⁴ coordinates with s of their own
(kernels/hadamard.py), so the length hardly depends on x; and what is sent is coded by kernels/range_coder.py.

    body    codecs/rotated.py: 1, one byte; a
            the smallest multiple (LEB128 of 2m, or of −2m − 1 where m < 0), the number of symbols (LEB128), their code
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import SpecError
from ..kernels import range_coder
from ..kernels.hadamard import Turned
from . import rotated
from .base import expect
from .frame import read_varint, varint

HEAD = 1
FINEST, COARSEST = 1 / 8, 8.0  # of s: the finest makes no more than 2051 symbols of 2¹⁴ coordinates
ROUNDED = 1 + 2.0**-16  # by less than this what is sent of s is above it


@dataclass(frozen=True)
class VLC(rotated.RotatedCodec):
    """Every rotated coordinate as a multiple of one step, entropy-coded."""

    step: float = math.sqrt(2)  # s in root mean squares; half = one bit more, a quarter the error
    name: ClassVar[str] = "vlc"
    id: ClassVar[int] = 17
    source: ClassVar[str] = "Suresh et al. 2017"
    kind: ClassVar[type] = np.int16

    def __post_init__(self) -> None:
        if not FINEST <= self.step <= COARSEST:
            raise SpecError(
                f"step is {self.step:g}; give a number from {FINEST:g} to {COARSEST:g}, such as 1.4"
            )

    def variance(self, numel: int) -> float:
        return ROUNDED * min(self.step**2 / 4, self.step)

    def head(self) -> int:
        return HEAD

    def quantize(self, turned: Turned) -> tuple[np.ndarray, list[np.ndarray]]:
        step = rotated.nearest(self.step * np.sqrt(turned.squares() / turned.sizes))
        return turned.rounded(np.zeros_like(step), step, np.iinfo(np.int16).max, self.kind), [step]

    def pack_codes(self, codes: np.ndarray) -> bytes:
        smallest, largest = int(codes.min()), int(codes.max())
        size = largest - smallest + 1
        coded = range_coder.encode((codes - np.int16(smallest)).astype(np.uint16), max(size, 2))
        return varint(2 * smallest if smallest >= 0 else -2 * smallest - 1) + varint(size) + coded

    def unpack_codes(
        self, head: int, data: memoryview, count: int, idle: np.ndarray
    ) -> "Multiples":
        expect(head == HEAD, "a section of multiples has an unknown first byte")
        folded, start = read_varint(data)
        size, used = read_varint(data[start:])
        smallest = -(folded + 1) // 2 if folded & 1 else folded // 2
        expect(
            abs(smallest) < range_coder.LARGEST and 1 <= size <= range_coder.LARGEST,
            "multiples are out of range",
        )
        symbols = range_coder.decode(data[start + used :], count, max(size, 2))
        expect(
            int(symbols.min()) == 0 and int(symbols.max()) == size - 1,
            "the smallest or the largest multiple does not occur",
        )
        expect(
            not idle.any() or bool((symbols.reshape(-1, 8)[idle] == -smallest).all()),
            "a block of zeros has multiples",
        )
        return Multiples(symbols, smallest)


@dataclass(frozen=True)
class Multiples:
    symbols: np.ndarray  # uint16 [N]
    smallest: int  # what the symbol 0 stands for

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.symbols[start:stop].astype(np.float32) + np.float32(self.smallest)
