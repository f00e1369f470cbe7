"""The open assignments of a port's clients, until each is answered, withdrawn, or counts as lost."""

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
    from .relay_stream import ConnectedRelay


@dataclass
class PendingAssignment:
    """An assignment that is not answered yet."""

    sequence: int
    assignment: Assignment
    due_s: float | None = None  # time.monotonic() at which a relay adds frames without this one
    sent: bool = False  # whether its last part was handed to gRPC
    relay: "ConnectedRelay | None" = None  # that it was sent to
    timer: asyncio.TimerHandle | None = None  # runs while its client is disconnected

    def messages(self, pieces: Sequence[bytes]) -> Iterator[bytes]:
        """Yield the gRPC messages for its client. `pieces`: the encoded assignment."""
        yield from wire.split(pieces)
        self.sent = True

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class PendingAssignments:
    """The open assignments by client, at most one for each. `emit` is called with the event of each answer or loss.

    All methods must be called in the event loop. Iteration yields the clients.
    """

    def __init__(self, emit: Callable[[Event], None]):
        self._emit = emit
        self._by_client: dict[int, PendingAssignment] = {}

    def __len__(self) -> int:
        return len(self._by_client)

    def __iter__(self) -> Iterator[int]:
        return iter([*self._by_client])  # the assignments may change meanwhile

    def __contains__(self, client: int) -> bool:
        return client in self._by_client

    def get(self, client: int) -> PendingAssignment | None:
        return self._by_client.get(client)

    def sent_through_relays(self) -> list[tuple[PendingAssignment, "ConnectedRelay"]]:
        """Return the assignments that were sent through relays, with their relays."""
        pending = self._by_client.values()
        return [(one, one.relay) for one in pending if one.relay is not None]

    def assignment(
        self, client: int, sequence: int, relay: "ConnectedRelay | None" = None
    ) -> Assignment | None:
        """Return the open assignment with this sequence number if it was sent directly, or to this relay, else None."""
        pending = self._by_client.get(client)
        if pending is None or (pending.sequence, pending.relay) != (sequence, relay):
            return None
        return pending.assignment

    def add(self, pending: PendingAssignment) -> None:
        """Add an assignment. An older one of its client is withdrawn."""
        client = pending.assignment.client
        self.withdraw(client)
        self._by_client[client] = pending

    def withdraw(self, client: int) -> None:
        """Close the assignment of a client without an event."""
        if (pending := self._by_client.pop(client, None)) is not None:
            pending.stop_timer()
            if pending.relay is not None:
                pending.relay.withdraw(pending)

    def close(self, client: int, answer: Report | Lost) -> Answered:
        """Close the assignment of a client, and return the event, which is not emitted."""
        pending = self._by_client.pop(client)
        pending.stop_timer()
        return Answered(pending.sequence, pending.assignment, answer, time.monotonic())

    def answer(self, client: int, answer: Report | Lost) -> None:
        """Close the assignment of a client with a report or a loss."""
        self._emit(self.close(client, answer))

    def lose(self, client: int, reason: str) -> None:
        """Count the assignment of a client as lost, in the stage "reply" if it was sent and "send" if it was not."""
        stage = "reply" if self._by_client[client].sent else "send"
        self.answer(client, Lost(reason, stage))

    def start_grace(self, client: int, grace_s: float) -> None:
        """Count the assignment of a disconnected client as lost after `grace_s` seconds; inf: do not."""
        pending = self._by_client[client]
        if pending.timer is None and math.isfinite(grace_s):
            loop = asyncio.get_running_loop()
            pending.timer = loop.call_later(grace_s, self.lose, client, NOT_RECONNECTED)
