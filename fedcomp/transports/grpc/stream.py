"""The stream of one client or relay with its state, the settings of a port, and the events that the port reports."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import grpc

from ...messages import Assignment, Invitation, Presence, Report
from ...server.transport import GRACE_S, Lost
from . import wire
from .credentials import Credentials, PeerKey
from .tcp_info import Peer, Traffic, peer_of
from .wire import Refused

if TYPE_CHECKING:
    from .relay_stream import ConnectedRelay

JOINS, JOINS_PER_S = 10.0, 0.5  # of one client or relay: burst, and sustained rate
MESSAGE_BYTES = 256  # at most, of the frames of TLS and HTTP/2 around a small message


# Events for the main thread.


@dataclass(frozen=True)
class Joined:
    """A client joined or reconnected."""

    client: int
    presence: Presence
    public_key: bytes | None  # PEM; None without TLS


@dataclass(frozen=True)
class Left:
    """The connection of a client ended."""

    client: int


@dataclass(frozen=True)
class AnsweredLate:
    """A client answered an assignment that is no longer open."""

    client: int


@dataclass(frozen=True)
class Warned:
    """A warning for the operator of the server."""

    sentence: str


@dataclass(frozen=True)
class Answered:
    """An open assignment was answered, or counts as lost."""

    sequence: int
    assignment: Assignment
    answer: Report | Lost
    arrived_s: float  # time.monotonic()

    @property
    def client(self) -> int:
        return self.assignment.client


@dataclass(frozen=True)
class Summed:
    """Reports of which one may carry the sum of all their frames: the server accepts all their updates or none."""

    answers: list[Answered]
    closed: list[int]  # further clients of the sum, whose assignments are no longer open


@dataclass(frozen=True)
class Stopped:
    """The port ended with an error."""

    error: BaseException


Event = Joined | Left | AnsweredLate | Warned | Answered | Summed | Stopped


class Keys(Protocol):
    """The keys that a port accepts, such as a `fedcomp.keys.registry.Registry`. The methods are called in the I/O thread."""

    @property
    def problem(self) -> str:
        """If not empty, no key is accepted now, and clients are told to try again."""

    def id_of_hash(self, key_hash: bytes) -> int | None: ...
    def relay_of_hash(self, key_hash: bytes) -> int | None: ...
    def reason_of_hash(self, key_hash: bytes) -> str: ...
    def ids_by_hash(self) -> dict[bytes, int]: ...


@dataclass
class PortSettings:
    """Settings of a port.

    Without `credentials` the port is HTTP/2 without TLS, and clients claim their ids. With them, `keys` has the logical id for the
    SHA-256 of a public key (DER SubjectPublicKeyInfo).

    The stream of a client with an assignment is closed after `silence_s` seconds without a message. If the client does not reconnect within
    `grace_s` seconds, the assignment counts as lost; inf: no limit. A stream that does not join within `join_s` seconds is closed.
    """

    address: str
    port: int  # 0: a free one
    invitation: Invitation
    clients: int
    largest_report: int  # bytes
    credentials: Credentials | None = None
    keys: Keys | None = None
    relay_terms: wire.Terms | None = None  # None: no relay is accepted
    silence_s: float = 16.0
    join_s: float = 20.0
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        if self.credentials is not None and self.keys is None:
            raise ValueError("a port with TLS needs the keys that it accepts")


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


@dataclass
class TrafficReport:
    """Bytes of all connections of the port, and of each client that has joined."""

    total: Traffic
    by_client: dict[int, Traffic] = field(default_factory=dict)


class EndStream(Exception):
    """Ends a stream. `refused` is sent as its last message if it is not None."""

    def __init__(self, refused: Refused | None = None):
        self.refused = refused


class Stream:
    """One stream of a client or a relay, from its HELLO to its end. It is the only one of its connection."""

    timer: asyncio.TimerHandle  # closes it unless it joins or ends in time

    def __init__(self, context: grpc.aio.ServicerContext):
        self.context = context
        self.task = asyncio.current_task()
        self.peer: Peer | None = peer_of(context.peer())
        self.key: PeerKey | None = None
        self.client = -1  # logical id; -1: not known yet, or a relay
        self.relay_id: int | None = None  # if its key is a relay's
        self.relay: ConnectedRelay | None = None  # once a relay has joined
        self.invitation: Invitation | None = None  # once it is sent
        self.joined = False
        self.assembly = wire.Assembly(0)
        self.sent = self.answered = 0  # newest sequence numbers of assignments and of reports
        self.assignments = 0  # number sent; each allows one report in parts
        self.silent_ticks = 0
        self.pinged = False
        self.closing = False
        self.searched = False  # whether `PortTraffic.search` has looked for its connection
        self.counted = Traffic()  # of its connection
        self.received = 0  # bytes of messages, with MESSAGE_BYTES for each
        self._urgent: deque[bytes] = deque()
        self._work: Iterator[bytes] = iter(())  # the rest of the newest assignment
        self._writer: asyncio.Task[None] | None = None

    @property
    def identity(self) -> object:
        """The hash of the client's key, without TLS the claimed id; None if it has claimed none."""
        return self.key.hash if self.key else self.client if self.client >= 0 else None

    @property
    def queued(self) -> int:
        """The number of messages that wait to be sent, besides those of an assignment to a client."""
        return len(self._urgent)

    def put(self, messages: Iterable[bytes]) -> None:
        """Send messages ahead of the queued assignment."""
        self._urgent += messages
        self._start()

    def assign(self, messages: Iterator[bytes]) -> None:
        """Send an assignment. The unsent rest of an older one is dropped."""
        self._work = messages
        self._start()

    def withdraw(self) -> None:
        """Drop the unsent rest of an assignment."""
        self._work = iter(())

    def close(self, refused: Refused | None = None) -> None:
        """End the stream after its last message, `refused` if it is not None."""
        if self.closing:
            return
        self.closing = True
        self.withdraw()
        if refused is not None:
            self._urgent.append(wire.encode_refused(refused))
        self._start()

    def _start(self) -> None:
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Send the queued messages one at a time, as gRPC requires."""
        try:
            while message := self._urgent.popleft() if self._urgent else next(self._work, None):
                await self.context.write(message)
                if len(message) >= wire.PART_BYTES:
                    self.silent_ticks = 0  # flow control: the client is reading
        except Exception:  # the stream has ended; its reader handles that
            self._urgent.clear()
            self.withdraw()
        self._writer = None
        if self.closing and self.task is not None:
            self.task.cancel()


class JoinRate:
    """A token bucket for each client or relay, which limits how often it may join."""

    def __init__(self) -> None:
        # identity → tokens, time.monotonic() when they were counted
        self._tokens: dict[object, tuple[float, float]] = {}

    def take(self, identity: object) -> bool:
        """Take a token. Return False if there is none."""
        now = time.monotonic()
        tokens, then = self._tokens.pop(identity, (JOINS, now))
        tokens = min(JOINS, tokens + (now - then) * JOINS_PER_S)
        self._tokens[identity] = (tokens - 1 if tokens >= 1 else tokens), now
        return tokens >= 1

    def pause(self, identity: object, pause_s: float) -> None:
        """Take all tokens, and those of the next `pause_s` seconds."""
        self._tokens[identity] = -pause_s * JOINS_PER_S, time.monotonic()
