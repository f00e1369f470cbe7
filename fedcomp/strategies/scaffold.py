"""SCAFFOLD: control variates that take the drift out of local steps.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic controlled averaging for federated learning. ICML 2020, algorithm 1,
option II. Client i takes K steps y ← y − η(g − c_i + c) from the model x, then

    Δc_i = −c + (x − y)/(Kη);   c_i ← c_i + Δc_i;   x ← x + η_g/|S| Σ (y_i − x);   c ← c + 1/N Σ Δc_i

over the cohort S of N clients. Clients send both differences as one vector [Δw; Δv_i], and the global state is [w; v], each twice as
long as the model. v = u·c are the control variates in the unit of updates, with u the run's learning rate times its local steps, so
that both halves have values of one size and pass the same codec and memory. What a frame leaves out of Δv_i is sent later, so c is the
mean of all c_i except for what waits in residuals. A client keeps v_i = u·c_i. The traffic is that of a model twice as large.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..config import RunConfig
from ..errors import ConfigError
from ..layout import Layout
from ..memories.residual import Residual
from ..training.local_sgd import LocalSGD
from .average import Average
from .base import Aggregation, RoundUpdates
from .client_algorithm import ClientAlgorithm
from .optimizers import optimizer

OWN = "scaffold/control"  # v_i in a client's state


class ScaffoldClient(ClientAlgorithm):
    """Train along the corrected gradients g − c_i + c and send [Δw; Δv_i]."""

    def global_layout(self, layout: Layout) -> Layout:
        return layout.twice("control of ")

    def initial_global_state(self, weights: Tensor) -> Tensor:
        return torch.cat([weights, torch.zeros_like(weights)])

    def model_weights(self, global_state: Tensor) -> Tensor:
        return global_state[: global_state.numel() // 2]

    def gradient_correction(
        self, global_state: Tensor, client_state: Mapping[str, Tensor], sgd: LocalSGD
    ) -> Tensor | None:
        v = global_state[global_state.numel() // 2 :]
        return (v - client_state[OWN].to(v.device) if OWN in client_state else v) / _unit(sgd)

    def after_training(
        self,
        updates: Tensor,
        global_state: Tensor,
        client_states: Sequence[Mapping[str, Tensor]],
        sgd: LocalSGD,
        lr_sums: Sequence[float],
    ) -> tuple[Tensor, Sequence[Mapping[str, Tensor]]]:
        m, n = updates.shape
        sent, new_states = updates.new_empty(m, 2 * n), []
        v = global_state[n:].to(updates.device)
        for row, update, state, lr_sum in zip(sent, updates, client_states, lr_sums, strict=True):
            change = torch.add(v, update, alpha=_unit(sgd) / lr_sum).neg_()
            own = change + state[OWN].to(change.device) if OWN in state else change
            torch.cat([update, change], out=row)
            new_states.append({OWN: own.cpu()})
        return sent, new_states


def _unit(sgd: LocalSGD) -> float:
    return sgd.lr * sgd.steps


class Scaffold(Average):
    """The mean of the clients' updates, and of what they learned about their drift."""

    name: ClassVar[str] = "scaffold"
    required_memory: ClassVar[str] = Residual.name
    supports_weights: ClassVar[bool] = False
    supports_clipping: ClassVar[bool] = False
    client_algorithm: ClassVar[ClientAlgorithm] = ScaffoldClient()

    def _check_settings(self) -> None:
        super()._check_settings()
        given = self.config
        if given.momentum:
            raise ConfigError(
                f"--strategy {self.name} reads a client's mean gradient from its update, which momentum makes longer; leave "
                "--momentum out"
            )
        if not optimizer(given.server_optimizer).plain:
            raise ConfigError(
                f"--strategy {self.name} moves the control variates by their mean, of which --server-optimizer "
                f"{given.server_optimizer} would make something else; leave it out"
            )

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        """A share of the coordinates, and a scale, for each tensor of each half: one for all would be that of whichever half is longer."""
        links = {name: f"{getattr(RunConfig, name)}@layer" for name in ("uplink", "downlink")}
        return links | {"memory": Residual.name}

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        aggregation, accepted = super().aggregate(updates, into), len(updates.accepted)
        everybody = max(self.config.clients or updates.clients, accepted)
        # c has a step of its own.
        into[self.model_layout.numel :] *= accepted / everybody / self.config.server_lr
        return aggregation
