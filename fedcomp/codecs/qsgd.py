"""QSGD: stochastic quantization to evenly spaced levels.

Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding", NeurIPS 2017.

The coordinates of a vector x are rounded to multiples of a unit u. Here, s is the option `levels`, and r is uniform in [0, 1):

    C(x)_i = u·sign(x_i)·⌊|x_i|/u + r⌋ with u = ‖x‖₂/s.

The codec is unbiased. For n coordinates and s levels, the variance bound is ω = min(n/s², √n/s) (lemma 3.1). With error feedback, set the
option `damped`: without it, stochastic rounding is not contractive, and error feedback can diverge. With `damped`, the decoded vector is
C(x)/(1 + ω), and the contraction factor is δ = 1/(1 + ω).

With norm=max, the unit is u = max|x_i|/s. With norm=max and rounding=nearest, every coordinate is rounded to the nearest multiple of u, as
in LAQ (Sun, Chen, Giannakis and Yang, NeurIPS 2019, eq. 5–6). A frame then has at most about log₂(2s + 1) bits per coordinate, and the
contraction factor is δ = (4s² − 1)/(4s² + n − 1).

The paper sends the norm ‖x‖₂. Here the unit u is sent, so that the decoder need not know the number of levels s. The unit is rounded down,
so that every level is within the range of float32. Chunks (@chunk) correspond to the buckets of the paper: each chunk has its own unit. The
integer multiples of all chunks are encoded together.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from .. import kernels, spec
from ..errors import SpecError
from ..kernels import rounding
from ..kernels.parallel import starmap
from ..layout import Layout
from .base import Codec, Context, chunk_seeds, expect, stack_chunks
from .frame import Section
from .levels import LARGEST, max_multiples_bytes, open_multiples, pack_multiples, round_down
from .selection import take
from .update import Update

UNIT = np.dtype("<f4")
MAX_LEVELS = 1000  # largest s


@dataclass(frozen=True)
class QSGD(Codec):
    """A codec that sends every coordinate as one of 2s + 1 levels, where s is the option `levels`."""

    # s: number of levels above 0, from u to s·u. More levels give longer frames and less noise.
    levels: int = 16
    damped: bool = False  # Divide decoded vectors by 1 + ω; error feedback needs this option
    # With `max`, the unit is u = max|x_i|/s instead of ‖x‖₂/s. This smaller unit reduces the quantization noise, but gives longer frames.
    norm: Literal["l2", "max"] = "l2"
    # `nearest` is deterministic and biased, and needs norm=max. Use `nearest` with error feedback or with the memory `laq`.
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    name = "qsgd"
    id = 12
    source = "Alistarh et al. 2017"
    whole = True

    def __post_init__(self) -> None:
        spec.check_ranges(self, levels=(1, MAX_LEVELS))
        if self.rounding == "nearest" and (self.norm != "max" or self.damped):
            raise SpecError(
                "rounding=nearest works only with norm=max and without damped; give norm=max,rounding=nearest"
            )

    def _omega(self, numel: int) -> float:
        """Return the variance bound ω for stochastic rounding without `damped`."""
        return min(numel / self.levels**2, math.sqrt(numel) / self.levels)

    def contraction(self, numel: int) -> float | None:
        if self.rounding == "nearest":
            return (4 * self.levels**2 - 1) / (4 * self.levels**2 + max(numel, 1) - 1)
        return 1 / (1 + self._omega(numel)) if self.damped else None

    def variance(self, numel: int) -> float | None:
        return None if self.damped or self.rounding == "nearest" else self._omega(numel)

    def longest_section(self, numel: int) -> int:
        # If the unit is near the smallest float32, rounding it down can double the number of levels.
        return max_multiples_bytes(numel, 2 * self.levels + 2)

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        return pack_multiples(*self._rounded(x, seed))

    def _rounded(self, x: Tensor, seed: int) -> tuple[np.ndarray, float]:
        """Quantize a vector [n]. Return the multiples of the unit, int8 or int16, and the unit to send, which is 0 for a zero vector."""
        norm = kernels.norm2(x) if self.norm == "l2" else rounding.largest(x)
        if norm == 0:
            return np.zeros(x.numel(), np.int8), 0.0
        unit = _unit(norm, self.levels)
        limit = min(norm, LARGEST // unit * unit)
        if self.rounding == "nearest":
            top = int(limit / unit + 0.5)
            levels = (x.detach() / unit).round_().clamp_(-top, top).cpu().numpy()
            return levels.astype(np.int8 if top <= 127 else np.int16), unit
        rounded = rounding.to_multiples(x, unit, limit, seed)
        return rounded, round_down(unit / (1 + self._omega(x.numel()))) if self.damped else unit

    def _decode_row(self, section: Section, layout: Layout, seed: int) -> Update:
        return open_multiples(section)

    def _encode_chunks(self, x: Tensor, size: int, seed: int, context: Context) -> bytes:
        def work(first: int, rows: Tensor) -> list[tuple[np.ndarray, float]]:
            return list(map(self._rounded, rows, chunk_seeds(seed, first, len(rows))))

        rounded = [row for rows in starmap(work, stack_chunks(x, size)) for row in rows]
        levels, units = zip(*rounded, strict=True)
        body = pack_multiples(np.concatenate(levels), 1.0).body
        return np.array(units, UNIT).tobytes() + body

    def _decode_chunks(self, data: memoryview, numel: int, size: int, seed: int) -> Update:
        head, rest = take(data, UNIT.itemsize * -(-numel // size))
        units = np.frombuffer(head, UNIT)
        update = open_multiples(Section(numel, rest))
        with np.errstate(over="ignore", invalid="ignore"):
            for at, unit in zip(range(0, numel, size), units, strict=True):
                update.values[at : at + size] *= unit
        expect(kernels.all_finite(update.values), "a value exceeds the range of float32")
        return update


def _unit(norm: float, s: int) -> float:
    """Return norm/s as a float32 number, rounded down so that every level is within the range of float32."""
    unit = round_down(norm / s)
    if unit * (s + 2) > LARGEST:
        unit = round_down(LARGEST / math.ceil(LARGEST / unit))
    return unit
