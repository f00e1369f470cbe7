"""ECQ-SGD: error compensation with a weight and a decay.

Wu, Huang, Huang, Zhang: Error compensated quantized SGD and its applications to large-scale distributed optimization. ICML 2018.

    y = x + α·h;  send C(y);  h ← β·h + (x − C(y)) if accepted, else h ← β·h + x

x is the update, h the accumulated error and C the codec. Let γ be the codec's error factor: ‖y − C(y)‖² ≤ γ‖y‖², with γ = 1 − δ for
contraction δ, and γ = ω for an unbiased codec with variance bound ω. Since x − C(y) = (y − C(y)) − α·h, the contribution of the old h
shrinks if α²γ + (β − α)² < 1. Other values of α and β are refused. With biased codecs, β > 1 is also refused: coordinates that are never
sent would grow by the factor β in each round, because the errors y − C(y) need not be orthogonal to h. With α = β = 1, the memory is
`residual`.

The paper uses α far below β, for quantizers that send every coordinate. For sparse codecs use α = β: with a smaller α, old errors are too
small to be selected. The defaults are stable with every codec that contracts, and with unbiased codecs whose ω is at most 1.1.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..codecs import Context
from ..errors import MismatchError
from .base import Updated, VectorMemory, Vectors

SAFE = 0.9  # α√γ for the values of α that an error message suggests


@dataclass(frozen=True)
class ECQOptions:
    alpha: float = 0.95  # α: weight of the accumulated error in a frame
    beta: float = 0.95  # β: factor of the accumulated error in each round


class ECQ(VectorMemory):
    """Error feedback that weights the accumulated error and lets it decay. `residual` is h."""

    name: ClassVar[str] = "ecq"
    source: ClassVar[str] = "Wu et al. 2018"
    Options: ClassVar[type] = ECQOptions

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
                f"{{memory}} {given} diverges with {self.codec}: α²γ + (β − α)² is {growth:.3g} and must be below 1; "
                f"use {{memory}} ecq:alpha={pair:g},beta={pair:g}"
            )
        if gamma > 0 and abs(beta) > 1 and variance is None:
            raise MismatchError(
                f"{{memory}} ecq:alpha={alpha:g},beta={beta:g} diverges with {self.codec}: unsent coordinates grow by the factor beta "
                "in every round; give a beta of at most 1"
            )

    def _update_vectors(self, vectors: Vectors, x: Tensor, context: Context) -> Updated:
        h = vectors["residual"]
        return {"residual": (h * self.options.beta).add_(x)}, (h * self.options.alpha).add_(x)
