"""Stochastic rotated quantization with codes of variable length.

Suresh, Yu, Kumar, McMahan: Distributed mean estimation with limited communication. ICML 2017, section 4.

    u = R·x;  C(u)_i = s·⌊u_i/s + r⌋ with r uniform in [0, 1),  s = √2·‖u‖/(k − 1) with k = √d + 1

E C(x) = x, and E‖x − C(x)‖² ≤ ω‖x‖² with ω = min(s²/4, s), s in units of the root mean square ‖u‖/√d. The paper's s = √2 gives ω = ½ and
about 1.8 bits per coordinate for every d (theorem 4), since most of the k levels are rarely used.

Unlike in the paper, levels are multiples of s, so the smallest level is not sent; x is rotated in blocks of d ≤ 2¹⁴ coordinates, each with
its own s (kernels/hadamard.py), so the length hardly depends on x; and the entropy coder is kernels/range_coder.py.

    body    as in codecs/rotated.py: 1, one byte; a
            the smallest multiple m (LEB128 of 2m if m ≥ 0, else of −2m − 1), the number of symbols (LEB128), the code of the symbols
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import SpecError
from ..kernels import range_coder
from ..kernels.hadamard import RotatedBlocks
from . import rotated
from .base import expect
from .frame import read_varint, varint

HEAD = 1
MIN_STEP, MAX_STEP = 1 / 8, 8.0  # with the smallest, a block of 2¹⁴ has at most 2051 symbols
ROUNDING = 1 + 2.0**-16  # bound of the factor by which rounding increases s


@dataclass(frozen=True)
class VLC(rotated.RotatedCodec):
    """Every rotated coordinate as a multiple of one step, entropy-coded."""

    step: float = math.sqrt(
        2
    )  # s in root mean squares; half of it = 1 bit more, a quarter of the error
    name: ClassVar[str] = "vlc"
    id: ClassVar[int] = 17
    source: ClassVar[str] = "Suresh et al. 2017"
    code_type: ClassVar[type] = np.int16

    def __post_init__(self) -> None:
        if not MIN_STEP <= self.step <= MAX_STEP:
            raise SpecError(
                f"step is {self.step:g}; give a number from {MIN_STEP:g} to {MAX_STEP:g}, such as 1.4"
            )

    def variance(self, numel: int) -> float:
        return ROUNDING * min(self.step**2 / 4, self.step)

    def head(self) -> int:
        return HEAD

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
        self, head: int, data: memoryview, count: int, is_zero: np.ndarray
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
            not is_zero.any() or bool((symbols.reshape(-1, 8)[is_zero] == -smallest).all()),
            "a block of zeros has multiples that are not zero",
        )
        return Multiples(symbols, smallest)


@dataclass(frozen=True)
class Multiples:
    """Codes that are multiples of the step."""

    symbols: np.ndarray  # uint16 [N]
    smallest: int  # multiple of the symbol 0

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.symbols[start:stop].astype(np.float32) + np.float32(self.smallest)
