"""Virtual time of a run: the clients that a round can be drawn from, the duration of rounds, and the state in checkpoints.

As in a deployment, cohorts are drawn from the clients that are online. A client that missed a deadline is not drawn until its late answer
arrives, as long as enough others are online (server/availability.py). While too few clients are online, virtual time advances.
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
from ..strategies.base import DEADLINE, ClientAlgorithm, cohort_size
from ..training.local_sgd import LocalSGD
from .network import Network
from .timed_transport import TimedTransport, VirtualClock

STATE = "state"  # name in a checkpoint
MAX_SLOWDOWN = 4.0  # duration of the slowest clients as a multiple of the fastest clients' duration
MAX_SWING = 0.5  # maximum relative change of a client's duration from round to round


class Timing:
    """The clock and the transport of a run on a virtual network, and the choice of clients that cohorts are drawn from.

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
        return self.transport.answer_s[client]

    def gather(self) -> Sequence[int]:
        """Advance virtual time until enough clients are online. Return the clients that a cohort may be drawn from."""
        waited_s = 0.0
        while True:
            self._record_late_answers()
            absent = self.network.absences.absent_at(self.clock.time_s)
            online = [client for client in self.transport.clients() if not absent[client]]
            if (cohort := self._availability.cohort_of(online, self._quota, waited_s)) is not None:
                return cohort
            step_s = self._seconds_to_next_event(waited_s)
            if math.isinf(step_s):
                return online
            waited_s += step_s
            self.clock.wait(step_s)

    def on_round_end(self, outcome: RoundResult) -> None:
        """Update which clients are silent."""
        self._availability.mark_silent(r.client for r in outcome.rejections if r.stage == DEADLINE)
        for accepted in outcome.accepted:
            self._availability.mark_responsive(accepted.client)

    def _record_late_answers(self) -> None:
        """Mark the clients whose late answers have arrived as not silent."""
        now_s = self.clock.time_s
        for client in [client for client, due_s in self.transport.late.items() if due_s <= now_s]:
            del self.transport.late[client]
            self._availability.mark_responsive(client)

    def _seconds_to_next_event(self, waited_s: float) -> float:
        """Return the seconds until a client goes offline or returns, a late answer arrives, or the quota's patience ends."""
        event_times_s = [
            self.network.absences.next_change_s(self.clock.time_s),
            *self.transport.late.values(),
        ]
        patience_s = self._quota.patience_s
        return min(
            min(event_times_s) - self.clock.time_s,
            math.inf if patience_s is None or waited_s >= patience_s else patience_s - waited_s,
        )

    # Checkpoints.

    def take_changes(self) -> Changes:
        self.transport.drop_finished()
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
        state = json.loads(value(STATE) or b"")
        if state["network"] != self.network.profiles.fingerprint:
            raise RunFolderError(
                f"--network {self._source} has other values than at the start of the run; restore them, or give another --out"
            )
        self.clock.move_to(state["time_s"])
        self.clock.take()
        self.transport.busy = {client: (begins, ends) for client, begins, ends in state["busy"]}
        self.transport.late = dict(state["late"])
        self._availability.silent = set(state["silent"])
        self._availability.usual = math.inf if state["usual"] is None else state["usual"]


def random_work_s(seed: int) -> Callable[[int, int], float]:
    """Return a function of (round, client) that draws the virtual seconds of a client's round, for runs without a network."""

    def duration_s(round: int, client: int) -> float:
        mean_s = seeds.generator(seed, "speed", 0, client).uniform(1.0, MAX_SLOWDOWN)
        swing = seeds.generator(seed, "pace", round, client)
        return mean_s * swing.uniform(1.0 - MAX_SWING, 1.0 + MAX_SWING)

    return duration_s


def step_counter(
    algorithm: ClientAlgorithm, sgd: LocalSGD, shards: Sequence[np.ndarray]
) -> Callable[[Assignment], int]:
    """Return a function that counts the local steps of an assignment, on the client's own data or on its assigned partitions."""

    def steps(a: Assignment) -> int:
        if a.phase != algorithm.phases[0]:
            return 0
        round_sgd = sgd.for_round(1.0, a.steps, a.batch_size)
        sizes = [
            sum(len(shards[client]) for client in partition.clients)
            for partition in algorithm.partitions(a)
        ]
        return sum(
            round_sgd.epochs * -(-examples // round_sgd.batch_size) or round_sgd.steps
            for examples in sizes or [len(shards[a.client])]
        )

    return steps
