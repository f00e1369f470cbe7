"""The clients that a round waits for, and the clients from which the cohort of a round is drawn.

A client becomes *silent* when a deadline (--deadline seconds after the start of a phase) passes without its answer. It stays silent until
it joins again or an answer of it arrives, even a late one. Clients that are not silent are *responsive*. A round does not wait for silent
clients, and draws them only if too few responsive clients are connected. A client that crashes therefore delays a run by one deadline, not
by one deadline per round.

With --deadline, a round begins when as many responsive clients are connected as its cohort will have, or all that are known to be
responsive if they are fewer. After a wait of --deadline seconds, fewer suffice, and silent clients count, too: two clients, or the fraction
--quorum of the cohort if --quorum is below 1 and this is more. While fewer than that are connected, the round waits without a time limit.
Without --deadline, a round begins when the fraction --quorum of the cohort is connected.

A client that loses its connection during a round has GRACE_S seconds to reconnect, and is then rejected. If a run has no deadline and needs
all clients in every round, it waits for a disconnected client without a time limit.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..config import RunConfig
from ..strategies.base import cohort_size, quorum_size
from .transport import GRACE_S

# Seconds that clients have to reconnect to a restarted server; clients retry every 5 s.
RETURN_S = 15.0


@dataclass(frozen=True)
class Quota:
    """The number of clients that a round waits for.

    A round begins when `wanted` clients are connected. After it has waited for `patience_s` seconds, `min_clients` suffice. If `patience_s`
    is None, the wait has no time limit.
    """

    wanted: int
    min_clients: int
    patience_s: float | None = None

    @classmethod
    def first(cls, config: RunConfig, resumed: bool) -> "Quota":
        """Return the quota for the first round after a start: all clients. The wait is limited only in a resumed run with a deadline."""
        if resumed and config.deadline:
            return cls(
                config.clients,
                _min_after_deadline(config, cohort_size(config.participation, config.clients)),
                max(config.deadline, RETURN_S),
            )
        return cls(config.clients, config.clients)

    @classmethod
    def later(cls, config: RunConfig, cohort: int) -> "Quota":
        """Return the quota for later rounds. With a deadline, a round first waits for `cohort` clients; after the deadline, fewer suffice.
        Without a deadline, it waits for the quorum.
        """
        if config.deadline:
            return cls(cohort, _min_after_deadline(config, cohort), config.deadline)
        return cls(enough := quorum_size(config.quorum, cohort), enough)

    def at_least(self, clients: int) -> "Quota":
        """Return a copy in which `wanted` and `min_clients` are at least `clients`."""
        return Quota(max(self.wanted, clients), max(self.min_clients, clients), self.patience_s)

    def grace_s(self, clients: int) -> float:
        """Return for how many seconds (or inf) a round waits until a client reconnects. `clients`: number of clients of the run."""
        needs_all = self.patience_s is None and self.min_clients >= clients
        return math.inf if needs_all else GRACE_S


def _min_after_deadline(config: RunConfig, cohort: int) -> int:
    """Return how many clients a round needs after the deadline (see the module docstring)."""
    return min(cohort, max(2, quorum_size(config.quorum, cohort) if config.quorum < 1 else 0))


class Availability:
    """The record of silent clients.

    `responsive` is the number of responsive clients when the last round began, minus the number of clients that became silent since then.
    With a deadline, the next round does not wait for more clients than these, unless its minimum is higher.
    """

    def __init__(self) -> None:
        self.silent: set[int] = set()
        self.responsive = math.inf

    def mark_silent(self, clients: Iterable[int]) -> None:
        """Record clients that did not answer before the deadline."""
        new = set(clients) - self.silent
        self.silent |= new
        self.responsive -= len(new)

    def mark_responsive(self, client: int) -> None:
        """Record that a client is not silent: it has answered or joined again."""
        self.silent.discard(client)

    def wanted(self, quota: Quota) -> int:
        """Return how many clients must be connected for a round to begin immediately."""
        if quota.patience_s is None:
            return quota.wanted
        return max(quota.min_clients, int(min(quota.wanted, self.responsive)))

    def cohort_of(
        self, connected: Sequence[int], quota: Quota, waited_s: float
    ) -> Sequence[int] | None:
        """Return the clients from which a cohort may be drawn now, or None if the round must wait for more clients.

        `connected`: ids of the connected clients. `waited_s`: seconds for which the round has waited so far.
        """
        responsive = [client for client in connected if client not in self.silent]
        timed_out = quota.patience_s is None or waited_s >= quota.patience_s
        wanted = quota.min_clients if timed_out else self.wanted(quota)
        if len(responsive) < wanted and not (timed_out and len(connected) >= wanted):
            return None
        self.responsive = len(responsive)
        return responsive if len(responsive) >= wanted else connected
