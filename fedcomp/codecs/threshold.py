"""Selection by a fixed threshold.

Strom: Scalable distributed DNN training using commodity GPU cloud computing. Interspeech 2015: with a residual around it this is
algorithm 1 of the paper.

    C(x)_i = τ·sign(x_i) if |x_i| ≥ τ, else 0          values=fp32 or fp16: x_i itself if |x_i| ≥ τ, a fixed threshold with values

How many coordinates reach τ depends on the update: there may be none, and there may be all. What is left is never longer than x, and no
share of x is sure to be sent. τ is rounded to float32. Unlike the paper, positions and signs are packed to fewer than 32 bits each.

    values   τ as float32, signs (one bit each, 1 = positive, padded to a byte) (flag 2); or codecs/floats.py; around them selection.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from .. import kernels
from ..errors import SpecError
from ..kernels import Chosen, Rows
from . import floats, selection
from .base import Context, expect

LEAST, LARGEST = 2.0**-149, float(np.finfo(np.float32).max)
TAU = 2  # flag, besides those of codecs/floats.py


@dataclass(frozen=True)
class Threshold(selection.Selective):
    """The coordinates whose magnitude reaches τ, as τ and a sign each or with their values."""

    tau: float = 0.01  # threshold; higher = smaller frames, and a longer wait for small coordinates
    values: Literal["tau", "fp32", "fp16"] = "tau"  # what is sent; a memory keeps the rest of it
    name: ClassVar[str] = "threshold"
    id: ClassVar[int] = 8
    source: ClassVar[str] = "Strom 2015"

    def __post_init__(self) -> None:
        if not LEAST <= self.tau <= LARGEST:
            raise SpecError(
                f"tau is {self.tau:g}; give a number above 0 that float32 holds, such as 0.01"
            )

    def contraction(self, numel: int) -> float:
        return 0.0

    def select(self, rows: Rows, seeds: Sequence[int]) -> Chosen:
        return kernels.at_least(rows, self.tau)

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        if self.values != "tau":
            return floats.pack_runs(values, counts, self.values)
        tau = np.array(self.tau, "<f4").tobytes()
        signs = selection.runs(values > 0, counts)
        return [(TAU, tau + kernels.pack_signs(run)) for run in signs]

    def unpack_values(
        self, flag: int, data: memoryview, count: int, seed: int
    ) -> tuple[np.ndarray, int]:
        expect(flag in (floats.FP32, floats.FP16, TAU), "a threshold section has an unknown flag")
        if flag != TAU:
            return floats.unpack(data, count, flag)
        sent, rest = selection.take(data, 4)
        tau = np.frombuffer(sent, "<f4")[0]
        expect(LEAST <= tau <= LARGEST, f"a section has the threshold {tau}")
        signs, _ = selection.take(rest, -(-count // 8))
        return np.where(kernels.unpack_signs(signs, count), tau, -tau), 4 + len(signs)
