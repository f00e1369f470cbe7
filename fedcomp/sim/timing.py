"""Virtual time of a run: who can be drawn for a round, what it took, and what of it stands in the checkpoint.

As in a deployment, rounds are drawn from the clients that are there, and who let a deadline pass is not drawn while enough others are,
until it is heard of again (server/availability.py). While too few are there, virtual time passes.
"""

import json
import math
from collections.abc import Callable, Sequence

from torch import Tensor

from ..config import RunConfig
from ..errors import RunFolderError
from ..memories.base import Changes
from ..messages import Assignment
from ..server.availability import Attendance, Quota
from ..server.round_loop import RoundResult
from ..server.transport import Transport
from ..strategies.cohort import size
from ..strategies.round_completion import DEADLINE
from .clock import VirtualClock
from .network import Network
from .timed_transport import TimedTransport

STATE = "state"  # in a checkpoint


class Timing:
    """The clock and the transport of a run on a virtual network, and the clients that its rounds may be drawn from.

    `fewest`: clients with whom a round can move the model.
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
        self._quota = Quota.later(config, size(config.participation, config.clients)).at_least(
            min(fewest, config.clients)
        )
        self._attendance, self._source = Attendance(), config.network

    def pace(self, round: int, client: int) -> float:
        """Return the seconds from question to answer of a client that was asked last in a round."""
        return self.transport.took[client]

    def gather(self) -> Sequence[int]:
        """Return the clients that a round may be drawn from, once they are enough."""
        everybody, absences, waited_s = self.transport.clients(), self.network.absences, 0.0
        while True:
            self._hear()
            if not absences.any and not self._attendance.silent:
                self._attendance.usual = len(everybody)
                return everybody
            away = absences.away(self.clock.time_s) if absences.any else None
            here = everybody if away is None else [c for c in everybody if not away[c]]
            if (cohort := self._attendance.cohort_of(here, self._quota, waited_s)) is not None:
                return cohort
            step_s = self._until_news(waited_s)
            if math.isinf(step_s):
                return here
            waited_s += step_s
            self.clock.wait(step_s)

    def on_round_end(self, outcome: RoundResult) -> None:
        """Update which clients are silent."""
        self._attendance.miss(r.client for r in outcome.rejections if r.stage == DEADLINE)
        for accepted in outcome.accepted:
            self._attendance.hear(accepted.client)

    def _hear(self) -> None:
        """Late answers that have come."""
        now_s = self.clock.time_s
        for client in [client for client, due_s in self.transport.late.items() if due_s <= now_s]:
            del self.transport.late[client]
            self._attendance.hear(client)

    def _until_news(self, waited_s: float) -> float:
        """Seconds until somebody leaves or returns, a late answer comes, or nobody else is waited for."""
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
            "silent": sorted(self._attendance.silent),
            "usual": self._attendance.usual if math.isfinite(self._attendance.usual) else None,
        }
        return {}, {STATE: json.dumps(state).encode()}

    def restore(
        self, vector: Callable[[str], Tensor | None], value: Callable[[str], bytes | None]
    ) -> None:
        """Raises RunFolderError for another network, ValueError, KeyError or TypeError for what `take_changes` did not make."""
        state = json.loads(value(STATE))
        if state["network"] != self.network.profiles.fingerprint:
            raise RunFolderError(
                f"the run had other figures in --network {self._source}; put them back, or give another --out"
            )
        self.clock.move_to(state["time_s"])
        self.clock.take()
        self.transport.busy = {client: (begins, ends) for client, begins, ends in state["busy"]}
        self.transport.late = dict(state["late"])
        self._attendance.silent = set(state["silent"])
        self._attendance.usual = math.inf if state["usual"] is None else state["usual"]
