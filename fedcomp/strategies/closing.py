"""When a phase of a round closes, and what becomes of those who have not answered."""

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Progress:
    """How far an exchange has come."""

    asked: int  # clients
    answered: int
    accepted: int
    elapsed_s: float


@dataclass(frozen=True)
class Closed:
    """A phase is over: at which stage, and why, those are rejected who have not answered."""

    stage: str = "reply"
    reason: str = "no reply before the round closed"


DEADLINE = "deadline"  # the stage of clients that had their time and did not answer
QUORUM = "quorum"  # the stage of those that the round did not wait for


class Closing(Protocol):
    """A policy: asked after every reply, and now and then while there is none. None: the phase goes on.

    One that has a time says so in an attribute `deadline_s`, seconds: at that moment it is asked for the last time. `room` says how many
    more answers may come, at once, before it has to be asked again.
    """

    def closed(self, progress: Progress) -> Closed | None: ...

    def room(self, progress: Progress) -> int: ...


class AllAnswered:
    """The phase closes when every client that was asked has answered, well or badly."""

    def closed(self, progress: Progress) -> Closed | None:
        return Closed() if progress.answered >= progress.asked else None

    def room(self, progress: Progress) -> int:
        return progress.asked - progress.answered


@dataclass(frozen=True)
class QuorumOrDeadline(AllAnswered):
    """The phase closes when all have answered, when a share of those asked was accepted, or when its time is over."""

    quorum: float = 1.0  # share of those asked, above 0
    deadline_s: float | None = None  # seconds; None = as long as it takes

    def closed(self, progress: Progress) -> Closed | None:
        if (done := super().closed(progress)) is not None:
            return done
        if progress.accepted >= (enough := least(self.quorum, progress.asked)):
            return Closed(
                QUORUM,
                f"no reply before {enough} of {progress.asked} were accepted (--quorum {self.quorum:g})",
            )
        if self.deadline_s is not None and progress.elapsed_s >= self.deadline_s:
            return Closed(DEADLINE, f"no reply within {self.deadline_s:g} s (--deadline)")
        return None

    def room(self, progress: Progress) -> int:
        return min(super().room(progress), least(self.quorum, progress.asked) - progress.accepted)


def least(quorum: float, clients: int) -> int:
    """The smallest number of clients that is a share `quorum` of them, at least one: 7 of 10 for 0.7, whatever rounding makes of it."""
    return max(1, math.ceil(quorum * clients - 1e-9))
