"""The I/O side of the server: one stream per client, served by gRPC in an event loop of its own.

All code here runs in that loop. It informs the main thread through a queue of events.
"""

import asyncio
import queue
import time
from collections import Counter, deque
from collections.abc import AsyncIterable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from ... import __version__
from ...errors import ConfigError, ProtocolError
from ...messages import Assignment, Farewell, Invitation, Presence, Report
from ...server.transport import CUT_OFF, GRACE_S, Lost
from . import wire
from .credentials import Credentials, PeerKey, peer_key
from .options import server_options
from .tcp_info import Peer, PortTraffic, Traffic, available, peer_of
from .wire import Kind, Reader, Refused

CLOSE_S = 5.0  # for the last message on a stream
FAREWELL_S = 10.0  # for clients to leave after the farewell
# Silence of a client that holds an assignment is counted in ticks, not in seconds: this process may have been stopped itself.
PING_TICKS = 8  # of silence, after which the client is pinged
SILENT_TICKS = 16  # of silence, after which the client counts as lost
JOINS, JOINS_PER_S = 10.0, 0.5  # of one key: burst, and sustained rate
SPARE_CONNECTIONS = 4096  # beyond one for each client: half-open ones must not keep clients out

EXPELLED = "its key is no longer accepted"


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
class Stopped:
    """The I/O thread has ended on an error."""

    error: BaseException


Event = Joined | Left | Heard | Warned | Answered | Stopped


@dataclass
class Settings:
    """Settings of a port. `id_of`, `reason_of` and `unsure` are called in the I/O thread."""

    address: str
    port: int
    invitation: Invitation
    clients: int
    largest_report: int  # bytes
    credentials: Credentials | None
    id_of: Callable[[bytes], int | None]
    reason_of: Callable[[bytes], str]
    unsure: Callable[[], bool]
    silence_s: float
    join_s: float


@dataclass
class Open:
    """An assignment that waits for its report."""

    sequence: int
    assignment: Assignment
    packed: wire.Packed
    sent: bool = False  # its last byte was handed to a stream
    timer: asyncio.TimerHandle | None = None  # runs while its client is disconnected


@dataclass
class TrafficReport:
    """Bytes of all connections of the port, and of each client that has joined."""

    total: Traffic
    by_client: dict[int, Traffic] = field(default_factory=dict)


class _End(Exception):
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
        self.client = -1  # logical id, -1 while it is not known
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


class Port:
    """Serves the clients of a run. Methods are called in the event loop of `serve`."""

    def __init__(self, settings: Settings, events: "queue.SimpleQueue[Event]"):
        self.settings, self.events = settings, events
        self.refused: Counter[str] = Counter()  # streams, by reason
        self.traffic: PortTraffic | None = None
        self._stop = asyncio.Event()
        self._streams: set[Stream] = set()
        self._joining: dict[object, Stream] = {}  # by key, or by the id that is claimed
        self._joined: dict[int, Stream] = {}
        self._keys: dict[int, PeerKey] = {}  # that clients joined with
        self._open: dict[int, Open] = {}
        self._rate = JoinRate()
        self._warned: set[int] = set()  # ids outside of the run
        self._farewell: Farewell | None = None
        self._ended: dict[int, Traffic] = {}  # by client, of streams that ended
        self._attributed: dict[Peer, Traffic] = {}  # of connections whose streams ended

    # The server.

    async def serve(self, started: Callable[[int], None], connections: int) -> None:
        """Listen until `stop`. Raises ConfigError if the port cannot be opened."""
        s = self.settings
        server = grpc.aio.server(options=server_options(connections))
        handler = grpc.stream_stream_rpc_method_handler(self._attend)
        name = wire.METHOD.rpartition("/")[2]
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.SERVICE, {name: handler}),)
        )
        where = f"[{s.address}]:{s.port}" if ":" in s.address else f"{s.address}:{s.port}"
        try:
            if s.credentials is None:
                port = server.add_insecure_port(where)
            else:
                c = s.credentials
                secure = grpc.ssl_server_credentials(
                    [(c.key, c.certificate)], c.ca, require_client_auth=True
                )
                port = server.add_secure_port(where, secure)
            if port == 0:
                raise RuntimeError("the certificate or its key cannot be used")
        except RuntimeError as error:
            raise ConfigError(
                f"port {s.port} of {s.address} cannot be opened ({error}); choose another with --port, or stop the "
                "program that listens there"
            ) from error
        await server.start()
        self.traffic = PortTraffic(port) if available() else None
        started(port)
        ticking = asyncio.create_task(self._tick())
        try:
            await self._stop.wait()
        finally:
            ticking.cancel()
            for stream in self._streams:
                stream.close()
            await server.stop(0.5)
            await asyncio.gather(ticking, return_exceptions=True)

    def stop(self) -> None:
        self._stop.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.settings.silence_s / SILENT_TICKS)
            if self.traffic is not None:
                self.traffic.find()
            for client in [*self._open]:
                if (stream := self._joined.get(client)) is None:
                    continue
                self._count(stream)
                stream.silent_ticks += 1
                if stream.silent_ticks >= SILENT_TICKS:
                    why = f"it gave no sign of life for {self.settings.silence_s:g} s"
                    self._answer(client, Lost(why, self._stage(client)))
                    self._drop(stream)
                elif stream.silent_ticks >= PING_TICKS and not stream.pinged:
                    stream.pinged = True
                    stream.put([wire.PING])

    # Streams.

    async def _attend(self, requests: AsyncIterable[bytes], context: Any) -> None:
        stream = Stream(context)
        self._streams.add(stream)
        stream.timer = asyncio.get_running_loop().call_later(
            self.settings.join_s,
            self._refuse,
            stream,
            "slow join",
            f"this client did not join within {self.settings.join_s:g} s",
        )
        try:
            if stream.peer is not None:
                stream.before = self._attributed.pop(stream.peer, Traffic())
                stream.counted = stream.before
            self._identify(stream)
            async for data in requests:
                stream.silent_ticks = 0
                self._take(stream, data)
                del data  # else it stays until the next message
        except _End as end:
            await self._finish(stream, end.refused)
        except ProtocolError as error:
            self.refused["malformed message"] += 1
            if stream.joined:
                self._warn(
                    f"client {stream.client} sent a malformed message, and its connection was closed: "
                    f"{error}"
                )
                if stream.client in self._open:  # sent again, it would get the same answer
                    self._answer(stream.client, Lost(str(error)))
            await self._finish(
                stream, Refused(f"the server received a malformed message: {error}", True)
            )
        except asyncio.CancelledError:
            if not stream.closing:
                raise
        finally:
            self._end(stream)

    async def _finish(self, stream: Stream, refused: Refused | None) -> None:
        """Send a last message from the stream's own task, which returns afterwards."""
        self._leave(stream)
        stream.close(refused)
        self._cut_later(stream)
        try:
            await asyncio.sleep(2 * CLOSE_S)
        except asyncio.CancelledError:
            pass

    def _refuse(self, stream: Stream, why: str, sentence: str, again: bool = True) -> None:
        """End a stream from outside of its task."""
        if stream.closing:
            return
        self.refused[why] += 1
        self._leave(stream)
        stream.close(Refused(sentence, again))
        self._cut_later(stream)

    def _cut_later(self, stream: Stream) -> None:
        """Cut a closing stream's connection unless its last message is sent within CLOSE_S."""
        if stream.timer is not None:
            stream.timer.cancel()
        stream.timer = asyncio.get_running_loop().call_later(CLOSE_S, self._drop, stream)

    def _drop(self, stream: Stream) -> None:
        """Cut a stream's connection at once. A client that does not read would otherwise keep its stream open for ever."""
        self._leave(stream)
        stream.closing = True
        if self.traffic is not None and stream.peer is not None:
            self.traffic.cut(stream.peer)
        if stream.task is not None:
            stream.task.cancel()

    def _leave(self, stream: Stream) -> None:
        """Remove a stream from the joined and the joining ones."""
        if self._joined.get(stream.client) is stream:
            del self._joined[stream.client]
            self.events.put(Left(stream.client))
            if (open := self._open.get(stream.client)) is not None:
                self._start_grace(stream.client, open)
        for who in [who for who in self._identities(stream) if self._joining.get(who) is stream]:
            del self._joining[who]

    def _end(self, stream: Stream) -> None:
        """Clean up after a stream that ended, and add its bytes to those of its client."""
        self._leave(stream)
        self._streams.discard(stream)
        if stream.timer is not None:
            stream.timer.cancel()
        self._count(stream)
        if stream.peer is not None:
            self._attributed[stream.peer] = stream.counted
        if stream.client >= 0:
            so_far = self._ended.get(stream.client, Traffic())
            self._ended[stream.client] = so_far.plus(stream.counted.minus(stream.before))

    def _count(self, stream: Stream) -> None:
        """Read the byte counters of a stream's connection. Bytes since the last reading are lost when the connection ends."""
        if self.traffic is None or stream.peer is None:
            return
        counted = self.traffic.of(stream.peer)
        if counted is None and not stream.searched:
            stream.searched = True
            self.traffic.find()
            counted = self.traffic.of(stream.peer) or self.traffic.search(stream.peer)
        stream.counted = counted or stream.counted

    # The join.

    def _identities(self, stream: Stream) -> list[object]:
        if stream.key is not None:
            return [stream.key.hash]
        return [stream.client] if stream.client >= 0 else []

    def _identify(self, stream: Stream) -> None:
        """Look up a TLS client by its key, and begin its join. Raises _End for a refused key."""
        if self.settings.credentials is None:
            return
        shown = stream.context.auth_context().get("x509_pem_cert")
        if not shown:
            raise self._refusal("no certificate", "this client shows no certificate")
        stream.key = peer_key(shown[0])
        client = self.settings.id_of(stream.key.hash)
        if client is None:
            reason, again = self.settings.reason_of(stream.key.hash), self.settings.unsure()
            # The registry may have been repaired between the two calls.
            client = None if again else self.settings.id_of(stream.key.hash)
            if client is None:
                raise self._refusal("key", reason, again)
        self._begin_join(stream, client)

    def _refusal(self, why: str, sentence: str, again: bool = True) -> _End:
        self.refused[why] += 1
        return _End(Refused(sentence, again))

    def _begin_join(self, stream: Stream, client: int) -> None:
        clients = self.settings.clients
        if not 0 <= client < clients:
            if client not in self._warned and len(self._warned) < SPARE_CONNECTIONS:
                self._warned.add(client)
                self._warn(
                    f"client {client} tried to join and is not part of this run of {clients} clients, 0 to {clients - 1}; "
                    f"start a new run with --clients {client + 1} to include it"
                )
            raise self._refusal(
                "no place",
                f"client {client} is not part of this run of {clients} clients, 0 to {clients - 1}",
                again=False,
            )
        stream.client = client
        for who in self._identities(stream):
            if not self._rate.take(who):
                raise self._refusal("too many joins", f"client {client} joins too often")
            if (older := self._joining.get(who)) is not None:
                self._refuse(older, "replaced", "this client has opened a newer connection", False)
            self._joining[who] = stream

    def _handle_hello(self, stream: Stream, reader: Reader) -> None:
        hello = wire.decode_hello(reader)
        if hello.protocol != wire.PROTOCOL:
            raise self._refusal(
                "protocol",
                f"this client speaks version {hello.protocol} of the protocol (fedcomp {hello.version[:40]}) and the "
                f"server version {wire.PROTOCOL} (fedcomp {__version__}); install the same version of fedcomp on both sides",
                again=False,
            )
        if stream.key is None and hello.client != -1:
            self._begin_join(stream, hello.client)
        stream.invitation = replace(self.settings.invitation, client=stream.client)
        stream.put(wire.split(wire.encode_invitation(stream.invitation)))

    def _handle_presence(self, stream: Stream, reader: Reader) -> None:
        presence = wire.decode_presence(reader, stream.invitation)
        who = stream.client if stream.client >= 0 else presence.client
        name = f"client {who}" if who >= 0 else "a client"
        if presence.run != stream.invitation.run:
            self._warn(f"{name} cannot take part: it answered for another run")
            raise self._refusal("other run", "the presence names another run")
        if presence.reason:
            self._warn(f"{name} cannot take part: {presence.reason}")
            self.refused["cannot take part"] += 1
            raise _End
        if stream.client < 0:
            self._begin_join(stream, presence.client)
        elif presence.client != stream.client:
            self._warn(f"{name} cannot take part as client {presence.client}")
            raise self._refusal(
                "other client",
                f"this client is client {stream.client} and cannot take part as client {presence.client}",
                again=False,
            )
        self._welcome(stream, presence)

    def _welcome(self, stream: Stream, presence: Presence) -> None:
        client = stream.client
        for who in self._identities(stream):
            self._joining.pop(who, None)
        if stream.timer is not None:
            stream.timer.cancel()
        if (older := self._joined.pop(client, None)) is not None:
            self._refuse(
                older,
                "replaced",
                f"a newer connection has joined as client {client}; only the newer one counts",
                again=False,
            )
        stream.joined, self._joined[client] = True, stream
        if stream.key is not None:
            self._keys[client] = stream.key
        self.events.put(Joined(client, presence, stream.key.pem if stream.key else None))
        if self._farewell is not None:
            self._dismiss(stream)
        elif (open := self._open.get(client)) is not None:
            self._assign(stream, open)

    # Messages.

    def _take(self, stream: Stream, data: bytes) -> None:
        """Handle one gRPC message of a client. Raises ProtocolError or _End."""
        if stream.closing:
            return
        if stream.joined:
            expected = stream.sent > stream.answered and stream.assembly.begun < stream.assignments
            stream.assembly.largest = self.settings.largest_report if expected else 0
        whole = stream.assembly.take(data)
        if whole is None:
            return
        kind, reader = whole
        if kind is Kind.HELLO and stream.invitation is None:
            self._handle_hello(stream, reader)
        elif kind is Kind.PRESENCE and stream.invitation is not None and not stream.joined:
            self._handle_presence(stream, reader)
        elif kind is Kind.REPORT and stream.joined:
            self._handle_report(stream, reader)
        elif kind is Kind.PONG and stream.pinged:
            stream.pinged = False
        else:
            raise ProtocolError(f"a {kind.name} is not expected now")

    def _handle_report(self, stream: Stream, reader: Reader) -> None:
        sequence = reader.varint()
        if not stream.answered < sequence <= stream.sent:
            raise ProtocolError(
                f"a report answers assignment {sequence}, which this client was not sent or has answered"
            )
        stream.answered = sequence
        open = self._open.get(stream.client)
        if open is None or open.sequence != sequence:
            self.events.put(Heard(stream.client))
            return
        report = wire.decode_report(reader, open.assignment)
        self._answer(stream.client, report)
        self._count(stream)

    def _answer(self, client: int, answer: Report | Lost) -> None:
        open = self._open.pop(client)
        if open.timer is not None:
            open.timer.cancel()
        self.events.put(Answered(client, open.sequence, answer, time.monotonic()))

    def _warn(self, sentence: str) -> None:
        self.events.put(Warned(sentence))

    # Assignments.

    def assign(self, opens: Iterable[tuple[int, Open]]) -> None:
        """Send assignments to their clients. A client that is disconnected receives its own if it joins within GRACE_S."""
        for client, open in opens:
            self._withdraw(client)
            self._open[client] = open
            if (stream := self._joined.get(client)) is not None:
                self._assign(stream, open)
            else:
                self._start_grace(client, open)

    def _assign(self, stream: Stream, open: Open) -> None:
        if open.timer is not None:
            open.timer.cancel()
            open.timer = None
        stream.sent = open.sequence
        stream.assignments += 1

        def sent() -> None:
            open.sent = True

        stream.assign(open.packed.messages, sent)

    def _start_grace(self, client: int, open: Open) -> None:
        if open.timer is None:
            open.timer = asyncio.get_running_loop().call_later(
                GRACE_S, lambda: self._answer(client, Lost(CUT_OFF, self._stage(client)))
            )

    def _stage(self, client: int) -> str:
        return "reply" if self._open[client].sent else "send"

    def _withdraw(self, client: int) -> None:
        open = self._open.pop(client, None)
        if open is not None and open.timer is not None:
            open.timer.cancel()

    def cancel(self, assignments: Iterable[tuple[int, int]]) -> None:
        """Withdraw assignments, given as client and sequence number."""
        for client, sequence in assignments:
            open = self._open.get(client)
            if open is not None and open.sequence == sequence:
                self._withdraw(client)
                if (stream := self._joined.get(client)) is not None:
                    stream.withdraw()

    # Other requests of the main thread.

    def recheck(self) -> None:
        """Close the streams of keys that are no longer accepted. Their assignments are lost at once."""
        if self.settings.credentials is None or self.settings.unsure():
            return
        for client in [*self._open]:
            key = self._keys.get(client)
            if key is not None and self.settings.id_of(key.hash) != client:
                self._answer(client, Lost(EXPELLED, self._stage(client)))
        for stream in [*self._streams]:
            if stream.key is None or stream.closing or stream.client < 0:
                continue
            if self.settings.id_of(stream.key.hash) != stream.client:
                reason = self.settings.reason_of(stream.key.hash) or EXPELLED
                self._refuse(stream, "key", reason, again=False)

    async def dismiss(self, farewell: Farewell) -> None:
        """Send a farewell to all clients, and wait up to FAREWELL_S until they have left."""
        self._farewell = farewell
        for stream in [*self._joined.values()]:
            self._dismiss(stream)
        deadline = time.monotonic() + FAREWELL_S
        while self._joined and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _dismiss(self, stream: Stream) -> None:
        stream.withdraw()
        stream.put(wire.split(wire.encode_farewell(self._farewell, self.settings.invitation)))

    async def read_traffic(self) -> TrafficReport | None:
        if self.traffic is None:
            return None
        total, by_client = self.traffic.total(), dict(self._ended)
        for stream in self._streams:
            if stream.peer is None or stream.client < 0:
                continue
            stream.counted = self.traffic.last(stream.peer) or stream.counted
            so_far = by_client.get(stream.client, Traffic())
            by_client[stream.client] = so_far.plus(stream.counted.minus(stream.before))
        live = self.traffic.peers()
        self._attributed = {peer: n for peer, n in self._attributed.items() if peer in live}
        return TrafficReport(total, by_client)

    async def counts(self) -> dict[str, int]:
        """Return the numbers of joined clients, streams and refusals, and of connections where the platform counts them."""
        counts = {"clients": len(self._joined), "streams": len(self._streams)}
        if self.traffic is not None:
            self.traffic.total()
            counts["connections"] = self.traffic.connections
        return counts | {f"refused: {why}": count for why, count in self.refused.items()}
