"""Low margin: votes against the majority where it is thin, and with the liar's own update elsewhere.

    S = Σ_i sign(x_i) over the honest;  x_j ← −sign(S_j)·|x_j| where 0 < |S_j| ≤ b, else x_j

b is the number of this attack's liars in the cohort unless it is given: votes that they can turn or tie. All their votes go where they
count, and a look at how often a vote lost by a wide margin finds nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ...errors import SpecError
from .base import Attack, Scene


@dataclass(frozen=True)
class LowMargin(Attack):
    margin: int | None = None  # b, in votes

    name: ClassVar[str] = "low-margin"
    looks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin is not None and self.margin < 1:
            raise SpecError(f"margin is {self.margin}; give at least 1")

    def updates(self, x: Tensor, scene: Scene, generators: Sequence[np.random.Generator]) -> Tensor:
        tally = scene.honest.sign().sum(0)
        thin = (tally != 0) & (tally.abs() <= (scene.liars if self.margin is None else self.margin))
        size = x.abs()
        size = torch.where(size > 0, size, size.mean(1, keepdim=True))  # a zero has no side
        return torch.where(thin, -tally.sign() * size, x)
