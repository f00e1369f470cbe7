"""SCAFFOLD: control variates that take the drift out of local steps.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic controlled averaging for federated learning. ICML 2020, algorithm 1,
option II. Client i takes K steps y ← y − η(g − c_i + c) from the model x, then

    Δc_i = −c + (x − y)/(Kη);   c_i ← c_i + Δc_i;   x ← x + η_g/|S| Σ (y_i − x);   c ← c + 1/N Σ Δc_i

over the cohort S of N clients. Both differences are one vector here, [Δw; Δv] of twice the length, and so is what the server sends: v is c
in the unit of updates (clients/scaffold.py). So control variates go through the codecs like weights, with the same memory: what a frame
leaves out of Δv comes later, and c is the mean of all c_i but for what waits in residuals. All clients at a version hold the same c.
It costs as much as a model twice as large, and a client keeps c_i.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from .. import spec
from ..clients.scaffold import ControlVariates
from ..clients.work import Work
from ..config import RunConfig
from ..errors import ConfigError
from ..memories.residual import Residual
from .average import Average
from .base import Rules
from .exchange import Accepted


class Scaffold(Average):
    """The mean of the clients' updates, and of what they learned about their drift."""

    name: ClassVar[str] = "scaffold"
    clips: ClassVar[bool] = False
    work: ClassVar[Work] = ControlVariates()

    def __init__(self, rules: Rules | None = None, **told: Any):
        super().__init__(rules, **told)
        given = self.rules
        if spec.parse(given.memory).parts[0].name != Residual.name:
            raise ConfigError(
                f"strategy '{self.name}' sends every change of a control variate once, and memory '{given.memory}' may lose "
                "or change it; leave --memory out, or give residual"
            )
        if given.weights != "uniform":
            raise ConfigError(
                f"strategy '{self.name}' keeps the plain mean of all control variates; leave --weights out"
            )
        if given.momentum:
            raise ConfigError(
                f"strategy '{self.name}' reads a client's mean gradient from its update, which momentum makes longer; leave "
                "--momentum out"
            )
        if not self.optimizer.plain:
            raise ConfigError(
                f"strategy '{self.name}' moves the control variates by their mean, of which --server-optimizer "
                f"{given.server_optimizer} would make something else; leave it out"
            )

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        """A share of the coordinates, and a scale, for each tensor of each half: one for all would be that of whichever half is longer."""
        return {name: f"{getattr(RunConfig, name)}@layer" for name in ("uplink", "downlink")}

    def aggregate(self, phases: Mapping[str, Sequence[Accepted]], into: Tensor) -> None:
        super().aggregate(phases, into)
        (accepted,) = phases.values()
        everybody = max(self.rules.clients or len(self.versions), len(accepted))
        into[self.model_layout.numel :] *= (
            len(accepted) / everybody / self.rules.server_lr
        )  # c has a step of its own
