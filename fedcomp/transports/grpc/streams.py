"""The gRPC streams that a listening port serves: one for each directly connected client, and one for each relay (for all its clients)."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import grpc

from ...errors import ProtocolError
from ...messages import Assignment, Invitation, Presence, Report
from ...server.transport import Lost
from . import relay_wire, wire
from .events import AnsweredLate, Summed
from .relay_wire import FrameCache
from .settings import PeerKey, point_key
from .traffic import Peer, peer_of
from .values import Reader
from .wire import Kind, Refused

if TYPE_CHECKING:
    from .pending_assignments import PendingAssignment
    from .port import Port

# The server disconnects a relay that reads so slowly that more than MAX_QUEUED messages are queued for it.
MAX_QUEUED = 20_000


class EndStream(Exception):
    """An exception that ends a gRPC stream. If `refused` is given, it is the last message on the stream."""

    def __init__(self, refused: Refused | None = None):
        self.refused = refused


class Stream:
    """The gRPC stream of one client or relay, from its first message (HELLO) to its end. A TCP connection carries only one stream."""

    # Closes the stream if the client or relay does not join in time, and later cuts the connection if the stream does not end in time.
    timer: asyncio.TimerHandle

    def __init__(self, context: grpc.aio.ServicerContext):
        self.context = context
        self.task = asyncio.current_task()
        self.peer: Peer | None = peer_of(context.peer())
        self.key: PeerKey | None = None
        self.client = -1  # logical id of the client; stays -1 for a relay
        self.relay_id: int | None = None  # id of the relay that has the stream's key, or None
        self.relay: ConnectedRelay | None = None  # the relay, if a relay has joined on this stream
        self.invitation: Invitation | None = None  # the invitation sent on this stream
        self.joined = False
        self.assembly = wire.Assembly(0)
        # Sequence numbers of the last assignment sent and the last report received.
        self.last_sent = self.last_answered = 0
        # Number of assignments sent. The client or relay may send at most this number of multi-part messages.
        self.n_assignments = 0
        self.silent_ticks = 0  # number of checks since the client's or relay's last message
        self.pinged = False  # whether a PING is unanswered
        self.closing = False
        # Bytes of all received messages, plus MESSAGE_BYTES of TLS and HTTP/2 overhead for each message.
        self.received_bytes = 0
        self.queue: deque[bytes] = deque()  # messages to send before the messages of the assignment
        self._assignment: Iterator[bytes] = iter(())  # unsent messages of the newest assignment
        self._writer: asyncio.Task[None] | None = None

    @property
    def identity(self) -> object:
        """The SHA-256 of the client's public key. Without TLS: the id that the client claims, or None before it has claimed an id."""
        return self.key.hash if self.key else self.client if self.client >= 0 else None

    @property
    def relay_identity(self) -> object:
        """The tuple ("relay", id of the relay at the other end), or ("relay", address of the other end) if the stream has no TLS."""
        return "relay", self.peer if self.relay_id is None else self.relay_id

    def put(self, messages: Iterable[bytes]) -> None:
        """Queue messages. They are sent before the unsent messages of the current assignment."""
        self.queue += messages
        self._start()

    def assign(self, messages: Iterator[bytes]) -> None:
        """Send an assignment, of which `messages` are the parts. Drop the unsent parts of an older assignment."""
        self._assignment = messages
        self._start()

    def withdraw(self) -> None:
        """Drop the unsent messages of the current assignment."""
        self._assignment = iter(())

    def close(self, refused: Refused | None = None) -> None:
        """End the stream after the queued messages, and after `refused` if it is given, have been sent."""
        if self.closing:
            return
        self.closing = True
        self.withdraw()
        if refused is not None:
            self.queue.append(wire.encode_refused(refused))
        self._start()

    def _start(self) -> None:
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    def _next(self) -> bytes | None:
        if not self.queue and self.relay is not None and not self.closing:
            self.queue += self.relay.next_messages()
        return self.queue.popleft() if self.queue else next(self._assignment, None)

    async def _write(self) -> None:
        """Send the queued messages one at a time, as gRPC requires."""
        try:
            while message := self._next():
                await self.context.write(message)
                if len(message) >= wire.PART_BYTES:
                    # gRPC accepts a large message only if the client reads, so the client is not silent.
                    self.silent_ticks = 0
        except Exception:  # the stream has ended; the task that reads the stream handles the end
            self.queue.clear()
            self.withdraw()
        self._writer = None
        if self.closing and self.task is not None:
            self.task.cancel()


class ConnectedRelay:
    """A relay that is connected to the server: its stream, its clients by logical id, and the frames (encoded vectors) in its cache."""

    def __init__(self, port: "Port", stream: Stream):
        self.port, self.stream = port, stream
        self.clients: dict[int, RelayedClient] = {}
        self._cache = FrameCache()
        # Queued assignments by sequence number. They are encoded when gRPC can send them, so that a relay that reads nothing cannot fill
        # the server's memory with encoded assignments.
        self._queued: dict[int, PendingAssignment] = {}
        # By client: number of unanswered assignments. Late answers beyond this number cause no events, so that a malicious relay cannot
        # fill the server's memory with events.
        self._unanswered: Counter[int] = Counter()

    def assign(self, pending: "PendingAssignment") -> None:
        """Queue an assignment. Once gRPC has accepted the earlier messages, queued assignments share messages of about BUNDLE_BYTES."""
        self._queued[pending.sequence] = pending
        self.stream.put(())

    def next_messages(self) -> Iterator[bytes]:
        """Yield the gRPC messages that carry the next queued assignments, or nothing if no assignment is queued."""
        due_s = [pending.due_s for pending in self._queued.values() if pending.due_s is not None]
        wait_s = max(0.0, min(due_s) - time.monotonic()) if due_s else relay_wire.UNTIL_ALL
        pieces = relay_wire.encode_bundle(wait_s, self._take(), self._cache)
        return wire.split(pieces) if pieces else iter(())

    def _take(self) -> Iterator[tuple[int, Assignment]]:
        while self._queued:
            pending = self._queued.pop(next(iter(self._queued)))
            pending.sent = True
            self.stream.n_assignments += 1
            self._unanswered[pending.assignment.client] += 1
            yield pending.sequence, pending.assignment

    def send(self, pieces: Iterable[bytes]) -> None:
        """Send a message to the relay, unless its stream is closing."""
        if not self.stream.closing:
            self.stream.put(wire.split([*pieces]))

    def withdraw(self, pending: "PendingAssignment") -> None:
        """Withdraw an assignment, which may still be queued or was sent."""
        if self._queued.pop(pending.sequence, None) is None:
            entry = pending.assignment.client, pending.sequence
            self.send(relay_wire.encode_entries(Kind.WITHDRAW, [entry]))

    def handle(self, kind: Kind, reader: Reader) -> None:
        """Handle a message from the relay.

        Raises ProtocolError if the message is malformed or unexpected, and EndStream if the relay does not read the server's messages.
        """
        port = self.port
        if len(self.stream.queue) > MAX_QUEUED:
            reason = "this relay reads the server's messages too slowly and was disconnected"
            raise port.admission.refusal("messages not read", reason)
        if kind is Kind.JOINED:
            connection, presence = relay_wire.decode_entry(kind, reader)
            port.join_relayed(RelayedClient(self, connection, wire.limit_texts(presence)))
        elif kind is Kind.LEFT:
            (client_id,) = relay_wire.decode_entry(kind, reader)
            if (client := self.clients.pop(client_id, None)) is not None:
                port.leave(client)
        elif kind is Kind.ANSWERED_LATE:
            self._handle_late_answer(*relay_wire.decode_entry(kind, reader))
        elif kind is Kind.REPORTS:
            self._handle_reports(reader)
        elif kind is Kind.LOST:
            client_id, sequence, stage, reason = relay_wire.decode_entry(kind, reader)
            if self._sent_assignment(client_id, sequence) is not None:
                self._unanswered[client_id] -= 1
                port.pending.answer(client_id, Lost(reason, stage))
        else:
            raise ProtocolError(f"a relay must not send a {kind.name} message after it has joined")

    def _handle_reports(self, reader: Reader) -> None:
        """Handle a message with clients' reports.

        All reports are decoded before any report is delivered. The reason is that one report may carry the sum of all updates, so that a
        malformed report makes all reports of the message unusable.
        """
        reports: dict[int, Report] = {}
        closed: dict[int, None] = {}  # clients whose reports are too late, in order
        for client, _, report in relay_wire.decode_reports(reader, self._sent_assignment):
            if report is None:
                closed[client] = None
            elif client in reports:
                raise ProtocolError(f"a relay sent two reports of client {client} in one message")
            else:
                reports[client] = wire.limit_texts(report)
        self._unanswered.subtract(reports.keys())
        for client in closed:
            self._handle_late_answer(client)
        if not reports:
            return
        terms = self.port.settings.relay_terms
        if terms is not None and terms.codec:
            answers = [
                self.port.pending.close(client, report) for client, report in reports.items()
            ]
            self.port.emit(Summed(answers, [*closed]))
        else:
            for client, report in reports.items():
                self.port.pending.answer(client, report)

    def _sent_assignment(self, client: int, sequence: int) -> Assignment | None:
        """Return the open assignment with this sequence number if it was sent to this relay, else None."""
        if sequence in self._queued:
            return None
        return self.port.pending.assignment(client, sequence, self)

    def _handle_late_answer(self, client: int) -> None:
        if client in self.clients and self._unanswered[client] > 0:
            self._unanswered[client] -= 1
            self.port.emit(AnsweredLate(client))


class RelayedClient:
    """A client that has joined through a relay. The port uses it in place of the `Stream` of a directly connected client.

    `connection`: the number that the relay gave the client's connection. Raises ProtocolError for a malformed key or a negative id.
    """

    relay_id: int | None = None

    def __init__(self, relay: ConnectedRelay, connection: int, presence: Presence):
        if presence.client < 0:
            raise ProtocolError(
                f"a relay announced a client with the negative id {presence.client}"
            )
        self.relay, self.connection = relay, connection
        self.client, self.presence = presence.client, presence
        self.key: PeerKey | None = point_key(presence.key) if presence.key else None
        self.closing = False

    @property
    def identity(self) -> object:
        return self.key.hash if self.key else self.client

    def close(self, refused: Refused) -> None:
        """Make the relay send `refused` to the client and then disconnect the client."""
        if not self.closing:
            self.closing = True
            entry = self.client, self.connection, refused
            self.relay.send(relay_wire.encode_entries(Kind.DISCONNECT, [entry]))
