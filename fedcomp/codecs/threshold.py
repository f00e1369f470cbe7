"""Selection of the coordinates whose magnitude reaches a fixed threshold.

Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015, algorithm 1. Strom combines this codec
with error feedback (the memory `residual`).

Coordinates with |x_i| ≥ τ, where τ is the option `tau`, are decoded as τ·sign(x_i), or as x_i with values=fp32 or fp16. All other
coordinates are decoded as 0. The number of selected coordinates depends on the update: there may be none, or all. If no coordinate is
selected, the error is ‖x‖; it is never larger. The contraction factor is therefore δ = 0. The threshold τ is rounded to float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .. import kernels
from ..errors import SpecError
from ..kernels import Chosen, Rows
from . import floats, selection
from .base import Context, expect
from .levels import LARGEST, SMALLEST
from .selection import Unpacked

TAU = 2  # flag of values ±τ; codecs/floats.py defines the other flags


@dataclass(frozen=True)
class Threshold(selection.Selective):
    """A codec that sends the coordinates whose magnitude is at least τ. Values are sent as ±τ, float32 or float16."""

    # The threshold τ. A higher threshold gives smaller frames, but error feedback then takes longer to send small coordinates.
    tau: float = 0.01
    values: Literal["tau", "fp32", "fp16"] = "tau"  # Send values as ±τ, float32 or float16
    name = "threshold"
    id = 8
    source = "Strom 2015"
    delta = 0.0

    def __post_init__(self) -> None:
        if not SMALLEST <= self.tau <= LARGEST:
            raise SpecError(
                f"tau is {self.tau:g}; give a number above 0 in the range of float32, such as 0.01"
            )

    def select(self, rows: Rows, seeds: Sequence[int]) -> Chosen:
        return kernels.at_least(rows, self.tau)

    def pack_values(
        self, values: np.ndarray, counts: np.ndarray, seeds: Sequence[int], context: Context
    ) -> list[tuple[int, bytes]]:
        if self.values != "tau":
            return floats.pack_runs(values, counts, self.values)
        tau = np.array(self.tau, "<f4").tobytes()
        signs = kernels.split_runs(values > 0, counts)
        return [(TAU, tau + kernels.pack_signs(run)) for run in signs]

    def unpack_values(self, flag: int, data: memoryview, count: int, seed: int) -> Unpacked:
        expect(flag <= TAU, f"the values have the unknown format {flag}")
        if flag != TAU:
            return floats.unpack(data, count, flag)
        sent, rest = selection.take(data, 4)
        tau = np.frombuffer(sent, "<f4")[0]
        expect(SMALLEST <= tau <= LARGEST, f"the threshold is {tau}, which is out of range")
        signs, _ = selection.take(rest, -(-count // 8))
        return np.where(kernels.unpack_signs(signs, count), tau, -tau), 4 + len(signs)
