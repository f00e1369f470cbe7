"""Virtual time of a run: the clients that a round can be drawn from, its duration, and its state in checkpoints.

As in a deployment, rounds are drawn from the clients that are online, and a client that missed a deadline is not drawn while enough
others are online, until its late answer arrives (server/availability.py). While too few clients are online, virtual time passes.
"""

import json
import math
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from .. import seeds
from ..config import RunConfig
from ..errors import RunFolderError
from ..memories.base import Changes
from ..messages import Assignment
from ..server.availability import Availability, Quota
from ..server.round_loop import RoundResult
from ..server.transport import Transport
from ..strategies.client_algorithm import ClientAlgorithm
from ..strategies.cohort import cohort_size
from ..strategies.round_completion import DEADLINE
from ..training.local_sgd import LocalSGD
from .network import Network
from .timed_transport import TimedTransport, VirtualClock

STATE = "state"  # in a checkpoint
SLOWEST = 4.0  # the slowest clients take this many times as long as the fastest
SWING = 0.5  # largest relative change of a client's time from round to round


class Timing:
    """The clock and the transport of a run on a virtual network, and the clients that its rounds may be drawn from.

    `fewest`: the number of clients that the strategy needs in a round.
    """

    def __init__(
        self,
        network: Network,
        config: RunConfig,
        fewest: int,
        transport: Transport,
        steps: Callable[[Assignment], int],
    ):
        self.network, self.clock = network, VirtualClock()
        self.transport = TimedTransport(transport, network, self.clock, steps)
        self._quota = Quota.later(
            config, cohort_size(config.participation, config.clients)
        ).at_least(min(fewest, config.clients))
        self._availability, self._source = Availability(), config.network

    def work_s(self, round: int, client: int) -> float:
        """Return the seconds from a client's newest assignment to its answer. `round` is ignored."""
        return self.transport.took[client]

    def gather(self) -> Sequence[int]:
        """Advance virtual time until enough clients are online. Return the clients that a round may be drawn from."""
        waited_s = 0.0
        while True:
            self._hear()
            away = self.network.absences.away(self.clock.time_s)
            here = [client for client in self.transport.clients() if not away[client]]
            if (cohort := self._availability.cohort_of(here, self._quota, waited_s)) is not None:
                return cohort
            step_s = self._until_news(waited_s)
            if math.isinf(step_s):
                return here
            waited_s += step_s
            self.clock.wait(step_s)

    def on_round_end(self, outcome: RoundResult) -> None:
        """Update which clients are silent."""
        self._availability.mark_silent(r.client for r in outcome.rejections if r.stage == DEADLINE)
        for accepted in outcome.accepted:
            self._availability.mark_responsive(accepted.client)

    def _hear(self) -> None:
        """Record the clients whose late answers have arrived as not silent."""
        now_s = self.clock.time_s
        for client in [client for client, due_s in self.transport.late.items() if due_s <= now_s]:
            del self.transport.late[client]
            self._availability.mark_responsive(client)

    def _until_news(self, waited_s: float) -> float:
        """Return the seconds until a client goes offline or returns, a late answer arrives, or the quota's patience ends."""
        moments = [
            self.network.absences.next_change_s(self.clock.time_s),
            *self.transport.late.values(),
        ]
        patience_s = self._quota.patience_s
        return min(
            min(moments) - self.clock.time_s,
            math.inf if patience_s is None or waited_s >= patience_s else patience_s - waited_s,
        )

    # Checkpoints.

    def take_changes(self) -> Changes:
        self.transport.forget_finished()
        state = {
            "network": self.network.profiles.fingerprint,
            "time_s": self.clock.time_s,
            "busy": [[client, *times] for client, times in self.transport.busy.items()],
            "late": [*self.transport.late.items()],
            "silent": sorted(self._availability.silent),
            "usual": self._availability.usual if math.isfinite(self._availability.usual) else None,
        }
        return {}, {STATE: json.dumps(state).encode()}

    def restore(
        self, vector: Callable[[str], Tensor | None], value: Callable[[str], bytes | None]
    ) -> None:
        """Continue from a checkpoint of `take_changes`.

        Raises RunFolderError for a checkpoint with another network, and ValueError, KeyError or TypeError for a malformed one.
        """
        state = json.loads(value(STATE))
        if state["network"] != self.network.profiles.fingerprint:
            raise RunFolderError(
                f"--network {self._source} has other values than when the run began; restore them, or give another --out"
            )
        self.clock.move_to(state["time_s"])
        self.clock.take()
        self.transport.busy = {client: (begins, ends) for client, begins, ends in state["busy"]}
        self.transport.late = dict(state["late"])
        self._availability.silent = set(state["silent"])
        self._availability.usual = math.inf if state["usual"] is None else state["usual"]


def random_work_s(seed: int) -> Callable[[int, int], float]:
    """Return a function of (round, client): the virtual seconds of a client's round without a network, drawn from the seed."""

    def seconds(round: int, client: int) -> float:
        lasting = seeds.generator(seed, "speed", 0, client).uniform(1.0, SLOWEST)
        return lasting * seeds.generator(seed, "pace", round, client).uniform(
            1.0 - SWING, 1.0 + SWING
        )

    return seconds


def steps_by(
    algorithm: ClientAlgorithm, sgd: LocalSGD, shards: Sequence[np.ndarray]
) -> Callable[[Assignment], int]:
    """Return the number of local steps of an assignment: on the client's own data, or on all partitions that it trains on."""

    def steps(a: Assignment) -> int:
        if a.phase != algorithm.phases[0]:
            return 0
        told = sgd.for_round(1.0, a.steps, a.batch_size)
        parts = [
            sum(len(shards[client]) for client in part.clients) for part in algorithm.partitions(a)
        ]
        return sum(
            told.epochs * -(-examples // told.batch_size) or told.steps
            for examples in parts or [len(shards[a.client])]
        )

    return steps
