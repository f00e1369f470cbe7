"""The open assignments of a port's clients.

An assignment (a request to a client, for example to train) is open until it is answered, is withdrawn, or counts as lost.
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
    # `time.monotonic()` after which the relay no longer waits for this client's answer, and adds the other clients' updates.
    due_s: float | None = None
    sent: bool = False  # whether gRPC has accepted the last part of the assignment
    relay: "ConnectedRelay | None" = None  # the relay to which the assignment was sent
    timer: asyncio.TimerHandle | None = (
        None  # counts the assignment as lost if the client does not reconnect in time
    )

    def messages(self, pieces: Sequence[bytes]) -> Iterator[bytes]:
        """Yield the gRPC messages that carry the assignment to its client. `pieces` is the encoded assignment."""
        yield from wire.split(pieces)
        self.sent = True

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class PendingAssignments(dict[int, PendingAssignment]):
    """A dictionary of open assignments by client id.

    `emit` is called with an `Answered` event when an assignment is answered, and when it counts as lost. Use this class only in the gRPC
    event loop.
    """

    def __init__(self, emit: Callable[[Event], None]):
        super().__init__()
        self._emit = emit

    def assignment(
        self, client: int, sequence: int, relay: "ConnectedRelay | None" = None
    ) -> Assignment | None:
        """Return the client's open assignment with this sequence number if it was sent through `relay`, else None.

        If `relay` is None, the assignment must have been sent directly to the client.
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
        """Close the assignment of a client, and emit an `Answered` event with the client's report or with the loss."""
        self._emit(self.close(client, answer))

    def lose(self, client: int, reason: str) -> None:
        """Count a client's assignment as lost. The stage of the loss is "reply" if the assignment was sent, else "send"."""
        self.answer(client, Lost(reason, "reply" if self[client].sent else "send"))

    def start_grace(self, client: int, grace_s: float) -> None:
        """Count the assignment of a disconnected client as lost after `grace_s` seconds, or never if `grace_s` is inf."""
        if self[client].timer is None and math.isfinite(grace_s):
            loop = asyncio.get_running_loop()
            self[client].timer = loop.call_later(grace_s, self.lose, client, NOT_RECONNECTED)
