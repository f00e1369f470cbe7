"""The open assignments of a port's clients.

An assignment (a request to a client, for example to train) is open until it is answered, is withdrawn, or counts as lost. A lost assignment
is reported to the round loop, which then no longer waits for its answer.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...messages import Assignment, Report
from ...server.transport import NOT_RECONNECTED, Lost
from . import wire
from .events import Answered, Event

if TYPE_CHECKING:
    from .streams import ConnectedRelay


@dataclass
class PendingAssignment:
    """An assignment that is not answered yet."""

    sequence: int
    assignment: Assignment
    # `time.monotonic()` at which a relay adds the updates that it has received, without waiting for this client. None: no time limit.
    due_s: float | None = None
    sent: bool = False  # whether gRPC has accepted the last part of the assignment
    relay: "ConnectedRelay | None" = None  # None: the assignment was not sent through a relay
    # Runs while the client is disconnected. If the client does not reconnect in time, the assignment counts as lost.
    timer: asyncio.TimerHandle | None = None

    def messages(self, pieces: Sequence[bytes]) -> Iterator[bytes]:
        """Yield the gRPC messages that carry the encoded assignment `pieces` to its client."""
        yield from wire.split(pieces)
        self.sent = True

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class PendingAssignments(dict[int, PendingAssignment]):
    """The open assignments by client id.

    `emit` is called with an `Answered` event for each assignment that is answered or counts as lost. Use this class only in the gRPC event
    loop.
    """

    def __init__(self, emit: Callable[[Event], None]):
        super().__init__()
        self._emit = emit

    def assignment(
        self, client: int, sequence: int, relay: "ConnectedRelay | None" = None
    ) -> Assignment | None:
        """Return the client's open assignment if it has this sequence number and was sent through `relay`, else None.

        `relay` is None for an assignment that was sent directly to the client.
        """
        pending = self.get(client)
        if pending is None or (pending.sequence, pending.relay) != (sequence, relay):
            return None
        return pending.assignment

    def withdraw(self, client: int) -> None:
        """Close the assignment of a client, if there is one, without emitting an event."""
        if (pending := self.pop(client, None)) is not None:
            pending.stop_timer()
            if pending.relay is not None:
                pending.relay.withdraw(pending)

    def close(self, client: int, answer: Report | Lost) -> Answered:
        """Close the assignment of a client. Return the `Answered` event without emitting it."""
        pending = self.pop(client)
        pending.stop_timer()
        return Answered(pending.sequence, pending.assignment, answer, time.monotonic())

    def answer(self, client: int, answer: Report | Lost) -> None:
        """Close the assignment of a client and emit the `Answered` event."""
        self._emit(self.close(client, answer))

    def lose(self, client: int, reason: str) -> None:
        """Count a client's assignment as lost. The stage of the loss is "reply" if the assignment was sent, else "send"."""
        self.answer(client, Lost(reason, "reply" if self[client].sent else "send"))

    def start_grace(self, client: int, grace_s: float) -> None:
        """Start the time limit for a disconnected client to reconnect. If `grace_s` is inf, there is no limit."""
        if self[client].timer is None and math.isfinite(grace_s):
            loop = asyncio.get_running_loop()
            self[client].timer = loop.call_later(grace_s, self.lose, client, NOT_RECONNECTED)
