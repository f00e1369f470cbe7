"""The low-margin attack: vote against the majority sign in coordinates where the majority is narrow, and honestly in all others.

    S = Σ_i sign(u_i) over the honest clients i;  x_j ← −sign(S_j)·|x_j| at coordinates j with 0 < |S_j| ≤ b, else x_j

Here, u_i is the update of client i, and x is an attacker's update, with the coordinates x_j. The option `margin` sets b. By default, b is
the number of attackers in the cohort, because b votes can outweigh or balance a majority of at most b votes. A rule that excludes
clients that often vote against clear majorities does not detect this attack.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Attack, Generators, UpdateContext


@dataclass(frozen=True)
class LowMargin(Attack):
    # Largest majority, in votes, against which the attackers vote; None: the number of attackers in the cohort.
    margin: int | None = None

    name: ClassVar[str] = "low-margin"
    uses_honest_updates: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"margin": (1, math.inf)}

    def updates(self, x: Tensor, context: UpdateContext, generators: Generators) -> Tensor:
        tally = context.honest_updates.sign().sum(0)
        margin = context.n_byzantine if self.margin is None else self.margin
        narrow = (tally != 0) & (tally.abs() <= margin)
        magnitude = x.abs()
        # A coordinate of 0 has no sign, and is therefore no vote. Give it the mean magnitude of the update instead.
        magnitude = torch.where(magnitude > 0, magnitude, magnitude.mean(1, keepdim=True))
        return torch.where(narrow, -tally.sign() * magnitude, x)
