"""Asynchronous averaging: the server updates the model whenever enough client updates have arrived.

This strategy combines ideas of three papers:

    Nguyen et al.: Federated learning with buffered asynchronous aggregation. AISTATS 2022. The server updates the model when K client
    updates have arrived.
    Xie, Koyejo, Gupta: Asynchronous federated optimization. 2019. An update of staleness s has the weight (1 + s)^−a, where a is the option
    `decay`.
    Yu, Wu, Huang: Double quantization for communication-efficient distributed optimization. NeurIPS 2019. The algorithm, AsyLPG, sends
    both the model and the gradients in low precision. AsyLPG also has variance reduction, which this strategy does not have.

The server updates the model θ by

    θ ← θ + C'(η/K · Σ_i (1 + s_i)^−a C(x_i)).

Here η is --server-lr, x_i is the update of client i, and the sum is over the first K updates that arrive. K is the option `wait` times the
number of clients in training. After the step, K idle clients start to train from the new θ. The staleness s_i is the number of rounds since
client i started to train. C is the uplink codec with the clients' memory, and C' the downlink codec with the server's memory. The formula
is for --weights uniform. The server rejects updates whose staleness exceeds the option `staleness`. server/asynchronous_loop.py runs the
rounds.
"""

from dataclasses import dataclass
from typing import ClassVar

from .. import spec
from ..errors import ConfigError
from .average import Average
from .base import AcceptedUpdate


@dataclass(frozen=True)
class AsynchronousOptions:
    wait: float = 0.25  # a round ends when this fraction of the clients in training has answered
    staleness: int = 16  # largest accepted staleness of an update, in rounds
    decay: float = 0.5  # a: an update of staleness s is multiplied by (1 + s)^-a; 0 = no discount

    def __post_init__(self) -> None:
        spec.check_ranges(self, wait=(0, 1), staleness=(0, 10**9), decay=(0, 1000))


class Asynchronous(Average):
    """The mean of the updates that arrive first. Stale updates are multiplied by a factor below 1."""

    name: ClassVar[str] = "asynchronous"
    Options: ClassVar[type] = AsynchronousOptions
    asynchronous: ClassVar[bool] = True

    def _check_settings(self) -> None:
        super()._check_settings()
        if self.config.quorum != 1:
            raise ConfigError(
                f"--strategy {self.name} ends a round when the first updates have arrived, so --quorum has no effect; leave --quorum out, "
                f"or give --strategy {self.name}:wait={self.config.quorum:g}"
            )

    def discount(self, accepted: AcceptedUpdate) -> float:
        return (1.0 + accepted.staleness) ** -self.options.decay
