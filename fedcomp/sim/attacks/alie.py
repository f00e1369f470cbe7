"""The attack "a little is enough": send the mean of the honest updates, with a shift that is too small for robust rules to detect.

Baruch, Baruch, Goldberg, "A little is enough: circumventing defenses for distributed learning", NeurIPS 2019, algorithm 3:

    s = ⌊n/2⌋ + 1 − f,  z = Φ⁻¹((n − f − s) / (n − f)),  x = μ − z·σ

Every attacker sends the update x. The cohort has n clients, f of them Byzantine. μ and σ are the mean and the sample standard deviation of
each coordinate over the honest updates. s is the number of honest clients that the attackers need for a majority. Φ is the standard normal
distribution function.

With few attackers, the formula gives z ≤ 0. The attackers then send μ, which is no attack, unless the option `z` is set. The option
`shift=down` subtracts z·σ from μ, as in the paper authors' code, and `shift=up` adds z·σ. `shift=against` moves every coordinate of μ
towards zero by z·σ, which reverses the signs of coordinates smaller than z·σ.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .base import Attack, Generators, UpdateContext

# Largest argument of Φ⁻¹. If the attackers are a majority, the formula gives 1, and Φ⁻¹(1) is infinite.
MAX_PROBABILITY = 1 - 1e-6


@dataclass(frozen=True)
class ALIE(Attack):
    z: float | None = None  # shift in standard deviations; None: z by the formula above
    shift: Literal["down", "up", "against"] = "down"

    name: ClassVar[str] = "alie"
    source: ClassVar[str] = "Baruch 2019"
    uses_honest_updates: ClassVar[bool] = True

    def updates(self, x: Tensor, context: UpdateContext, generators: Generators) -> Tensor:
        honest = context.honest_updates
        mean = honest.mean(0)
        z = z_max(context.cohort_size, context.n_byzantine) if self.z is None else self.z
        shift = z * (honest.std(0) if len(honest) > 1 else torch.zeros_like(mean))
        if self.shift != "up":
            shift = -shift if self.shift == "down" else -mean.sign() * shift
        return (mean + shift).expand_as(x).clone()


def z_max(n: int, f: int) -> float:
    """Return z by the formula above for f Byzantine clients in a cohort of n clients, or 0 if the formula gives a negative z."""
    supporters = max(0, n // 2 + 1 - f)
    probability = (n - f - supporters) / (n - f) if n > f else MAX_PROBABILITY
    z = NormalDist().inv_cdf(min(max(probability, 0.5), MAX_PROBABILITY))
    return 0.0 if math.isclose(z, 0.0, abs_tol=1e-12) else z
