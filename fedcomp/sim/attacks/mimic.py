"""The attack mimic: all attackers copy the update of one honest client, so that the data of this client gets too much weight.

Karimireddy, He, Jaggi, "Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022, section 3.2 and appendix B:

    z = argmax_{‖z‖=1} zᵀ (Σ_i (x_i − μ)(x_i − μ)ᵀ) z,  i* = argmax_i |zᵀ x_i|,  x = x_{i*}

The honest updates x_i have the mean μ, and the attackers copy the update of client i*. In the paper, the attackers choose i* once, after
several warm-up rounds. In this implementation, they choose i* in each round, since cohorts change. The option `of` sets i*. In rounds
without a finite update of the client `of`, the formula chooses i*.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Attack, Generators, UpdateContext

BLOCK = 1 << 16  # number of coordinates that are converted to float64 together


@dataclass(frozen=True)
class Mimic(Attack):
    of: int | None = None  # id of the client to copy; None: the client i* of the formula above

    name: ClassVar[str] = "mimic"
    source: ClassVar[str] = "Karimireddy 2022"
    uses_honest_updates: ClassVar[bool] = True

    def updates(self, x: Tensor, context: UpdateContext, generators: Generators) -> Tensor:
        clients, updates = context.honest_clients, context.honest_updates
        row = clients.index(self.of) if self.of in clients else extreme_row(updates)
        return updates[row].expand_as(x).clone()


def extreme_row(updates: Tensor) -> int:
    """Return the index of the update (row) with the largest projection on the first principal component, or 0 if all rows are equal."""
    rows = len(updates)
    gram = torch.zeros(rows, rows, dtype=torch.float64)  # (x_i − μ)ᵀ (x_j − μ)
    projections = torch.zeros(rows, rows, dtype=torch.float64)  # x_iᵀ (x_j − μ)
    for start in range(0, updates.shape[1], BLOCK):
        block = updates[:, start : start + BLOCK].double()
        deviations = block - block.mean(0)
        gram += (deviations @ deviations.T).cpu()
        projections += (block @ deviations.T).cpu()
    # The last eigenvector belongs to the largest eigenvalue.
    _, eigenvectors = torch.linalg.eigh(gram)
    return int((projections @ eigenvectors[:, -1]).abs().argmax())
