"""signSGD with majority vote: one bit a coordinate up, one bit down.

Bernstein, Wang, Azizzadenesheli, Anandkumar: signSGD: compressed optimisation for non-convex problems. ICML 2018, algorithm 3; Bernstein,
Zhao, Azizzadenesheli, Anandkumar: signSGD with majority vote is communication efficient and fault tolerant. ICLR 2019.

    v_i = sign(x_i);   V = the sign that more of the v_i have, in each coordinate;   θ ← θ + η V
    momentum on the server   m ← β m + (1 − β) V;   θ ← θ + η sign(m)
    momentum on the client   x_i is replaced by the memory `signum`'s (the papers' Signum)
    weight decay             θ ← (1 − ηλ) θ before the step is added; clients train without it (ICLR 2019, algorithm 1)

η is `lr`, which is also the step of local SGD: a vote has no length. A zero of x_i is a coin of the client's own, so that those of many
cancel; a tie of the tally is a coin of (seed, round, coordinate), which all sides can toss. In even cohorts these coins cost 2 to 3 points
of accuracy compared with abstaining from ties, so cohorts should be odd. Error feedback is optional: `efsign` with memory `residual`,
whose scale the vote ignores. The usual downlink, `efsign`, loses nothing of ±η.

A client is suspected by the share of all its votes so far that lost where the rest was nearly of one mind: by half the voters or more.
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
from ..codecs.update import Bits
from ..errors import ConfigError, NonFiniteError
from ..kernels import votes
from ..memories.base import Changes, ReadValue, ReadVector
from ..memories.none import NoMemory
from .base import Aggregation, RoundStrategy, RoundUpdates
from .guarantees import even_cohort

MOMENTUM, SUSPICION = "momentum", "suspicion"  # in a checkpoint
LARGEST = float(np.finfo(np.float32).max)
KEEPING = (EFSign, Identity, Half, BFloat16)  # codecs that keep every coordinate of ±η
WIDE = 0.5  # of the voters: a margin from which losing is suspicious


@dataclass(frozen=True)
class Options:
    momentum: float = 0.0  # β, of the server

    def __post_init__(self) -> None:
        spec.check_decays(self, "momentum")


class Vote(RoundStrategy):
    """A step of one length in each coordinate, towards where the majority points."""

    name: ClassVar[str] = "vote"
    Options: ClassVar[type] = Options
    allowed_uplinks: ClassVar[tuple[type[Codec], ...]] = (Sign, EFSign)
    supports_weights: ClassVar[bool] = False
    replaces_server_optimizer: ClassVar[bool] = True
    decays_in_server_step: ClassVar[bool] = True

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.notice = even_cohort(self.cohort_size)
        self.momentum: Tensor | None = None
        if self.options.momentum:
            self.momentum = torch.zeros(self.layout.numel, dtype=torch.float32)
        self._next = self.momentum  # if the model moves
        # By client: its votes that lost by a wide margin, and all of its votes.
        self.judged: dict[int, tuple[int, int]] = {}
        self._judged: dict[int, tuple[int, int]] = {}  # of the round

    def _check_settings(self) -> None:
        super()._check_settings()
        if self.config.lr * self.config.server_lr > LARGEST:
            raise ConfigError(
                f"--lr {self.config.lr:g} is the step of every coordinate, and outside of float32; give one such as 0.01"
            )
        if (
            not isinstance(self.downlink.unscoped, KEEPING)
            and spec.parse(self.config.downlink_memory).parts[0].name == NoMemory.name
        ):
            raise ConfigError(
                f"--strategy {self.name} moves all coordinates by one length, of which --downlink {self.downlink} loses "
                "a part for good; leave --downlink out, or give --downlink-memory residual"
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
        if cast := self._ballots(updates):
            self._step(self._tally(cast, updates), updates, into)
        return Aggregation(decay=self._decay(updates.round))

    def _ballots(self, updates: RoundUpdates) -> dict[int, np.ndarray | bytes]:
        """Return the packed signs of the last phase's updates by client."""
        found: dict[int, np.ndarray | bytes] = {}
        for a in updates.accepted:
            if isinstance(a.update, Bits):
                found[a.client] = a.update.raw
            elif a.update is not None:
                zeros = seeds.key(self.config.seed, "zeros", updates.round, a.client)
                found[a.client] = kernels.bits.signs(a.update.dense(), zeros)
        return found

    def _tally(self, cast: Mapping[int, np.ndarray | bytes], updates: RoundUpdates) -> np.ndarray:
        """Return the majority, packed, of packed votes by client. Count the votes of each client against it."""
        numel, ballots = self.layout.numel, [*cast.values()]
        result = votes.majority(ballots, numel, seeds.key(self.config.seed, "tie", updates.round))
        _, lost = votes.disagreement(ballots, result, numel, max(2, round(WIDE * len(ballots))))
        self._judged = {client: (int(wide), numel) for client, wide in zip(cast, lost, strict=True)}
        return result

    def _step(self, result: np.ndarray, updates: RoundUpdates, into: Tensor) -> None:
        """Write the step that follows from a packed majority into `into` [numel]."""
        numel, lr = self.layout.numel, self.config.lr * self.schedule.rate(updates.round)
        edge = max(map(abs, updates.weights.aminmax())) if numel else 0.0
        if not float(edge) + lr * self.config.server_lr <= LARGEST:
            raise NonFiniteError(
                f"a step of {lr:g} would take the model out of the range of float32; lower --lr"
            )
        if self.momentum is not None:
            majority = torch.from_numpy(kernels.Signs(result, numel, 1.0).values())
            self._next = (self.momentum * self.options.momentum).add_(
                majority, alpha=1 - self.options.momentum
            )
            tie = seeds.key(self.config.seed, "tie", updates.round)
            result = np.frombuffer(kernels.bits.signs(self._next, tie), np.uint8)
        into.copy_(torch.from_numpy(kernels.Signs(result, numel, lr).values()))

    def _decay(self, round: int) -> float:
        step = self.config.lr * self.schedule.rate(round) * self.config.server_lr
        return float(np.float32(max(0.0, 1.0 - step * self.config.weight_decay)))

    def on_round_end(self, round: int, broadcast: bytes | None) -> None:
        if broadcast is not None:
            self.momentum, self.judged = self._next, self._judged_so_far()
        self._judged = {}

    @property
    def suspicion(self) -> Mapping[int, float]:
        return {client: lost / cast for client, (lost, cast) in self._judged_so_far().items()}

    def _judged_so_far(self) -> dict[int, tuple[int, int]]:
        """Return the counts of all rounds, the current one included."""
        found = dict(self.judged)
        for client, (lost, cast) in self._judged.items():
            lost_before, cast_before = found.get(client, (0, 0))
            found[client] = lost_before + lost, cast_before + cast
        return dict(sorted(found.items()))

    def take_changes(self) -> Changes:
        vectors = {} if self.momentum is None else {MOMENTUM: self.momentum}
        judged = [[client, *counts] for client, counts in sorted(self.judged.items())]
        return vectors, {SUSPICION: json.dumps(judged).encode()}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        judged = json.loads(value(SUSPICION))
        self.judged = {client: (lost, cast) for client, lost, cast in judged}
        if self.momentum is not None:
            self.momentum = self._next = vector(MOMENTUM)
