"""The events that a port (port.py) reports to its owner, which is the main thread of a server, or a relay."""

from typing import NamedTuple

from ...messages import Assignment, Presence, Report
from ...server.transport import Lost


class Joined(NamedTuple):
    """A client joined or reconnected."""

    client: int
    presence: Presence
    public_key: bytes  # a compressed P-384 point from the client's certificate, or b"" without TLS


class Left(NamedTuple):
    """The connection of a client ended."""

    client: int


class AnsweredLate(NamedTuple):
    """A client answered an assignment too late, after the server has stopped waiting for the answer."""

    client: int


class Warned(NamedTuple):
    """A warning for the operator of the server."""

    sentence: str


class Answered(NamedTuple):
    """A client answered its open assignment, or the assignment counts as lost."""

    sequence: int
    assignment: Assignment
    answer: Report | Lost
    arrived_s: float  # time.monotonic()

    @property
    def client(self) -> int:
        return self.assignment.client


class Summed(NamedTuple):
    """The reports of several clients, from a relay that adds their updates.

    One report may carry the sum of all updates. The server then accepts either all of the updates or none.
    """

    answers: list[Answered]
    # Clients without a report in `answers`, because their assignments are no longer open. Their updates may be in the sum.
    closed: list[int]


class Stopped(NamedTuple):
    """The port ended with an error."""

    error: BaseException


Event = Joined | Left | AnsweredLate | Warned | Answered | Summed | Stopped
