"""The client half of the strategy `scaffold`: local SGD along g − c_i + c, and the change of c_i beside that of the weights.

What travels is [w; v], v the control variates in the unit of updates: v = u·c, with u the run's learning rate times its local steps, so
that a codec meets numbers of one size. c_i is kept as v_i.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Layout
from ..training.local_sgd import LocalSGD
from .work import Work

OWN = "scaffold/control"  # v_i, among what a client keeps


@dataclass(frozen=True)
class ControlVariates(Work):
    """Trains along corrected gradients, and proposes [Δw; Δv_i]."""

    def travels(self, layout: Layout) -> Layout:
        return layout.twice("control of ")

    def first(self, weights: Tensor) -> Tensor:
        return torch.cat([weights, torch.zeros_like(weights)])

    def model(self, state: Tensor) -> Tensor:
        return state[: state.numel() // 2]

    def pull(self, state: Tensor, kept: Mapping[str, Tensor], sgd: LocalSGD) -> Tensor | None:
        ours = state[state.numel() // 2 :]
        return (ours - kept[OWN].to(ours.device) if OWN in kept else ours) / _unit(sgd)

    def trained(
        self, update: Tensor, state: Tensor, kept: Mapping[str, Tensor], sgd: LocalSGD, path: float
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        change = torch.add(
            state[state.numel() // 2 :].to(update.device), update, alpha=_unit(sgd) / path
        ).neg_()
        own = change + kept[OWN].to(change.device) if OWN in kept else change
        return torch.cat([update, change]), {OWN: own.cpu()}


def _unit(sgd: LocalSGD) -> float:
    return sgd.lr * sgd.steps
