"""SCAFFOLD: control variates, which correct the drift of local SGD on clients whose data differ.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic controlled averaging for federated learning. ICML 2020, algorithm 1,
option II. Client i takes K local steps y_i ← y_i − η(g − c_i + c), starting from the model x. Here g is the gradient, η the learning rate,
and c_i and c are the control variates of client i and of the server. Then

    Δc_i = −c + (x − y_i)/(Kη);   c_i ← c_i + Δc_i;   x ← x + η_g/|S| Σ (y_i − x);   c ← c + 1/N Σ Δc_i.

The sums are over the set S of the clients in the round, η_g is --server-lr, and N is the number of all clients. The server broadcasts x and
v = u·c in one vector, and client i sends the changes of x and of v_i = u·c_i in one vector. The scale u is the run's learning rate times
its number of local steps. It gives both halves of the vector values of similar size, so that one codec and one memory suit both. If the
codec sends only a part of the change of v_i, the rest stays in the residual of client i for later rounds. The traffic equals that of
`average` with a model twice as large.
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
from .base import Aggregation, ClientAlgorithm, RoundUpdates
from .optimizers import optimizer

OWN = "scaffold/control"  # name of the scaled control variate v_i in the client state


def control_scale(sgd: LocalSGD) -> float:
    """Return u, the factor of scaled control variates."""
    return sgd.lr * sgd.steps


class ScaffoldClient(ClientAlgorithm):
    """Client half: train with corrected gradients, and send the changes of the weights and of the scaled control variate."""

    def global_layout(self, layout: Layout) -> Layout:
        return layout.doubled("control of ")

    def initial_global_state(self, weights: Tensor) -> Tensor:
        return torch.cat([weights, torch.zeros_like(weights)])

    def model_weights(self, global_state: Tensor) -> Tensor:
        return global_state[: global_state.numel() // 2]

    def gradient_correction(
        self, global_state: Tensor, client_state: Mapping[str, Tensor], sgd: LocalSGD
    ) -> Tensor | None:
        v = global_state[global_state.numel() // 2 :]
        return (v - client_state[OWN].to(v.device) if OWN in client_state else v) / control_scale(
            sgd
        )

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
            change = torch.add(v, update, alpha=control_scale(sgd) / lr_sum).neg_()
            own = change + state[OWN].to(change.device) if OWN in state else change
            torch.cat([update, change], out=row)
            new_states.append({OWN: own.cpu()})
        return sent, new_states


class Scaffold(Average):
    """The mean of the clients' updates and of the changes of their control variates."""

    name: ClassVar[str] = "scaffold"
    required_memory: ClassVar[str] = Residual.name
    supports_weights: ClassVar[bool] = False
    supports_clipping: ClassVar[bool] = False
    uses_lr: ClassVar[bool] = True
    client_algorithm: ClientAlgorithm = ScaffoldClient()

    def _check_settings(self) -> None:
        super()._check_settings()
        config = self.config
        if config.momentum:
            raise ConfigError(
                f"--strategy {self.name} computes a client's mean gradient from its update, which local SGD with momentum "
                f"{config.momentum:g} would scale; leave --momentum out (also in --optimizer)"
            )
        if not optimizer(config.server_optimizer).is_identity:
            raise ConfigError(
                f"--strategy {self.name} adds the mean change of the control variates, and --server-optimizer "
                f"{config.server_optimizer} would alter this change; leave --server-optimizer out"
            )

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        """Return the default codecs with the scope @layer, so that tensors of weights and of control variates are encoded separately."""
        return {name: f"{getattr(RunConfig, name)}@layer" for name in ("uplink", "downlink")}

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        aggregation, accepted = super().aggregate(updates, into), len(updates.accepted)
        n_clients = max(self.config.clients or updates.clients, accepted)
        # Divide control variates by --server-lr, because the server later multiplies the whole update by --server-lr.
        into[self.model_layout.numel :] *= accepted / n_clients / self.config.server_lr
        return aggregation
