"""One stream of a client, what its port knows of it, and the events that the port reports."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from ...messages import Assignment, Invitation, Presence, Report
from ...server.transport import Lost
from . import relay_wire, wire
from .credentials import Credentials, PeerKey
from .tcp_info import Peer, Traffic, peer_of
from .wire import Refused

if TYPE_CHECKING:
    from .relay_stream import Relay

JOINS, JOINS_PER_S = 10.0, 0.5  # of one key: burst, and sustained rate


# Events for the main thread.


@dataclass(frozen=True)
class Joined:
    client: int
    presence: Presence
    public_key: bytes | None


@dataclass(frozen=True)
class Left:
    client: int


@dataclass(frozen=True)
class Heard:
    """A client answered an assignment that is no longer open."""

    client: int


@dataclass(frozen=True)
class Warned:
    sentence: str


@dataclass(frozen=True)
class Answered:
    client: int
    sequence: int
    answer: Report | Lost
    arrived_s: float


@dataclass(frozen=True)
class Summed:
    """Reports of which one may carry the sum of all their frames: they count together, or not at all."""

    answers: list[Answered]
    gone: list[
        int
    ]  # clients whose assignments are no longer open, and whose frames may be in the sum


@dataclass(frozen=True)
class Stopped:
    """The I/O thread has ended on an error."""

    error: BaseException


Event = Joined | Left | Heard | Warned | Answered | Summed | Stopped


@dataclass
class Settings:
    """Settings of a port. The callbacks are called in the I/O thread."""

    address: str
    port: int
    invitation: Invitation
    clients: int
    largest_report: int  # bytes
    credentials: Credentials | None
    id_of: Callable[[bytes], int | None]
    reason_of: Callable[[bytes], str]
    unsure: Callable[[], bool]
    silence_s: float = 16.0
    join_s: float = 20.0
    # Relays: None = no relay is accepted.
    relay_terms: relay_wire.Terms | None = None
    relay_of: Callable[[bytes], int | None] = lambda key_hash: None
    ids_by_hash: Callable[[], dict[bytes, int]] = dict


@dataclass
class Open:
    """An assignment that waits for its report."""

    sequence: int
    assignment: Assignment
    due_s: float | None = None  # time at which a relay passes on a sum without this report
    packed: wire.Packed | None = None  # once it was encoded
    sent: bool = False  # its last byte was handed to a stream
    relay: "Relay | None" = None  # that has it: the relay answers it, or reports its loss
    timer: asyncio.TimerHandle | None = None  # runs while its client is disconnected


@dataclass
class TrafficReport:
    """Bytes of all connections of the port, and of each client that has joined."""

    total: Traffic
    by_client: dict[int, Traffic] = field(default_factory=dict)


class End(Exception):
    """Ends a stream, after the last message `refused` if there is one."""

    def __init__(self, refused: Refused | None = None):
        self.refused = refused


class Stream:
    """One stream of a client, from its HELLO to its end."""

    def __init__(self, context: grpc.aio.ServicerContext):
        self.context = context
        self.task = asyncio.current_task()
        self.peer: Peer | None = peer_of(context.peer())
        self.key: PeerKey | None = None
        self.client = -1  # logical id, -1 while it is not known and for a relay
        self.relay_id: int | None = None  # of the relay whose key it is
        self.relay: Relay | None = None  # once a relay has joined with this stream
        self.invitation: Invitation | None = None  # once it was sent
        self.joined = False
        self.assembly = wire.Assembly(0)
        self.sent = self.answered = 0  # newest sequence numbers
        self.assignments = 0  # sent; each allows one report in parts
        self.silent_ticks = 0
        self.pinged = False
        self.closing = False
        self.timer: asyncio.TimerHandle | None = None
        self.searched = False  # whether `PortTraffic.search` has looked for its connection
        self.before = self.counted = Traffic()  # of its connection: before this stream, last count
        self._urgent: deque[bytes] = deque()
        self._work: deque[bytes] = deque()  # of the newest assignment
        self._on_sent: Callable[[], None] | None = None
        self._writer: asyncio.Task[None] | None = None

    @property
    def carrier(self) -> "Stream":
        return self

    def replaces(self, older: object) -> bool:
        return False

    def put(self, messages: Iterable[bytes]) -> None:
        """Send messages ahead of the queued assignment."""
        self._urgent += messages
        self._start()

    def assign(self, messages: Iterable[bytes], on_sent: Callable[[], None]) -> None:
        """Send an assignment. The unsent rest of an older one is dropped."""
        self._work, self._on_sent = deque(messages), on_sent
        self._start()

    def withdraw(self) -> None:
        """Drop the unsent rest of an assignment."""
        self._work.clear()

    def close(self, refused: Refused | None = None) -> None:
        """End the stream once its last message was sent."""
        if self.closing:
            return
        self.closing = True
        self._work.clear()
        if refused is not None:
            self._urgent.append(wire.encode_refused(refused))
        self._start()

    def _start(self) -> None:
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Send the queued messages with one write at a time, as gRPC requires."""
        try:
            while self._urgent or self._work:
                urgent = bool(self._urgent)
                message = (self._urgent if urgent else self._work).popleft()
                if not urgent and not self._work and self._on_sent is not None:
                    self._on_sent()
                await self.context.write(message)
                if len(message) >= wire.PART:
                    self.silent_ticks = 0  # the client made room for it
                del message
        except Exception:  # the stream has ended, which its reader notices
            self._urgent.clear()
            self._work.clear()
        self._writer = None
        if self.closing and self.task is not None:
            self.task.cancel()


class JoinRate:
    """A token bucket per key."""

    def __init__(self) -> None:
        # key → tokens, and the time at which they were counted, in seconds
        self._tokens: dict[object, tuple[float, float]] = {}

    def take(self, who: object) -> bool:
        now = time.monotonic()
        tokens, then = self._tokens.pop(who, (JOINS, now))
        tokens = min(JOINS, tokens + (now - then) * JOINS_PER_S)
        self._tokens[who] = (tokens - 1 if tokens >= 1 else tokens), now
        return tokens >= 1
