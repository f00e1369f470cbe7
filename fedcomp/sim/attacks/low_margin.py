"""Low margin: vote against thin majorities, and with the client's own update elsewhere.

    S = Σ_i sign(x_i) over the honest;  x_j ← −sign(S_j)·|x_j| where 0 < |S_j| ≤ b, else x_j

b is the number of this attack's clients in the cohort unless it is given: the votes that they can turn or tie. All their votes count, and
a rule that looks for votes which lost by a wide margin finds none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .base import Attack, Scene


@dataclass(frozen=True)
class LowMargin(Attack):
    margin: int | None = None  # b, in votes

    name: ClassVar[str] = "low-margin"
    looks: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"margin": (1, 1e9)}

    def updates(self, x: Tensor, scene: Scene, generators: Sequence[np.random.Generator]) -> Tensor:
        tally = scene.honest.sign().sum(0)
        thin = (tally != 0) & (
            tally.abs() <= (scene.byzantine if self.margin is None else self.margin)
        )
        size = x.abs()
        size = torch.where(size > 0, size, size.mean(1, keepdim=True))  # a zero has no side
        return torch.where(thin, -tally.sign() * size, x)
