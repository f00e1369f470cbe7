"""PowerSGD in two phases: a low-rank approximation of the mean of the clients' update matrices.

Vogels, Karimireddy, Jaggi: PowerSGD: Practical low-rank gradient compression for distributed optimization. NeurIPS 2019, algorithm 1.

    Phase left:    The server announces a factor Q, which is random in round 1. Client i sends Pᵢ = Mᵢ Q, where Mᵢ is a matrix of its
                   update plus the residual of its memory. The server computes the weighted mean of the Pᵢ, and P̂, an orthonormal basis of
                   the columns of this mean.
    Phase right:   The server announces the basis P̂. Client i sends Qᵢ = Mᵢᵀ P̂. The server computes Q, the weighted mean of the Qᵢ. The
                   update is P̂ Qᵀ, and the next round starts from Q.

Both phases are linear in Mᵢ, so the update is one step of power iteration on the mean of the Mᵢ. The error of client i, Mᵢ − P̂ Qᵢᵀ, stays
in its error-feedback memory `lowrank`. In the phase `right`, clients also send vectors and small matrices uncompressed. A matrix is small
if its factors would have at least as many values as the matrix.

The default downlink codec, `identity`, sends the update uncompressed. In the paper, there is no server. Here, the server announces Q and P̂
to every client, which counts as traffic. If a client does not answer in the phase `right`, its memory rolls back, although its Pᵢ has
contributed to P̂.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import seeds
from ..codecs import Update
from ..codecs.identity import Identity
from ..codecs.matrices import FLOAT, as_arrays, read_arrays, total_numel
from ..codecs.powersgd import FactorLayout, normal, orthonormal
from ..codecs.powersgd import PowerSGD as Factors
from ..errors import ConfigError, FrameError, NonFiniteError
from ..memories.base import Changes, ReadValue, ReadVector
from ..memories.lowrank import LEFT, NUMBERS, RIGHT, LowRank
from .average import Average
from .base import (
    AcceptedByPhase,
    Aggregation,
    ClientAlgorithm,
    Phase,
    PhaseResult,
    RoundUpdates,
)


@dataclass(frozen=True)
class PowerSGDOptions:
    rank: int = 2  # number of columns of P̂ and Q; larger = more bytes, smaller error

    def __post_init__(self) -> None:
        Factors(self.rank)


class PowerSGD(Average):
    """A low-rank approximation of the mean update, whose factors the server averages in two phases."""

    name: ClassVar[str] = "powersgd"
    Options: ClassVar[type] = PowerSGDOptions
    required_memory: ClassVar[str] = LowRank.name
    supports_clipping: ClassVar[bool] = False
    client_algorithm: ClientAlgorithm = ClientAlgorithm((LEFT, RIGHT))

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.factor_layout = factors = FactorLayout(self.layout, self.options.rank)
        if not factors.matrices:
            raise ConfigError(
                f"--strategy {self.name} with rank={self.options.rank} compresses nothing: no tensor of the model is larger than its "
                "factors; give a lower rank, or --strategy average"
            )
        self.left_numel = total_numel(factors.left_shapes)
        self.right_numel = total_numel(factors.right_shapes)
        self.second_numel = self.right_numel + total_numel(factors.other_shapes)
        start = normal(seeds.key(self.config.seed, self.name), self.right_numel)
        self.right = start.astype(FLOAT).tobytes()  # Q
        self.basis = b""  # the basis P̂ of the current round
        self._next = b""  # new factor Q, stored if this round updates the model

    def _check_settings(self) -> None:
        super()._check_settings()
        if self.uplink != Factors(self.options.rank):
            raise ConfigError(
                f"--strategy {self.name} sends factors of rank {self.options.rank}, not --uplink {self.uplink}; "
                f"leave --uplink out, or give {Factors(self.options.rank)}"
            )

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        return {"uplink": f"{Factors.name}:rank={options.rank}", "downlink": Identity.name}

    def announce(self, phase: Phase, client: int, before: AcceptedByPhase) -> Mapping[str, bytes]:
        return {RIGHT: self.right} if phase.name == LEFT else {LEFT: self.basis}

    def on_phase_end(self, result: PhaseResult) -> Mapping[int, str]:
        if result.phase == LEFT and result.accepted:
            mean = self.weighted_mean(result.accepted, self.left_numel).numpy()
            if not np.isfinite(mean).all():
                raise NonFiniteError(
                    "the mean of the clients' factors P contains NaN or infinity; lower --lr"
                )
            factors = as_arrays(mean, self.factor_layout.left_shapes)
            bases = [orthonormal(torch.from_numpy(factor.astype(np.float64))) for factor in factors]
            self.basis = b"".join(basis.numpy().astype(FLOAT).tobytes() for basis in bases)
        return {}

    def open(self, phase: Phase, frames: Sequence[bytes]) -> list[Update | FrameError]:
        numel = self.left_numel if phase.name == LEFT else self.second_numel
        return NUMBERS.open_batch(frames, numel)

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        numbers = self.weighted_mean(updates.phases[RIGHT], self.second_numel).numpy()
        self.factor_layout.update(self.basis, numbers).add_to(into)
        self._next = numbers[: self.right_numel].tobytes()
        return Aggregation()

    def on_round_end(self, round: int, broadcast: bytes | None) -> None:
        if broadcast is not None:
            self.right = self._next

    def take_changes(self) -> Changes:
        return {}, {RIGHT: self.right}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        self.right = value(RIGHT) or b""
        read_arrays(self.right, self.factor_layout.right_shapes)  # raises ValueError
