"""Who is waited for before a round, and who is drawn for it.

A client is *silent* from when its deadline passed without an answer until it is heard of again: it joins anew, or answers anything,
however late. The silent are not waited for, and not drawn as long as enough others are here: a client that is dead, frozen or cut off
costs a run one deadline, not one a round. A client that is only slower than the deadline is heard of when its late answer comes, and
drawn again. Fewer than the quorum's share of a whole cohort, or than two clients, are never a round: they wait for others, and after
another deadline the silent are asked again.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..config import RunConfig
from ..strategies.cohort import size
from ..strategies.round_completion import least

RETURN_S = (
    15.0  # that clients have to find a server that was started again, who try every five seconds
)


@dataclass(frozen=True)
class Quota:
    """How many clients a round waits for: `wanted`, and after `patience_s` no more than `least`; None = for as long as it takes."""

    wanted: int
    least: int
    patience_s: float | None = None

    @classmethod
    def first(cls, config: RunConfig, resumed: bool) -> "Quota":
        """All clients: for ever at the start of a run, and when it is resumed with a deadline for that time."""
        if resumed and config.deadline:
            return cls(
                config.clients,
                _fewest(config, size(config.participation, config.clients)),
                max(config.deadline, RETURN_S),
            )
        return cls(config.clients, config.clients)

    @classmethod
    def later(cls, config: RunConfig, cohort: int) -> "Quota":
        """A cohort: with a deadline for that time, else as many as may close a round."""
        if config.deadline:
            return cls(cohort, _fewest(config, cohort), config.deadline)
        return cls(enough := least(config.quorum, cohort), enough)

    def at_least(self, clients: int) -> "Quota":
        """The same for a strategy that has no use for fewer."""
        return replace(self, wanted=max(self.wanted, clients), least=max(self.least, clients))


def _fewest(config: RunConfig, cohort: int) -> int:
    """Without how many there is no round, though the deadline has passed: `quorum` says it where it is given."""
    return min(cohort, max(2, least(config.quorum, cohort) if config.quorum < 1 else 0))


class Attendance:
    """Who is silent, and with how many the last round began: those who were waited for in vain are not waited for again."""

    def __init__(self) -> None:
        self.silent: set[int] = set()
        self.usual = math.inf

    def miss(self, clients: Iterable[int]) -> None:
        """The time of these clients passed without an answer."""
        new = set(clients) - self.silent
        self.silent |= new
        self.usual -= len(new)

    def hear(self, client: int) -> None:
        self.silent.discard(client)

    def wanted(self, quota: Quota) -> int:
        """How many have to be here for a round to begin at once."""
        return (
            quota.wanted
            if quota.patience_s is None
            else max(quota.least, int(min(quota.wanted, self.usual)))
        )

    def cohort_of(self, here: Sequence[int], quota: Quota, waited_s: float) -> Sequence[int] | None:
        """Return the clients that a round may be drawn from now, or None while it has to wait.

        `here`: the clients that can be reached. `waited_s`: how long the round has waited for more, in seconds.
        """
        speaking = [client for client in here if client not in self.silent]
        over = quota.patience_s is None or waited_s >= quota.patience_s
        if len(speaking) >= self.wanted(quota) or (over and len(speaking) >= quota.least):
            chosen = speaking
        elif over and len(here) >= quota.least:
            chosen = here
        else:
            return None
        self.usual = len(speaking)
        return chosen
