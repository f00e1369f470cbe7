"""ECQ-SGD: error feedback with a weight α and a decay β for the accumulated error.

Wu, Huang, Huang and Zhang, "Error compensated quantized SGD and its applications to large-scale distributed optimization", ICML 2018. With
the update x, the accumulated error h and the codec C:

    y = x + α·h
    send C(y)
    h ← β·h + (x − C(y)) if C(y) is accepted, else h ← β·h + x

The number γ bounds the relative squared error of the codec: ‖y − C(y)‖² ≤ γ‖y‖². A codec with the contraction factor δ has γ = 1 − δ. An
unbiased codec with the variance bound ω has γ = ω. After an accepted frame, the new error is (y − C(y)) + (β − α)·h, so an old error h
shrinks if α²γ + (β − α)² < 1. Options α and β that do not meet this condition are rejected. With biased codecs, |β| > 1 is also rejected:
the error of a coordinate that the codec never sends would grow by the factor |β| in each round. With α = β = 1, ECQ-SGD is the memory
`residual`.

For quantizers that send every coordinate, the paper uses a weight α far below the decay β. For codecs that send only some coordinates, use
α = β. With α below β, the accumulated error would have too little influence on which coordinates are sent. With the default α = β = 0.95,
the error stays bounded for every contractive codec, and for every unbiased codec with a variance bound ω of at most 1.1.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from ..codecs import Context
from ..errors import MismatchError
from .base import Updated, VectorMemory, Vectors

SAFE = 0.9  # to suggest options, an error message multiplies the largest allowed α = β by SAFE


@dataclass(frozen=True)
class ECQOptions:
    alpha: float = 0.95  # α: weight of the accumulated error in the vector to send
    beta: float = 0.95  # β: factor by which the accumulated error is multiplied in each round


class ECQ(VectorMemory):
    """Error feedback in which the accumulated error has a weight and a decay. The accumulated error is the attribute `residual`."""

    name = "ecq"
    source = "Wu et al. 2018"
    Options = ECQOptions

    def _check_codec(self) -> None:
        alpha, beta = self.options.alpha, self.options.beta
        contraction = self.codec.contraction(self.numel)
        variance = self.codec.variance(self.numel)
        gamma = variance if contraction is None else 1 - contraction
        if gamma is None:
            raise MismatchError(
                f"{{memory}} ecq needs a codec with a bounded error, and the error of {self.codec} has no bound; use {{uplink}} stc"
            )
        growth = alpha * alpha * gamma + (beta - alpha) * (beta - alpha)
        if not growth < 1:
            pair = SAFE if gamma <= 1 else float(f"{SAFE / math.sqrt(gamma):.1e}")
            given = f"ecq:alpha={alpha:g},beta={beta:g}"
            raise MismatchError(
                f"{{memory}} {given} diverges with {self.codec}, whose relative squared error is up to γ = {gamma:.3g}: "
                f"α²γ + (β − α)² is {growth:.3g} and must be below 1; "
                f"use {{memory}} ecq:alpha={pair:g},beta={pair:g}"
            )
        if gamma > 0 and abs(beta) > 1 and variance is None:
            raise MismatchError(
                f"{{memory}} ecq:alpha={alpha:g},beta={beta:g} diverges with {self.codec}: the error of unsent coordinates grows by "
                "the factor beta in every round; give a beta of at most 1"
            )

    def _update_vectors(self, vectors: Vectors, x: Tensor, context: Context) -> Updated:
        h = vectors["residual"]
        return {"residual": (h * self.options.beta).add_(x)}, (h * self.options.alpha).add_(x)
