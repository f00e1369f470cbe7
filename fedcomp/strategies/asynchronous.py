"""Asynchronous averaging: each update counts when it arrives.

Yu, Wu, Huang: Double quantization for communication-efficient distributed optimization. NeurIPS 2019 (AsyLPG): workers send low-precision
gradients, made from a low-precision copy of a model that has moved on by the time they arrive. Xie, Koyejo, Gupta: Asynchronous federated
optimization. 2019: what is s rounds old counts (1 + s)^−a. Nguyen et al.: Federated learning with buffered asynchronous aggregation.
AISTATS 2022: the model moves when K updates have come.

    θ ← θ + C'(η/K · Σ_i (1 + s_i)^−a C(x_i)),  i the K clients whose updates came first; then K others begin, from the new θ

Low precision both ways is the codecs' part: the uplink's with the clients' memory, and C', the downlink's, with the server's. Unlike AsyLPG
there is no variance reduction, and its bound on delays is kept by giving up clients that are later. server/asynchronous_loop.py runs the
rounds.
"""

from dataclasses import dataclass
from typing import ClassVar

from .. import spec
from ..errors import ConfigError
from .average import Average
from .base import AcceptedUpdate


@dataclass(frozen=True)
class Options:
    wait: float = 0.25  # share of the clients at work whose answers make a round, at least one
    staleness: int = 16  # rounds that an update may be late; who is later is given up
    decay: float = 0.5  # a: an update that is s rounds late counts (1 + s)^-a; 0 = like any other

    def __post_init__(self) -> None:
        spec.check_ranges(self, wait=(0, 1), staleness=(0, 10**9), decay=(0, 1000))


class Asynchronous(Average):
    """The discounted mean of the first updates to arrive."""

    name: ClassVar[str] = "asynchronous"
    Options: ClassVar[type] = Options
    asynchronous: ClassVar[bool] = True

    def _check_settings(self) -> None:
        super()._check_settings()
        if self.config.quorum != 1:
            raise ConfigError(
                f"--strategy {self.name} makes a round of the first answers that come; leave --quorum out, or give "
                f"--strategy {self.name}:wait={self.config.quorum:g}"
            )

    def discount(self, accepted: AcceptedUpdate) -> float:
        return (1.0 + accepted.staleness) ** -self.options.decay
