"""The clients that a round waits for, and the clients from which the cohort of a round is drawn.

A client becomes *silent* when a deadline passes without its answer. It stays silent until it joins again or one of its answers arrives,
however late. A round does not wait for silent clients, and no cohort is drawn from them while enough other clients are connected. A client
that has crashed or lost its network therefore costs a run one deadline, not one deadline per round. A client that is only slower than the
deadline is drawn again once its late answer has arrived.

In a run with a deadline, a round needs at least two clients. With --quorum below 1, the round also needs this fraction of a whole cohort.
If fewer clients are connected, the round waits; after another deadline, the cohort may be drawn from silent clients as well.

A client that loses its connection during a round has GRACE_S seconds to reconnect. A run that needs all clients in every round waits for
such a client without limit, during a round and between rounds.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..config import RunConfig
from ..strategies.base import cohort_size, quorum_size
from .transport import GRACE_S

RETURN_S = 15.0  # time in which clients reconnect to a restarted server; they retry every 5 s


@dataclass(frozen=True)
class Quota:
    """The number of clients that a round waits for. After `patience_s` seconds, `min_clients` clients are enough.

    If `patience_s` is None, the round waits for `wanted` clients without a time limit.
    """

    wanted: int
    min_clients: int
    patience_s: float | None = None

    @classmethod
    def first(cls, config: RunConfig, resumed: bool) -> "Quota":
        """Return the quota of a run's first round, which waits for all clients. Only a resumed run with a deadline has a time limit."""
        if resumed and config.deadline:
            return cls(
                config.clients,
                _min_after_deadline(config, cohort_size(config.participation, config.clients)),
                max(config.deadline, RETURN_S),
            )
        return cls(config.clients, config.clients)

    @classmethod
    def later(cls, config: RunConfig, cohort: int) -> "Quota":
        """Return the quota of later rounds. They wait for the quorum, or if there is a deadline, for a whole cohort until then."""
        if config.deadline:
            return cls(cohort, _min_after_deadline(config, cohort), config.deadline)
        return cls(enough := quorum_size(config.quorum, cohort), enough)

    def at_least(self, clients: int) -> "Quota":
        """Return this quota, raised for a strategy that needs at least `clients` clients."""
        return Quota(max(self.wanted, clients), max(self.min_clients, clients), self.patience_s)

    def grace_s(self, clients: int) -> float:
        """Return the seconds that a round waits for a client that lost its connection; inf: no limit. `clients`: clients of the run."""
        needs_all = self.patience_s is None and self.min_clients >= clients
        return math.inf if needs_all else GRACE_S


def _min_after_deadline(config: RunConfig, cohort: int) -> int:
    """Return how many clients a round needs after the deadline: two, or with `config.quorum` below 1, the quorum if it is larger."""
    return min(cohort, max(2, quorum_size(config.quorum, cohort) if config.quorum < 1 else 0))


class Availability:
    """The silent clients, and the number of clients that were not silent when the last round began (`usual`).

    A round waits for at most `usual` clients, so that it does not wait again for clients that were already missing.
    """

    def __init__(self) -> None:
        self.silent: set[int] = set()
        self.usual = math.inf

    def mark_silent(self, clients: Iterable[int]) -> None:
        """Record clients that did not answer before the deadline."""
        new = set(clients) - self.silent
        self.silent |= new
        self.usual -= len(new)

    def mark_responsive(self, client: int) -> None:
        """Record that a client joined or answered."""
        self.silent.discard(client)

    def wanted(self, quota: Quota) -> int:
        """Return how many clients must be connected for a round to begin at once."""
        if quota.patience_s is None:
            return quota.wanted
        return max(quota.min_clients, int(min(quota.wanted, self.usual)))

    def cohort_of(
        self, connected: Sequence[int], quota: Quota, waited_s: float
    ) -> Sequence[int] | None:
        """Return the clients from which a cohort may be drawn now, or None if the round has to wait.

        `connected`: the clients that can be reached now. `waited_s`: seconds that the round has waited so far.
        """
        responsive = [client for client in connected if client not in self.silent]
        timed_out = quota.patience_s is None or waited_s >= quota.patience_s
        wanted = quota.min_clients if timed_out else self.wanted(quota)
        if len(responsive) < wanted and not (timed_out and len(connected) >= wanted):
            return None
        self.usual = len(responsive)
        return responsive if len(responsive) >= wanted else connected
