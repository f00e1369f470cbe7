"""The interface between the round loop and the code that carries messages to clients."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..messages import Assignment, Report

# If a client's connection ends before the client has answered, it has this many seconds to reconnect and get its assignment again.
GRACE_S = 5.0
NOT_RECONNECTED = "the client's connection ended, and the client did not reconnect in time"


@dataclass(frozen=True)
class Lost:
    """The result of an assignment that its client did not answer."""

    reason: str
    stage: str = "reply"  # "send" if the assignment could not be sent, "reply" if no report arrived


@dataclass(frozen=True)
class Delivery:
    """A client's answer to its newest assignment, and the time at which the answer arrived."""

    client: int
    answer: Report | Lost
    arrived_s: float  # by the transport's clock
    summed: tuple[int, ...] = ()  # clients whose updates a relay may have added to this answer


class Clock:
    """The clock of a run, which measures real time. A subclass measures virtual time, for simulations with a virtual network."""

    time_s: float = 0.0  # virtual seconds since the run began; stays 0 in real time
    started_s: float = 0.0  # start of the last exchange of messages, as returned by `now`
    limit_s: float | None = None  # time limit of the last exchange of messages

    def begin(self, limit_s: float | None) -> None:
        """Record the start of an exchange of messages. `limit_s`: its time limit, or None for no limit."""
        self.started_s, self.limit_s = self.now(), limit_s

    def expect(self, answers: int) -> None:
        """Set how many answers the transport may deliver before the server must check whether the exchange is complete.

        A clock that measures real time ignores the call.
        """

    def now(self) -> float:
        """Return the time in seconds since an arbitrary start. Compare only times of the same exchange of messages."""
        return time.monotonic()

    def move_to(self, time_s: float) -> None:
        """Set the virtual time of the run. A clock that measures real time ignores the call."""

    def take(self) -> float | None:
        """Return the virtual seconds since the last call, or None if the clock measures real time."""
        return None


class Transport(Protocol):
    """The interface of transports, which send assignments to clients and receive the clients' reports.

    A client has at most one open assignment. An assignment is open until a report or `Lost` is delivered for it, until a newer assignment
    replaces it, or until `cancel` withdraws it. Reports on assignments that are no longer open are not delivered.
    """

    clock: Clock

    def clients(self) -> Sequence[int]:
        """Return the clients that can be reached now, in ascending order."""

    def send(self, assignments: Sequence[Assignment]) -> None:
        """Send each assignment to its client, without waiting for the answers."""

    def receive(self, timeout_s: float) -> list[Delivery]:
        """Return the answers that have arrived. If there are none, wait up to `timeout_s` seconds for one."""

    def cancel(self, clients: Collection[int]) -> None:
        """Withdraw the open assignments of `clients`, if any."""

    def close(self) -> None:
        """Release connections and threads. May be called twice."""
