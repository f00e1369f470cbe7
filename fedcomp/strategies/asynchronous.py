"""Asynchronous averaging: the server aggregates updates as they arrive.

Yu, Wu, Huang: Double quantization for communication-efficient distributed optimization. NeurIPS 2019 (AsyLPG): workers compute gradients at
a low-precision copy of the model and send them in low precision; the model has moved when they arrive. Xie, Koyejo, Gupta: Asynchronous
federated optimization. 2019: an update of staleness s has the weight (1 + s)^−a. Nguyen et al.: Federated learning with buffered
asynchronous aggregation. AISTATS 2022: the model moves when K updates have arrived.

    θ ← θ + C'(η/K · Σ_i (1 + s_i)^−a C(x_i)),  the sum over the K clients whose updates arrive first; then K other clients start from θ

The codecs provide the low precision in both directions: C is the uplink codec with the clients' memory, C' the downlink codec with the
server's memory. Unlike in AsyLPG, there is no variance reduction, and the server rejects clients whose staleness exceeds the option
`staleness`. server/asynchronous_loop.py runs the rounds.
"""

from dataclasses import dataclass
from typing import ClassVar

from .. import spec
from ..errors import ConfigError
from .average import Average
from .base import AcceptedUpdate


@dataclass(frozen=True)
class AsynchronousOptions:
    wait: float = 0.25  # fraction of the training clients whose answers complete a round
    staleness: int = 16  # largest staleness of an update in rounds; the server abandons later ones
    decay: float = 0.5  # a: an update of staleness s has the weight (1 + s)^-a; 0 = no discount

    def __post_init__(self) -> None:
        spec.check_ranges(self, wait=(0, 1), staleness=(0, 10**9), decay=(0, 1000))


class Asynchronous(Average):
    """The mean of the first updates to arrive, discounted by staleness."""

    name: ClassVar[str] = "asynchronous"
    Options: ClassVar[type] = AsynchronousOptions
    asynchronous: ClassVar[bool] = True

    def _check_settings(self) -> None:
        super()._check_settings()
        if self.config.quorum != 1:
            raise ConfigError(
                f"--strategy {self.name} completes a round with the first answers, so --quorum has no effect; leave --quorum out, or give "
                f"--strategy {self.name}:wait={self.config.quorum:g}"
            )

    def discount(self, accepted: AcceptedUpdate) -> float:
        return (1.0 + accepted.staleness) ** -self.options.decay
