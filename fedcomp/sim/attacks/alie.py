"""A little is enough: a shift within the spread of the honest updates, so that no rule finds it far away.

Baruch, Baruch, Goldberg: A little is enough: circumventing defenses for distributed learning. NeurIPS 2019, algorithm 3.

    s = ⌊n/2⌋ + 1 − f,  z = Φ⁻¹((n − f − s) / (n − f)),  x = μ − z·σ

n clients in the cohort, f of them Byzantine; μ and σ are the mean and the sample deviation of each coordinate over the honest updates. For
small f, z ≤ 0: the formula then asks for no shift, and `z` may be given. The authors' program shifts down. `shift=up` adds, and
`shift=against` moves each coordinate towards the other sign: it turns the votes of coordinates with |μ| < z·σ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from .base import Attack, Scene

LARGEST = 1 - 1e-6  # share of the normal distribution if no supporters are needed


@dataclass(frozen=True)
class ALIE(Attack):
    z: float | None = None  # deviations; computed from n and f if not given
    shift: Literal["down", "up", "against"] = "down"

    name: ClassVar[str] = "alie"
    source: ClassVar[str] = "Baruch 2019"
    looks: ClassVar[bool] = True

    def updates(self, x: Tensor, scene: Scene, generators: Sequence[np.random.Generator]) -> Tensor:
        mean = scene.honest.mean(0)
        z = deviations(scene.cohort, scene.byzantine) if self.z is None else self.z
        spread = scene.honest.std(0) if len(scene.honest) > 1 else mean.new_zeros(mean.shape)
        way = {"down": -1.0, "up": 1.0, "against": -mean.sign()}[self.shift]
        return (mean + way * (z * spread)).expand_as(x).clone()


def deviations(n: int, f: int) -> float:
    """Return z of the paper, at least 0, for f Byzantine clients among n."""
    supporters = max(0, n // 2 + 1 - f)
    share = (n - f - supporters) / (n - f) if n > f else LARGEST
    z = NormalDist().inv_cdf(min(max(share, 0.5), LARGEST))
    return 0.0 if math.isclose(z, 0.0, abs_tol=1e-12) else z
