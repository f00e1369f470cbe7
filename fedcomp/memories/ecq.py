"""Error compensation of quantized SGD, with a weight and a decay.

Wu, Huang, Huang, Zhang: Error compensated quantized SGD and its applications to large-scale distributed optimization. ICML 2018.

    y = x + α·h;  send C(y);  h ← β·h + (x − C(y)) when it was accepted, h ← β·h + x when it was not

With x − C(y) = (y − C(y)) − α·h, what h has from its past shrinks where α²γ + (β − α)² < 1, γ the codec's error factor: ‖y − C(y)‖² is at
most γ‖y‖², γ = 1 − δ of a codec that contracts, ω of one that is unbiased. Other pairs are refused, and β > 1 with biased codecs: there
the two terms need not be orthogonal, and what is never sent grows by β. α = β = 1 is `residual`.

The paper's α is far below β, for quantizers that send every coordinate. Where few are sent, α = β: with a smaller α, what is late is too
light to be sent. The default is stable with every codec that contracts, and with unbiased ones up to ω = 1.1.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..codecs import Codec, Context
from ..errors import MismatchError
from .vector_memory import NamedVectors, VectorMemory

SAFE = 0.9  # α√γ of the pair that is named where another is refused


@dataclass(frozen=True)
class Options:
    alpha: float = 0.95  # weight in a frame of what was not sent before
    beta: float = 0.95  # what is kept of it from round to round


class ECQ(VectorMemory):
    """Error feedback with a weight and a decay; `residual` is h."""

    name: ClassVar[str] = "ecq"
    source: ClassVar[str] = "Wu et al. 2018"
    Options: ClassVar[type] = Options

    def _check_codec(self) -> None:
        gamma, alpha, beta = (
            error_factor(self.codec, self.numel),
            self.options.alpha,
            self.options.beta,
        )
        if gamma is None:
            raise MismatchError(
                f"{{memory}} ecq needs a codec whose error is bounded, and that of {self.codec} is not; use {{uplink}} stc"
            )
        growth = alpha * alpha * gamma + (beta - alpha) * (beta - alpha)
        if not growth < 1:
            pair = SAFE if gamma <= 1 else float(f"{SAFE / math.sqrt(gamma):.1e}")
            given = f"ecq:alpha={alpha:g},beta={beta:g}"
            raise MismatchError(
                f"{{memory}} {given} diverges with {self.codec}: α²γ + (β − α)² is {growth:.3g} and has to be below 1; "
                f"use {{memory}} ecq:alpha={pair:g},beta={pair:g}"
            )
        if gamma > 0 and abs(beta) > 1 and self.codec.variance(self.numel) is None:
            raise MismatchError(
                f"{{memory}} ecq:alpha={alpha:g},beta={beta:g} diverges with {self.codec}: what is not sent grows by beta in "
                "every round; give a beta of at most 1"
            )

    def _update_vectors(
        self, kept: NamedVectors, x: Tensor, context: Context
    ) -> tuple[NamedVectors, Tensor]:
        h = kept["residual"]
        return {"residual": (h * self.options.beta).add_(x)}, (h * self.options.alpha).add_(x)


def error_factor(codec: Codec, numel: int) -> float | None:
    """Return γ with E ‖x − C(x)‖² ≤ γ‖x‖² for every x; None if there is none."""
    contraction = codec.contraction(numel)
    return codec.variance(numel) if contraction is None else 1 - contraction
