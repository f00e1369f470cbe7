"""signSGD with majority vote: one bit per coordinate on the uplink and on the downlink.

Bernstein, Wang, Azizzadenesheli, Anandkumar: signSGD: compressed optimisation for non-convex problems. ICML 2018, algorithm 3; Bernstein,
Zhao, Azizzadenesheli, Anandkumar: signSGD with majority vote is communication efficient and fault tolerant. ICLR 2019. Client i sends the
signs of its update x_i, and the server updates the model θ:

    v_i = sign(x_i),   V = majority of the v_i in each coordinate;   θ ← θ + η V.
    Momentum on the server:   m ← β m + (1 − β) V;   θ ← θ + η sign(m)   (option `momentum` = β).
    Momentum on the client:   the memory `signum` replaces x_i by its momentum ("Signum" in the papers).
    Weight decay:             θ ← (1 − ηλ) θ before the step, with λ = --weight-decay; clients train without it (ICLR 2019, algorithm 1).

The step size η is --lr times --server-lr, since a majority of signs has no magnitude. A zero in x_i gets a random sign, which differs
between clients, so that these signs cancel on average. The number of clients in a round should be odd. With an even number, there are ties,
which are broken at random. This costs 2 to 3 percentage points of accuracy, compared with no step at tied coordinates. Error feedback is
optional: with the codec `efsign` and the memory `residual`, clients correct the errors of their signs, and the vote ignores the scales of
`efsign`. The default downlink codec, `efsign`, sends ±η without loss.

A client has one vote per coordinate in each round. Its *suspicion* is the fraction of its votes in all rounds that contradicted a large
majority. A majority is large if the numbers of votes for and against differ by at least half of the number of voters, and by at least two.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import kernels, seeds, spec
from ..codecs import Codec
from ..codecs.efsign import EFSign
from ..codecs.identity import BFloat16, Half, Identity
from ..codecs.sign import Sign
from ..errors import ConfigError, NonFiniteError
from ..kernels import votes as kernel
from ..memories.base import Changes, ReadValue, ReadVector
from ..memories.none import NoMemory
from .base import Aggregation, RoundStrategy, RoundUpdates
from .codes import signs_of

MOMENTUM, SUSPICION = "momentum", "suspicion"  # names of entries in a checkpoint
LARGEST = float(np.finfo(np.float32).max)
# Codecs that keep the signs and the equal magnitudes of a vector of ±η
LOSSLESS = (EFSign, Identity, Half, BFloat16)
LARGE_MAJORITY = 0.5  # smallest difference of a large majority, as a fraction of the voters


@dataclass(frozen=True)
class VoteOptions:
    momentum: float = 0.0  # β: factor of the momentum on the server

    def __post_init__(self) -> None:
        spec.check_decays(self, "momentum")


class Vote(RoundStrategy):
    """A majority vote on the signs of the updates: every coordinate moves by the same amount."""

    name: ClassVar[str] = "vote"
    Options: ClassVar[type] = VoteOptions
    allowed_uplinks: ClassVar[tuple[type[Codec], ...]] = (Sign, EFSign)
    supports_weights: ClassVar[bool] = False
    replaces_server_optimizer: ClassVar[bool] = True
    decays_in_server_step: ClassVar[bool] = True
    uses_lr: ClassVar[bool] = True

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.notice = even_cohort(self.cohort_size)
        self.momentum: Tensor | None = None
        if self.options.momentum:
            self.momentum = torch.zeros(self.layout.numel, dtype=torch.float32)
        self._next = self.momentum  # new momentum, stored if this round updates the model
        # For each client, the number of its votes that contradicted a large majority, and the number of all its votes.
        self._counts: dict[int, tuple[int, int]] = {}
        self._next_counts = self._counts  # become `_counts` if this round updates the model

    def _check_settings(self) -> None:
        super()._check_settings()
        if self.config.lr * self.config.server_lr > LARGEST:
            raise ConfigError(
                f"--strategy {self.name} changes every weight by --lr {self.config.lr:g} times --server-lr {self.config.server_lr:g}, "
                "which exceeds the range of float32; give smaller values, such as --lr 0.01"
            )
        if (
            not isinstance(self.downlink.unscoped, LOSSLESS)
            and spec.parse(self.config.downlink_memory).parts[0].name == NoMemory.name
        ):
            raise ConfigError(
                f"--strategy {self.name} changes every coordinate by the same amount, but --downlink {self.downlink} cannot send "
                "such changes exactly; leave --downlink out, or give --downlink-memory residual"
            )

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        return {
            "uplink": Sign.name,
            "memory": NoMemory.name,
            "downlink": EFSign.name,
            "downlink_memory": NoMemory.name,
        }

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        config, round = self.config, updates.round
        ballots = {
            a.client: signs_of(a.update, seeds.key(config.seed, "zeros", round, a.client))
            for a in updates.accepted
            if a.update is not None
        }
        if ballots:
            self._step(self._tally(ballots, updates), updates, into)
        step = config.lr * self.schedule.rate(round) * config.server_lr
        return Aggregation(decay=float(np.float32(max(0.0, 1.0 - step * config.weight_decay))))

    def _tally(
        self, ballots: Mapping[int, kernel.PackedSigns], updates: RoundUpdates
    ) -> np.ndarray:
        """Return the packed signs of the majority, and count each client's votes against large majorities.

        `ballots`: by client, the packed signs of its update.
        """
        numel, votes = self.layout.numel, [*ballots.values()]
        result = kernel.majority(votes, numel, seeds.key(self.config.seed, "tie", updates.round))
        large = max(2, round(LARGE_MAJORITY * len(votes)))
        _, lost = kernel.disagreement(votes, result, numel, large)
        self._next_counts = dict(self._counts)
        for client, n in zip(ballots, lost, strict=True):
            if self._has_suspicion(client):
                lost_before, cast_before = self._counts.get(client, (0, 0))
                self._next_counts[client] = lost_before + int(n), cast_before + numel
        return result

    def _has_suspicion(self, client: int) -> bool:
        """Return whether the votes of this client in this round count for its suspicion."""
        return True

    def _step(self, result: np.ndarray, updates: RoundUpdates, into: Tensor) -> None:
        """Write the step, without the factor --server-lr, to the tensor `into` [numel]. `result`: the packed signs of the majority."""
        numel, lr = self.layout.numel, self.config.lr * self.schedule.rate(updates.round)
        largest = max(map(abs, updates.weights.aminmax())) if numel else 0.0
        if not float(largest) + lr * self.config.server_lr <= LARGEST:
            raise NonFiniteError(
                f"a step of {lr * self.config.server_lr:g} would take a weight out of the range of float32; lower --lr"
            )
        if self.momentum is not None:
            majority = torch.from_numpy(kernels.sign_values(result, numel, 1.0))
            self._next = (self.momentum * self.options.momentum).add_(
                majority, alpha=1 - self.options.momentum
            )
            tie = seeds.key(self.config.seed, "tie", updates.round)
            result = np.frombuffer(kernels.bits.signs(self._next, tie), np.uint8)
        into.copy_(torch.from_numpy(kernels.sign_values(result, numel, lr)))

    def on_round_end(self, round: int, broadcast: bytes | None) -> None:
        if broadcast is not None:
            self.momentum, self._counts = self._next, self._next_counts
        self._next_counts = self._counts

    @property
    def suspicion(self) -> Mapping[int, float]:
        return {client: lost / cast for client, (lost, cast) in sorted(self._next_counts.items())}

    def take_changes(self) -> Changes:
        vectors = {} if self.momentum is None else {MOMENTUM: self.momentum}
        counts = [[client, *pair] for client, pair in sorted(self._counts.items())]
        return vectors, {SUSPICION: json.dumps(counts).encode()}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        counts = json.loads(value(SUSPICION) or b"[]")
        self._counts = {client: (lost, cast) for client, lost, cast in counts}
        self._next_counts = self._counts
        if self.momentum is not None:
            self.momentum = self._next = vector(MOMENTUM)


def majority(votes: Tensor | np.ndarray, seed: int) -> Tensor | np.ndarray:
    """Return the majority [n] in each column of `votes` [voters, n], as a tensor or array like `votes`. All values are +1 or −1.

    A tie gets a random sign, which depends on `seed` and the column. Raises ConfigError if `votes` has another shape or other values.
    """
    array = votes if isinstance(votes, Tensor) else np.asarray(votes)
    if array.ndim != 2 or len(array) == 0:
        raise ConfigError(
            f"the votes have the shape {list(array.shape)}; give an array [voters, n] with at least one voter"
        )
    if not ((array == 1) | (array == -1)).all():
        raise ConfigError(
            "the votes contain values other than 1 and −1; first replace each zero by a random sign"
        )
    n = array.shape[1]
    bits = np.unpackbits(kernel.majority([*kernel.pack(array)], n, seed), count=n)
    if isinstance(array, Tensor):
        return 2 * torch.from_numpy(bits).to(array) - 1
    return 2 * bits.astype(array.dtype) - 1


def even_cohort(clients: int) -> str:
    """Return a warning about ties if the number of clients in a round is even, or "" if it is odd or unknown (0)."""
    if clients % 2 or not clients:
        return ""
    return (
        f"the number of clients in a round is {clients}, which is even: ties of the vote are broken at random, which costs accuracy; "
        "make the number odd with --clients or --participation"
    )
