"""The port of a server or a relay: the streams of all clients, served by gRPC in an asyncio event loop.

All code here runs in that loop. It reports events to the owner of the port, such as the main thread of a server.
"""

import asyncio
import math
import resource
import time
from collections import Counter
from collections.abc import AsyncIterable, Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc

from ... import __version__
from ...errors import ConfigError, ProtocolError
from ...keys.connection import join_address
from ...messages import MAX_METRICS_BYTES, Assignment, Farewell, Presence, Report
from ...server.transport import NOT_RECONNECTED, Lost
from . import relay_wire, wire
from .credentials import PeerKey, peer_key, point_key
from .options import server_options
from .relay_stream import ConnectedRelay, RelayedClient
from .stream import (
    MESSAGE_BYTES,
    Answered,
    AnsweredLate,
    EndStream,
    Event,
    Joined,
    JoinRate,
    Left,
    PendingAssignment,
    PortSettings,
    Stream,
    TrafficReport,
    Warned,
)
from .tcp_info import Peer, PortTraffic, Traffic, available
from .wire import Kind, Reader, Refused

CLOSE_S = 5.0  # for the last message on a stream
ENDED_S = 1.0  # for the end of a stream to be sent before its connection is cut
FAREWELL_S = 10.0  # for clients to leave after the farewell
# Silence is counted in ticks, not in seconds, so that clients are not lost while this process itself is suspended.
PING_TICKS = 8  # of silence, after which the client is pinged
SILENT_TICKS = 16  # of silence, after which the client counts as lost
SPARE_CONNECTIONS = 4096  # besides one for each client, for half-open connections
SPARE_FILES = 256  # descriptors that the process needs besides connections

EXPELLED = "its key is no longer accepted"
HEAD_BYTES = 4096 + MAX_METRICS_BYTES  # largest report without its frame
REPORT_BYTES = (
    1024 + MAX_METRICS_BYTES
)  # the same for each client of a relay in a message with several reports
RELAY_GRACE_S = (
    15.0  # at least, for the clients of a lost relay, which may have to be started again
)
# A connection is cut if it receives more bytes than FLOOD_BYTES, twice those of its messages, and an eighth of those that it sent.
FLOOD_BYTES = 4 << 20
FLOOD_PAUSE_S = 60.0  # in which a client that was cut for this may not join


class Port:
    """Serves the clients of a run. All methods must be called in the event loop of `serve`. `emit` is called with each event."""

    def __init__(self, settings: PortSettings, emit: Callable[[Event], None]):
        self.settings, self.emit = settings, emit
        self.refused: Counter[str] = Counter()  # streams, by reason
        self.traffic: PortTraffic | None = None
        self._stop = asyncio.Event()
        self._streams: set[Stream] = set()
        self._used: set[Peer] = set()  # connections whose stream has ended
        self._joined: dict[int, Stream | RelayedClient] = {}
        self._relays: dict[object, Stream] = {}  # by relay id, without TLS by address
        self._keys: dict[int, PeerKey] = {}  # with which clients joined
        self._pending: dict[int, PendingAssignment] = {}
        self._rate = JoinRate()
        self._warned: set[int] = set()  # ids outside of the run
        self._farewell: Farewell | None = None
        self._ended: dict[int, Traffic] = {}  # by client, of streams that ended

    @property
    def clients(self) -> int:
        """The number of joined clients."""
        return len(self._joined)

    @property
    def waiting(self) -> bool:
        """Whether an assignment is open."""
        return bool(self._pending)

    # The server.

    async def serve(self, started: Callable[[int], None]) -> None:
        """Listen until `stop`, and call `started` with the number of the port. Raises ConfigError if it cannot be opened."""
        s = self.settings
        connections = allow_connections(s.clients + SPARE_CONNECTIONS)
        server = grpc.aio.server(options=server_options(connections))
        handler = grpc.stream_stream_rpc_method_handler(self._attend)
        name = wire.METHOD.rpartition("/")[2]
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.SERVICE, {name: handler}),)
        )
        where = join_address(s.address, s.port)
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
                self._read_all(self.traffic)
                self._cut_floods(self.traffic)
            joined = [self._joined.get(client) for client in self._pending]
            waiting = {stream for stream in joined if isinstance(stream, Stream)}
            waiting |= {
                pending.relay.stream
                for pending in self._pending.values()
                if pending.relay is not None
            }
            for stream in waiting:
                stream.silent_ticks += 1
                if stream.silent_ticks >= SILENT_TICKS:
                    if stream.client in self._pending and math.isfinite(self.settings.grace_s):
                        why = f"it gave no sign of life for {self.settings.silence_s:g} s"
                        self.answer(stream.client, Lost(why, self._stage(stream.client)))
                    self._drop(stream)
                elif stream.silent_ticks >= PING_TICKS and not stream.pinged:
                    stream.pinged = True
                    stream.put([wire.PING])

    def _cut_floods(self, traffic: PortTraffic) -> None:
        """Cut connections that receive far more bytes than their messages have, such as HTTP/2 pings."""
        streams = {stream.peer: stream for stream in self._streams}
        for peer, (received, sent) in traffic.readings():
            stream = streams.get(peer)
            messages = 0 if stream is None else stream.received
            if received <= FLOOD_BYTES + 2 * messages + sent // 8:
                continue
            if stream is None:
                traffic.cut(peer)
            elif not stream.closing:
                self.refused["flood"] += 1
                name = f"relay {stream.relay_id}" if stream.relay else f"client {stream.client}"
                self._warn(f"{name} sent {received} bytes around its messages and was cut off")
                identity = self._relay_identity(stream) if stream.relay else stream.identity
                self._rate.pause(identity, FLOOD_PAUSE_S)
                self._drop(stream)

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
            if stream.peer in self._used:
                raise self.refusal("second stream", "open a new connection for each stream")
            self._identify(stream)
            async for data in requests:
                stream.silent_ticks = 0
                stream.received += len(data) + MESSAGE_BYTES
                self._handle_message(stream, data)
                del data  # else it would stay in memory until the next message
        except EndStream as end:
            await self._finish(stream, end.refused)
        except ProtocolError as error:
            self.refused["malformed message"] += 1
            if stream.joined:
                name = "a relay" if stream.relay else f"client {stream.client}"
                self._warn(
                    f"{name} sent a malformed message, and its connection was closed: {error}"
                )
                if stream.client in self._pending:  # a second attempt would get the same answer
                    self.answer(stream.client, Lost(str(error)))
            await self._finish(
                stream, Refused(f"the server received a malformed message: {error}", True)
            )
        except asyncio.CancelledError:
            if not stream.closing:
                raise
        finally:
            self._end(stream)

    async def _finish(self, stream: Stream, refused: Refused | None) -> None:
        """End a stream from its own task. Returns when its last message was sent."""
        self.leave(stream)
        stream.close(refused)
        self._cut_later(stream)
        try:
            await asyncio.sleep(2 * CLOSE_S)
        except asyncio.CancelledError:
            pass

    def _refuse(
        self, stream: Stream | RelayedClient, why: str, sentence: str, again: bool = True
    ) -> None:
        """End a stream from outside its task."""
        if stream.closing:
            return
        self.refused[why] += 1
        self.leave(stream)
        stream.close(Refused(sentence, again))
        if isinstance(stream, Stream):
            self._cut_later(stream)

    def _cut_later(self, stream: Stream) -> None:
        """Cut a closing stream's connection unless its last message is sent within CLOSE_S."""
        stream.timer.cancel()
        stream.timer = asyncio.get_running_loop().call_later(CLOSE_S, self._drop, stream)

    def _drop(self, stream: Stream) -> None:
        """Cut a stream's connection at once. Otherwise a client that does not read would keep its stream open."""
        self.leave(stream)
        stream.closing = True
        if self.traffic is not None and stream.peer is not None:
            self.traffic.cut(stream.peer)
        if stream.task is not None:
            stream.task.cancel()

    def leave(self, stream: Stream | RelayedClient) -> None:
        """Remove a stream from the joined ones, and with a relay's stream all its clients."""
        if isinstance(stream, Stream) and stream.relay is not None:
            self._leave_relay(stream.relay)
        if self._joined.get(stream.client) is stream:
            del self._joined[stream.client]
            self.emit(Left(stream.client))
            pending = self._pending.get(stream.client)
            if pending is not None and pending.relay is None:  # else the relay waits for its client
                self._start_grace(stream.client, pending, self.settings.grace_s)

    def _leave_relay(self, relay: ConnectedRelay) -> None:
        relay.lost = True
        for identity in [i for i, stream in self._relays.items() if stream is relay.stream]:
            del self._relays[identity]
        for client in [*relay.clients.values()]:
            self.leave(client)
        for client, pending in self._pending.items():
            if pending.relay is relay:
                pending.relay = None
                if client not in self._joined:
                    grace_s = max(RELAY_GRACE_S, self.settings.grace_s)
                    self._start_grace(client, pending, grace_s)

    def _end(self, stream: Stream) -> None:
        """Forget a stream that ended, add its bytes to its client's, and cut its connection."""
        self.leave(stream)
        self._streams.discard(stream)
        stream.timer.cancel()
        self._count(stream)
        if stream.client >= 0:
            so_far = self._ended.get(stream.client, Traffic())
            self._ended[stream.client] = so_far.plus(stream.counted)
        if stream.peer is not None:
            self._used.add(stream.peer)
            asyncio.get_running_loop().call_later(ENDED_S, self._cut_used, stream.peer)

    def _cut_used(self, peer: Peer) -> None:
        self._used.discard(peer)
        if self.traffic is not None:
            self.traffic.cut(peer)

    def _count(self, stream: Stream) -> None:
        """Read the byte counters of a stream's connection. Bytes since the last reading are lost when the connection ends."""
        if self.traffic is None or stream.peer is None:
            return
        counted = self.traffic.of(stream.peer)
        if counted is None and not stream.searched:
            stream.searched = True
            counted = self.traffic.search(stream.peer)
        stream.counted = counted or stream.counted

    # The join.

    def _identify(self, stream: Stream) -> None:
        """Identify a client or relay by its TLS key, and begin a client's join. Raises End for a refused key."""
        keys = self.settings.keys
        if self.settings.credentials is None or keys is None:
            return
        shown = stream.context.auth_context().get("x509_pem_cert")
        if not shown:
            raise self.refusal("no certificate", "this client shows no certificate")
        stream.key = peer_key(shown[0])
        stream.relay_id = keys.relay_of_hash(stream.key.hash)
        if stream.relay_id is not None:
            return
        client = keys.id_of_hash(stream.key.hash)
        if client is None:
            reason, again = keys.reason_of_hash(stream.key.hash), bool(keys.problem)
            # The registry may have been repaired between the two calls.
            client = None if again else keys.id_of_hash(stream.key.hash)
            if client is None:
                raise self.refusal("key", reason, again)
        self._begin_join(stream, client)

    def _relay_identity(self, stream: Stream) -> object:
        return "relay", stream.peer if stream.relay_id is None else stream.relay_id

    def _begin_relay(self, stream: Stream) -> None:
        """Send a relay the terms and keys of the run. Raises End if the relay is refused."""
        terms = self.settings.relay_terms
        if terms is None:
            raise self.refusal(
                "relay",
                "relays cannot connect to another relay; give --server the server's address",
                False,
            )
        if stream.key is not None and stream.relay_id is None:
            raise self.refusal(
                "relay",
                f"the key of this relay is that of client {stream.client}; make one for the relay with: fedcomp keys add --relay "
                "--host HOST",
                again=False,
            )
        identity = self._relay_identity(stream)
        if not self._rate.take(identity):
            raise self.refusal("too many joins", "this relay joins too often")
        if (older := self._relays.get(identity)) is not None:
            self._refuse(
                older,
                "replaced",
                "a newer connection has joined with the key of this relay; only the newer one counts: enrol each relay of its own "
                "with: fedcomp keys add --relay --host HOST",
                again=False,
            )
        stream.timer.cancel()
        stream.joined, self._relays[identity] = True, stream
        stream.relay = ConnectedRelay(self, stream)
        stream.relay.send(wire.encode(Kind.TERMS, terms))
        self._send_keys(stream.relay)
        if self._farewell is not None:
            self._dismiss(stream)

    def _send_keys(self, relay: ConnectedRelay) -> None:
        keys = self.settings.keys
        ids = keys.ids_by_hash().items() if keys is not None else ()
        relay.send(relay_wire.encode_rows(Kind.KEYS, ids))

    def refusal(self, why: str, sentence: str, again: bool = True) -> EndStream:
        self.refused[why] += 1
        return EndStream(Refused(sentence, again))

    def _begin_join(self, stream: Stream, client: int) -> None:
        clients = self.settings.clients
        if not 0 <= client < clients:
            if client not in self._warned and len(self._warned) < SPARE_CONNECTIONS:
                self._warned.add(client)
                self._warn(
                    f"client {client} tried to join and is not part of this run of {clients} clients, 0 to {clients - 1}; "
                    f"start a new run with --clients {client + 1} to include it"
                )
            raise self.refusal(
                "no place",
                f"client {client} is not part of this run of {clients} clients, 0 to {clients - 1}",
                again=False,
            )
        stream.client = client
        if not self._rate.take(stream.identity):
            raise self.refusal("too many joins", f"client {client} joins too often")

    def _handle_hello(self, stream: Stream, reader: Reader) -> None:
        hello = wire.decode_hello(reader)
        if hello.protocol != wire.PROTOCOL:
            raise self.refusal(
                "protocol",
                f"this client speaks version {hello.protocol} of the protocol (fedcomp {hello.version[:40]}) and the "
                f"server version {wire.PROTOCOL} (fedcomp {__version__}); install the same version of fedcomp on both sides",
                again=False,
            )
        if hello.client == wire.RELAY:
            self._begin_relay(stream)
            return
        if stream.relay_id is not None:
            raise self.refusal(
                "key",
                f"the key of this client is that of relay {stream.relay_id}; start the relay with fedcomp relay, and give each "
                "client its own enrolment",
                again=False,
            )
        if stream.key is None and hello.client != -1:
            self._begin_join(stream, hello.client)
        stream.invitation = replace(self.settings.invitation, client=stream.client)
        stream.put(wire.split(wire.encode(Kind.INVITATION, stream.invitation)))

    def _handle_presence(self, stream: Stream, reader: Reader) -> None:
        presence = wire.limit_texts(wire.decode(Kind.PRESENCE, reader, stream.invitation))
        if presence.key:
            point_key(presence.key)  # raises ProtocolError if it is malformed
        client = stream.client if stream.client >= 0 else presence.client
        name = f"client {client}" if client >= 0 else "a client"
        if presence.run != stream.invitation.run:
            self._warn(f"{name} cannot take part: it answered for another run")
            raise self.refusal("other run", "the presence names another run")
        if presence.reason:
            self._warn(f"{name} cannot take part: {presence.reason}")
            self.refused["cannot take part"] += 1
            raise EndStream
        if stream.client < 0:
            self._begin_join(stream, presence.client)
        elif presence.client != stream.client:
            self._warn(f"{name} cannot take part as client {presence.client}")
            raise self.refusal(
                "other client",
                f"this client is client {stream.client} and cannot take part as client {presence.client}",
                again=False,
            )
        stream.timer.cancel()
        stream.joined = True
        self._complete_join(stream, presence)

    def join_relayed(self, client: RelayedClient) -> None:
        """Let a client of a relay join, or tell the relay to disconnect it."""
        settings, presence, why = self.settings, client.presence, ""
        if presence.run != settings.invitation.run or not 0 <= client.client < settings.clients:
            why = f"client {client.client} is not part of this run"
        elif settings.keys is not None:
            key_hash = client.key.hash if client.key else b""
            if settings.keys.id_of_hash(key_hash) != client.client:
                why = settings.keys.reason_of_hash(key_hash)
                why = why or "this client showed the key of another one"
        if why:
            self.refused["key"] += 1
            client.close(Refused(why, bool(settings.keys and settings.keys.problem)))
        elif not self._rate.take(client.identity):
            self.refused["too many joins"] += 1
            client.close(Refused(f"client {client.client} joins too often", True))
        else:
            client.relay.clients[client.client] = client
            self._complete_join(client, presence)

    def _complete_join(self, stream: Stream | RelayedClient, presence: Presence) -> None:
        """Make this stream its client's, in place of an older one, and send the open assignment or the farewell."""
        client = stream.client
        older = self._joined.pop(client, None)
        # A relay itself has closed the older one of two connections to it.
        if older is not None and (older.relay is None or older.relay is not stream.relay):
            self._refuse(
                older,
                "replaced",
                f"a newer connection has joined as client {client}; only the newer one counts",
                again=False,
            )
        self._joined[client] = stream
        if stream.key is not None:
            self._keys[client] = stream.key
        self.emit(Joined(client, presence, stream.key.pem if stream.key else None))
        if self._farewell is not None and isinstance(stream, Stream):
            self._dismiss(stream)
        elif (pending := self._pending.get(client)) is not None:
            self._assign(stream, pending)

    # Messages.

    def _handle_message(self, stream: Stream, data: bytes) -> None:
        """Handle one gRPC message of a client or relay. Raises ProtocolError or EndStream."""
        if stream.closing:
            return
        if stream.joined:
            expected = stream.relay is not None or stream.sent > stream.answered
            expected = expected and stream.assembly.begun < stream.assignments
            largest = self.settings.largest_report + HEAD_BYTES
            stream.assembly.largest = largest if expected else 0
            if stream.relay is not None and expected:
                stream.assembly.largest += REPORT_BYTES * len(stream.relay.clients)
        whole = stream.assembly.take(data)
        if whole is None:
            return
        kind, reader = whole
        if kind is Kind.PONG and stream.pinged:
            stream.pinged = False
        elif stream.relay is not None:
            stream.relay.handle(kind, reader)
            self._count(stream)
        elif kind is Kind.HELLO and stream.invitation is None:
            self._handle_hello(stream, reader)
        elif kind is Kind.PRESENCE and stream.invitation is not None and not stream.joined:
            self._handle_presence(stream, reader)
        elif kind is Kind.REPORT and stream.joined:
            self._handle_report(stream, reader)
        else:
            raise ProtocolError(f"a {kind.name} is not expected now")

    def _handle_report(self, stream: Stream, reader: Reader) -> None:
        sequence = reader.varint()
        if not stream.answered < sequence <= stream.sent:
            raise ProtocolError(
                f"a report answers assignment {sequence}, which this client was not sent or has answered"
            )
        stream.answered = sequence
        assignment = self.pending_assignment(stream.client, sequence)
        if assignment is None:
            self.emit(AnsweredLate(stream.client))
        else:
            self.answer(stream.client, wire.limit_texts(wire.decode_report(reader, assignment)))
            self._count(stream)

    def pending_assignment(
        self, client: int, sequence: int, relay: ConnectedRelay | None = None
    ) -> Assignment | None:
        """Return the open assignment with this sequence number if it was sent directly, or to this relay, else None."""
        pending = self._pending.get(client)
        sent = pending is not None and (pending.sequence, pending.relay) == (sequence, relay)
        return pending.assignment if sent else None

    def answer(self, client: int, answer: Report | Lost) -> None:
        """Close the open assignment of a client with a report or a loss."""
        self.emit(self.answered(client, answer))

    def answered(self, client: int, answer: Report | Lost) -> Answered:
        """Close the open assignment of a client, and return the event."""
        pending = self._pending.pop(client)
        pending.stop_timer()
        return Answered(pending.sequence, pending.assignment, answer, time.monotonic())

    def _warn(self, sentence: str) -> None:
        self.emit(Warned(sentence))

    # Assignments.

    def assign(self, opens: Iterable[PendingAssignment]) -> None:
        """Send assignments. A disconnected client receives its assignment if it joins within the grace period."""
        for pending in opens:
            client = pending.assignment.client
            self._withdraw(client)
            self._pending[client] = pending
            if (stream := self._joined.get(client)) is not None:
                self._assign(stream, pending)
            else:
                self._start_grace(client, pending, self.settings.grace_s)

    def _assign(self, stream: Stream | RelayedClient, pending: PendingAssignment) -> None:
        pending.stop_timer()
        relay = stream.relay
        if pending.relay is not None and pending.relay is not relay:
            pending.relay.withdraw(stream.client, pending.sequence)
        if relay is not None:
            if pending.relay is not relay:
                pending.relay = relay
                relay.assign(pending)
            return
        pending.relay = None
        stream.sent = pending.sequence
        stream.assignments += 1
        pieces = wire.encode_assignment(pending.sequence, pending.assignment)
        stream.assign(pending.messages(pieces))

    def _start_grace(self, client: int, pending: PendingAssignment, grace_s: float) -> None:
        if pending.timer is None and math.isfinite(grace_s):
            pending.timer = asyncio.get_running_loop().call_later(
                grace_s, lambda: self.answer(client, Lost(NOT_RECONNECTED, self._stage(client)))
            )

    def _stage(self, client: int) -> str:
        """Return the stage of a loss: whether the open assignment was sent."""
        return "reply" if self._pending[client].sent else "send"

    def _withdraw(self, client: int) -> None:
        if (pending := self._pending.pop(client, None)) is not None:
            pending.stop_timer()
            if pending.relay is not None:
                pending.relay.withdraw(client, pending.sequence)

    def cancel(self, assignments: Iterable[tuple[int, int]]) -> None:
        """Withdraw assignments, given as (client, sequence number), if they are still open."""
        for client, sequence in assignments:
            pending = self._pending.get(client)
            if pending is not None and pending.sequence == sequence:
                self._withdraw(client)
                if isinstance(stream := self._joined.get(client), Stream):
                    stream.withdraw()

    # Other requests of the owner.

    def disconnect(self, client: int, refused: Refused) -> None:
        """End the connection of a client."""
        if (stream := self._joined.get(client)) is not None:
            self._refuse(stream, "server", refused.sentence, refused.again)

    def recheck_keys(self) -> None:
        """Close the streams whose keys are no longer accepted, count their assignments as lost, and send relays the new table of keys."""
        keys = self.settings.keys
        if keys is None or keys.problem:
            return
        for client in [*self._pending]:
            key = self._keys.get(client)
            if key is not None and keys.id_of_hash(key.hash) != client:
                self.answer(client, Lost(EXPELLED, self._stage(client)))
        relayed = [one for one in self._joined.values() if isinstance(one, RelayedClient)]
        for stream in [*self._streams, *relayed]:
            if stream.key is None or stream.closing:
                continue
            if stream.relay_id is not None:
                accepted = keys.relay_of_hash(stream.key.hash) == stream.relay_id
            else:
                accepted = stream.client < 0 or keys.id_of_hash(stream.key.hash) == stream.client
            if not accepted:
                reason = keys.reason_of_hash(stream.key.hash) or EXPELLED
                self._refuse(stream, "key", reason, again=False)
        for stream in self._relays.values():
            self._send_keys(stream.relay)

    async def send_farewell(self, farewell: Farewell, stay: bool = False) -> None:
        """Send a farewell to all clients, and wait up to FAREWELL_S until they have left. `stay`: wait for clients that come later, too."""
        self._farewell = farewell
        for stream in [*self._joined.values(), *self._relays.values()]:
            if isinstance(stream, Stream):
                self._dismiss(stream)
        deadline = time.monotonic() + FAREWELL_S
        while (self._joined or stay) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _dismiss(self, stream: Stream) -> None:
        stream.withdraw()
        farewell = wire.encode(Kind.FAREWELL, self._farewell, self.settings.invitation)
        stream.put(wire.split(farewell))

    def _read_all(self, traffic: PortTraffic) -> Traffic:
        """Read the byte counters of all connections, and return their sum with those that have ended."""
        total, readings = traffic.total(), dict(traffic.readings())
        for stream in self._streams:
            stream.counted = readings.get(stream.peer, stream.counted)
        return total

    async def read_traffic(self) -> TrafficReport | None:
        if self.traffic is None:
            return None
        total, by_client = self._read_all(self.traffic), dict(self._ended)
        for stream in self._streams:
            if stream.client >= 0:
                so_far = by_client.get(stream.client, Traffic())
                by_client[stream.client] = so_far.plus(stream.counted)
        return TrafficReport(total, by_client)

    async def counts(self) -> dict[str, int]:
        """Return the numbers of joined clients, streams, relays and refusals, and of connections if the platform counts them."""
        counts = {"clients": self.clients, "streams": len(self._streams)}
        counts["relays"] = len(self._relays)
        if self.traffic is not None:
            self.traffic.total()
            counts["connections"] = self.traffic.connections
        return counts | {f"refused: {why}": count for why, count in self.refused.items()}


def allow_connections(wanted: int) -> int:
    """Raise the limit of open files for `wanted` connections, as far as allowed. Return how many it permits, at most `wanted`.

    Raises ConfigError if the limit is too low for any clients.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = wanted + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= files:
        return wanted
    soft = files if hard == resource.RLIM_INFINITY else min(hard, files)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft <= 2 * SPARE_FILES:
        raise ConfigError(
            f"the limit of {soft} open files is too low for clients; raise it with ulimit -n"
        )
    return min(wanted, soft - SPARE_FILES)
