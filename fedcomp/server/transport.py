"""The interface between the round loop and the code that carries its messages."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..messages import Assignment, Report

# Time for a client that disconnected without an answer to reconnect. Its assignment is then sent again.
GRACE_S = 5.0
NOT_RECONNECTED = "its connection ended, and it did not reconnect in time"


@dataclass(frozen=True)
class Lost:
    """The result of an assignment that its client did not answer."""

    reason: str
    stage: str = "reply"  # "send": the assignment could not be sent; "reply": no report arrived


@dataclass(frozen=True)
class Delivery:
    """The answer to the newest assignment of a client, and the time at which it arrived."""

    client: int
    answer: Report | Lost
    arrived_s: float  # by the transport's clock
    summed: tuple[int, ...] = ()  # clients whose updates a relay may have added to this answer


class Clock:
    """The clock of a run, which measures real time. A simulation with a virtual network has a clock with virtual time."""

    time_s: float = 0.0  # virtual seconds since the run began
    started_s: float = 0.0  # result of `now` at the start of the last exchange
    limit_s: float | None = None  # time limit of the last exchange, in seconds; None: no limit

    def begin(self, limit_s: float | None) -> None:
        """Start an exchange with a time limit in seconds, or None for no limit."""
        self.started_s, self.limit_s = self.now(), limit_s

    def expect(self, answers: int) -> None:
        """Set how many answers the transport may deliver before the exchange checks again whether it is complete."""

    def now(self) -> float:
        """Return the time in seconds. Only differences between times of the same exchange have a meaning."""
        return time.monotonic()

    def move_to(self, time_s: float) -> None:
        """Set the virtual time, in seconds since the run began, instead of adding up the durations of exchanges."""

    def take(self) -> float | None:
        """Return the virtual seconds that have passed since the last call; None if time is real."""
        return None


class Transport(Protocol):
    """The interface of transports, which send assignments to clients and receive their reports. Clients are named by their logical ids.

    A client has at most one open assignment. An assignment is closed by its report, by its loss, by a newer assignment, or by `cancel`.
    Reports on assignments that are no longer open are not delivered.
    """

    clock: Clock

    def clients(self) -> Sequence[int]:
        """Return the clients that can be reached now, in ascending order."""

    def send(self, assignments: Sequence[Assignment]) -> None:
        """Send each assignment to its client. Returns before the clients answer."""

    def receive(self, timeout_s: float) -> list[Delivery]:
        """Return the answers that have arrived. Wait up to `timeout_s` seconds for an answer; return an empty list if none arrives."""

    def cancel(self, clients: Collection[int]) -> None:
        """Withdraw the open assignments of these clients."""

    def close(self) -> None:
        """Release connections and threads. May be called twice."""
