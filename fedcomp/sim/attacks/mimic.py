"""Mimic: all attackers copy one honest client, whose data then counts more than any other's.

Karimireddy, He, Jaggi: Byzantine-robust learning on heterogeneous datasets via bucketing. ICLR 2022, section 3.2 and appendix B.

    z = argmax_{‖z‖=1} zᵀ (Σ_i (x_i − μ)(x_i − μ)ᵀ) z,  i* = argmax_i |zᵀ x_i|,  x = x_{i*}

The paper learns z over a warm-up of many rounds and keeps i*. Here both are of the current round, since cohorts change. `of` fixes i*; if
that client is not in the cohort or could not train, the formula chooses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .base import Attack, Scene

BLOCK = 1 << 16  # coordinates that are held in float64 at once


@dataclass(frozen=True)
class Mimic(Attack):
    of: int | None = None  # the logical id of the client that is copied

    name: ClassVar[str] = "mimic"
    source: ClassVar[str] = "Karimireddy 2022"
    looks: ClassVar[bool] = True

    def updates(self, x: Tensor, scene: Scene, generators: Sequence[np.random.Generator]) -> Tensor:
        row = scene.clients.index(self.of) if self.of in scene.clients else most_apart(scene.honest)
        return scene.honest[row].expand_as(x).clone()


def most_apart(updates: Tensor) -> int:
    """Return the row of [h, n] that stands out most along the direction in which the rows differ most; 0 if none differs."""
    rows = len(updates)
    apart = torch.zeros(rows, rows, dtype=torch.float64)
    along = torch.zeros(rows, rows, dtype=torch.float64)
    for start in range(0, updates.shape[1], BLOCK):
        block = updates[:, start : start + BLOCK].double()
        deviations = block - block.mean(0)
        apart += (deviations @ deviations.T).cpu()
        along += (block @ deviations.T).cpu()
    _, directions = torch.linalg.eigh(apart)  # z = Σ_i v_i (x_i − μ), but for its length
    return int((along @ directions[:, -1]).abs().argmax())
