"""A server's or relay's listening port, which serves the gRPC streams of all clients.

All code in this file runs in the asyncio event loop of gRPC. The port reports events (events.py) to its owner. `Port` uses `Admission` to
check joining clients and relays, `PendingAssignments` to track unanswered assignments, and `PortTraffic` to count bytes.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc

from ... import malloc
from ...callbacks import PortFigures
from ...errors import ConfigError, ProtocolError
from ...keys.connection import join_address
from ...messages import MAX_METRICS_BYTES, Farewell, Invitation, Presence
from ...server.transport import Lost
from . import relay_wire, wire
from .admission import EXPELLED, Admission
from .events import AnsweredLate, Event, Joined, Left, Warned
from .options import max_half_open, server_options
from .pending_assignments import PendingAssignment, PendingAssignments
from .settings import Credentials, PeerKey, PortSettings
from .streams import ConnectedRelay, EndStream, RelayedClient, Stream
from .traffic import Peer, PortTraffic, TrafficReport, counts_bytes
from .values import Reader
from .wire import Kind, Refused

CLOSE_S = 5.0  # time limit to send the last message on a stream
# The port looks for connections that flood it with bytes. The pause after each check is CHECK_S seconds or, if longer, CHECK_RATIO times
# the processor time of the check. While there are connections on which no client has joined, NEW_CHECK_RATIO replaces CHECK_RATIO.
CHECK_S, CHECK_RATIO, NEW_CHECK_RATIO = 0.005, 50, 5
# A frozen connection is open, but its data are discarded (`PortTraffic.freeze`). A connection that is cut is shut down at once.
CUT_S = 0.05  # time between cutting two frozen connections
ENDED_S = 1.0  # time after the end of a stream until its connection is cut
FAREWELL_S = 10.0  # time limit for clients to disconnect after the server's farewell
# A client's silence is counted in ticks of a timer, which has SILENT_TICKS ticks in `silence_s` seconds. While this process is suspended,
# no ticks are counted, so no client is disconnected for this reason.
PING_TICKS = 8  # ticks without a message after which a client is pinged
SILENT_TICKS = 16  # ticks without a message after which a client is disconnected
# Size limit of a report without its frame (encoded update). A relay sends several reports in one message, so its limit is higher by
# MAX_RELAYED_HEAD_BYTES for each of its clients.
MAX_REPORT_HEAD_BYTES = 4096 + MAX_METRICS_BYTES
MAX_RELAYED_HEAD_BYTES = 1024 + MAX_METRICS_BYTES
MESSAGE_BYTES = 256  # upper bound for the TLS and HTTP/2 overhead of a small message
# The clients of a lost relay get at least this time to reconnect, because the relay may have to be started again.
RELAY_GRACE_S = 15.0

Connection = Stream | RelayedClient


class Port:
    """A listening port that serves the clients of a run. `emit` is called with each event (events.py).

    Call the methods only in the event loop that runs `serve`.
    """

    def __init__(self, settings: PortSettings, emit: Callable[[Event], None]):
        self.settings, self.emit = settings, emit
        self.admission = Admission(settings, self._warn)
        self.pending = PendingAssignments(emit)
        self.traffic = PortTraffic()
        self._stop = asyncio.Event()
        self._streams: set[Stream] = set()
        self._flooded = False  # whether a flooding connection was cut since the last `_tick`
        # By peer of a connection whose stream has ended: the number of bytes received before the stream ended.
        self._used: dict[Peer, int] = {}
        self._joined: dict[int, Connection] = {}
        self._relays: dict[object, ConnectedRelay] = {}  # by `relay_identity`
        self._keys: dict[int, PeerKey] = {}  # by client: key with which the client joined
        self._farewell: Farewell | None = None

    @property
    def clients(self) -> int:
        """The number of joined clients."""
        return len(self._joined)

    # The gRPC server.

    async def serve(self, started: Callable[[int], None]) -> None:
        """Listen until `stop` is called. `started` is called with the port's number. Raises ConfigError if the port cannot be opened."""
        s = self.settings
        server = grpc.aio.server(options=server_options(s.clients))
        handler = grpc.stream_stream_rpc_method_handler(self._attend)
        name = wire.METHOD.rpartition("/")[2]
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.SERVICE, {name: handler}),)
        )
        where = join_address(s.address, s.port)
        try:
            port = _add_port(server, where, s.credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"port {s.port} of {s.address} cannot be opened ({error}); choose another port with --port, or stop the "
                "program that listens there"
            ) from error
        await server.start()
        self.traffic.port = port if counts_bytes() else None
        started(port)
        tasks = [
            asyncio.create_task(work)
            for work in (self._tick(), self._stop_floods(), self._cut_frozen())
        ]
        try:
            await self._stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            for stream in self._streams:
                stream.close()
            await server.stop(0.5)
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        self._stop.set()

    async def _tick(self) -> None:
        """Check for silent clients and relays that have an assignment. Ping them, and disconnect them if they stay silent."""
        while True:
            await asyncio.sleep(self.settings.silence_s / SILENT_TICKS)
            self.traffic.read_all()
            if self._flooded:
                self._flooded = False
                malloc.return_freed_memory()
            joined = [self._joined.get(client) for client in self.pending]
            waiting = {stream for stream in joined if isinstance(stream, Stream)}
            relays = [pending.relay for pending in self.pending.values()]
            waiting |= {relay.stream for relay in relays if relay is not None}
            for stream in waiting:
                stream.silent_ticks += 1
                if stream.silent_ticks >= SILENT_TICKS:
                    if stream.client in self.pending and math.isfinite(self.settings.grace_s):
                        reason = f"the client sent nothing for {self.settings.silence_s:g} s"
                        self.pending.lose(stream.client, reason)
                    self._drop(stream)
                elif stream.silent_ticks >= PING_TICKS and not stream.pinged:
                    stream.pinged = True
                    stream.put([wire.PING])

    async def _stop_floods(self) -> None:
        """Freeze or cut connections that flood the port with bytes.

        The checks are frequent, because gRPC keeps all request headers that a client sends in memory until the client's stream starts.
        """
        while True:
            began = time.thread_time()
            floods = self.traffic.floods(self._streams, self._used)
            check_s = time.thread_time() - began
            for peer, stream, received_bytes in floods:
                if stream is None or not stream.closing:
                    self.admission.refuse_flood(peer[0], stream, received_bytes)
                if stream is None:
                    self.traffic.freeze(peer, received_bytes - self._used.get(peer, 0))
                else:
                    self._flooded = True
                    self._drop(stream)
            if n_cut := self.traffic.cut_half_open(max_half_open(self.settings.clients)):
                self.admission.refused["half open"] += n_cut
            ratio = NEW_CHECK_RATIO if floods or self.traffic.new_connections else CHECK_RATIO
            await asyncio.sleep(max(CHECK_S, ratio * check_s))

    async def _cut_frozen(self) -> None:
        """Cut frozen connections one by one, because the end of each connection blocks the event loop for some milliseconds."""
        while True:
            await asyncio.sleep(CUT_S)
            self._flooded |= self.traffic.cut_frozen()

    def _warn(self, sentence: str) -> None:
        self.emit(Warned(sentence))

    # Streams.

    async def _attend(self, requests: AsyncIterable[bytes], context: Any) -> None:
        stream = Stream(context)
        self._streams.add(stream)
        join_s, loop = self.settings.join_s, asyncio.get_running_loop()
        late = "slow join", f"this client did not join within {join_s:g} s"
        stream.timer = loop.call_later(join_s, self._refuse, stream, *late)
        try:
            if stream.peer in self._used:
                reason = "this connection was already used to join; open a new connection for each attempt"
                raise self.admission.refusal("second stream", reason)
            self.admission.check_key(stream)
            async for data in requests:
                stream.silent_ticks = 0
                stream.received_bytes += len(data) + MESSAGE_BYTES
                self._handle_message(stream, data)
                del data  # free the memory now, not when the next message arrives
        except EndStream as end:
            await self._finish(stream, end.refused)
        except ProtocolError as error:
            self.traffic.freeze(stream.peer)
            self.admission.refused["malformed message"] += 1
            if stream.joined:
                name = "a relay" if stream.relay else f"client {stream.client}"
                self._warn(
                    f"{name} sent a malformed message, and its connection was closed: {error}"
                )
                # Do not send the assignment again, because the answer would be malformed again.
                if stream.client in self.pending:
                    self.pending.answer(stream.client, Lost(str(error)))
            reason = f"the server received a malformed message: {error}"
            await self._finish(stream, Refused(reason, True))
        except asyncio.CancelledError:
            if not stream.closing:
                raise
        finally:
            self.leave(stream)
            self._streams.discard(stream)
            stream.timer.cancel()
            reading = self.traffic.read(stream.peer)
            if stream.peer is not None:
                self._used[stream.peer] = 0 if reading is None else reading.bytes_in
                loop.call_later(ENDED_S, self._cut_used, stream.peer)

    async def _finish(self, stream: Stream, refused: Refused | None) -> None:
        """End a stream from its own asyncio task. Return when the stream's last message has been sent."""
        self.leave(stream)
        stream.close(refused)
        self._cut_later(stream)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(2 * CLOSE_S)

    def _refuse(self, connection: Connection, cause: str, reason: str, retry: bool = True) -> None:
        """End a stream from outside the stream's own asyncio task."""
        if connection.closing:
            return
        self.admission.refused[cause] += 1
        self.leave(connection)
        connection.close(Refused(reason, retry))
        if isinstance(connection, Stream):
            self._cut_later(connection)

    def _cut_later(self, stream: Stream) -> None:
        """Cut a closing stream's connection unless the stream's last message is sent within CLOSE_S seconds."""
        stream.timer.cancel()
        stream.timer = asyncio.get_running_loop().call_later(CLOSE_S, self._drop, stream)

    def _drop(self, stream: Stream) -> None:
        """End a stream by cutting its connection. Without this, a client that reads nothing could keep its stream open."""
        self.leave(stream)
        stream.closing = True
        self.traffic.cut(stream.peer)
        if stream.task is not None:
            stream.task.cancel()

    def leave(self, connection: Connection) -> None:
        """Remove a client's connection from the joined connections. For the stream of a relay, do this for all clients of the relay.

        If a removed client has an open assignment, start the time limit for its reconnection.
        """
        if isinstance(connection, Stream) and connection.relay is not None:
            self._leave_relay(connection.relay)
        client = connection.client
        if self._joined.get(client) is connection:
            del self._joined[client]
            self.emit(Left(client))
            pending = self.pending.get(client)
            # If the assignment was sent through a relay, the relay itself limits the time for a reconnection.
            if pending is not None and pending.relay is None:
                self.pending.start_grace(client, self.settings.grace_s)

    def _leave_relay(self, relay: ConnectedRelay) -> None:
        if self._relays.get(relay.stream.relay_identity) is relay:
            del self._relays[relay.stream.relay_identity]
        for relayed in [*relay.clients.values()]:
            self.leave(relayed)
        for client, pending in self.pending.items():
            if pending.relay is relay:
                pending.relay = None
                if client not in self._joined:
                    self.pending.start_grace(client, max(RELAY_GRACE_S, self.settings.grace_s))

    def _cut_used(self, peer: Peer) -> None:
        self._used.pop(peer, None)
        self.traffic.cut(peer)

    # Messages from clients and relays.

    def _handle_message(self, stream: Stream, data: bytes) -> None:
        """Handle one gRPC message from a client or relay.

        Raises ProtocolError for a malformed or unexpected message, and EndStream if the client or relay is refused.
        """
        if stream.closing:
            return
        if stream.joined:
            stream.assembly.largest = self._largest_message(stream)
        if (message := stream.assembly.take(data)) is None:
            return
        kind, reader = message
        if kind is Kind.PONG and stream.pinged:
            stream.pinged = False
        elif stream.relay is not None:
            stream.relay.handle(kind, reader)
            self.traffic.find(stream.peer)
        elif kind is Kind.HELLO and stream.invitation is None:
            self._handle_hello(stream, reader)
        elif kind is Kind.PRESENCE and stream.invitation is not None and not stream.joined:
            self._handle_presence(stream, reader, stream.invitation)
        elif kind is Kind.REPORT and stream.joined:
            self._handle_report(stream, reader)
        else:
            raise ProtocolError(f"a {kind.name} message is not allowed at this point")

    def _largest_message(self, stream: Stream) -> int:
        """Return the size in bytes of the largest multi-part message that a client or relay may send now, or 0 if it may send none."""
        answers = stream.relay is not None or stream.last_sent > stream.last_answered
        if not answers or stream.assembly.n_announced >= stream.n_assignments:
            return 0
        relayed = len(stream.relay.clients) if stream.relay is not None else 0
        heads = MAX_REPORT_HEAD_BYTES + MAX_RELAYED_HEAD_BYTES * relayed
        return self.settings.largest_report + heads

    def _handle_hello(self, stream: Stream, reader: Reader) -> None:
        hello = wire.decode_hello(reader)
        self.admission.check_hello(stream, hello)
        if hello.client == wire.RELAY:
            self._join_relay(stream)
            return
        stream.invitation = replace(self.settings.invitation, client=stream.client)
        stream.put(wire.split(wire.encode(Kind.INVITATION, stream.invitation)))

    def _handle_presence(self, stream: Stream, reader: Reader, invitation: Invitation) -> None:
        presence = wire.limit_texts(wire.decode(Kind.PRESENCE, reader, invitation))
        self.admission.check_presence(stream, presence)
        stream.timer.cancel()
        stream.joined = True
        self.traffic.assign(stream.peer, stream.client)
        self._join(stream, presence)

    def _handle_report(self, stream: Stream, reader: Reader) -> None:
        sequence = reader.varint()
        if not stream.last_answered < sequence <= stream.last_sent:
            raise ProtocolError(
                f"a report answers assignment {sequence}, which was not sent to this client or was already answered"
            )
        stream.last_answered = sequence
        assignment = self.pending.assignment(stream.client, sequence)
        if assignment is None:
            self.emit(AnsweredLate(stream.client))
        else:
            report = wire.limit_texts(wire.decode_report(reader, assignment))
            self.pending.answer(stream.client, report)
            self.traffic.find(stream.peer)

    # Joins.

    def _join(self, connection: Connection, presence: Presence) -> None:
        """Register the connection of a client. Send the client its open assignment, or a farewell if the run is over."""
        client = connection.client
        older = self._joined.pop(client, None)
        # If both connections of the client go through the same relay, the relay itself has closed the older connection.
        if older is not None and (older.relay is None or older.relay is not connection.relay):
            reason = (
                f"a newer connection has joined as client {client}, and the server keeps only the newest; give each client its own "
                "enrolment file or, with --insecure, its own --client-id"
            )
            self._refuse(older, "replaced", reason, retry=False)
        self._joined[client] = connection
        if connection.key is not None:
            self._keys[client] = connection.key
        self.emit(Joined(client, presence, connection.key.point if connection.key else b""))
        if self._farewell is not None and isinstance(connection, Stream):
            self._dismiss(connection, self._farewell)
        elif (pending := self.pending.get(client)) is not None:
            self._send_assignment(connection, pending)

    def join_relayed(self, client: RelayedClient) -> None:
        """Let a client of a relay join the run. If the client is refused, tell the relay to disconnect it."""
        try:
            self.admission.check_relayed(client)
        except EndStream as end:
            assert end.refused is not None
            client.close(end.refused)
            return
        client.relay.clients[client.client] = client
        self._join(client, client.presence)

    def _join_relay(self, stream: Stream) -> None:
        """Send a relay the terms of the run (RelayTerms) and the accepted keys of clients. Close an older connection of the same relay."""
        identity = stream.relay_identity
        if identity in self._relays:
            reason = (
                "a newer connection has joined with the key of this relay, and the server keeps only the newest; give each relay its own "
                "key with: fedcomp keys add --relay --host HOST"
            )
            self._refuse(self._relays[identity].stream, "replaced", reason, retry=False)
        stream.timer.cancel()
        relay = stream.relay = ConnectedRelay(self, stream)
        stream.joined, self._relays[identity] = True, relay
        relay.send(wire.encode(Kind.TERMS, self.settings.relay_terms))
        self._send_keys(relay)
        if self._farewell is not None:
            self._dismiss(stream, self._farewell)

    def _send_keys(self, relay: ConnectedRelay) -> None:
        keys = self.settings.keys
        ids = keys.ids_by_hash().items() if keys is not None else ()
        relay.send(relay_wire.encode_entries(Kind.KEYS, ids))

    # Requests from the port's owner.

    def assign(self, assignments: Iterable[PendingAssignment]) -> None:
        """Send assignments. A disconnected client receives its assignment if it reconnects within `settings.grace_s` seconds."""
        for pending in assignments:
            client = pending.assignment.client
            self.pending.withdraw(client)
            self.pending[client] = pending
            if (connection := self._joined.get(client)) is not None:
                self._send_assignment(connection, pending)
            else:
                self.pending.start_grace(client, self.settings.grace_s)

    def _send_assignment(self, connection: Connection, pending: PendingAssignment) -> None:
        pending.stop_timer()
        relay = connection.relay
        if pending.relay is not None and pending.relay is not relay:
            pending.relay.withdraw(pending)
        if isinstance(connection, Stream):
            pending.relay = None
            connection.last_sent = pending.sequence
            connection.n_assignments += 1
            pieces = wire.encode_assignment(pending.sequence, pending.assignment)
            connection.assign(pending.messages(pieces))
        elif pending.relay is not relay:
            pending.relay = connection.relay
            connection.relay.assign(pending)

    def cancel(self, assignments: Iterable[tuple[int, int]]) -> None:
        """Withdraw assignments, given as (client, sequence number), if they are still open."""
        for client, sequence in assignments:
            pending = self.pending.get(client)
            if pending is not None and pending.sequence == sequence:
                self.pending.withdraw(client)
                if isinstance(stream := self._joined.get(client), Stream):
                    stream.withdraw()

    def disconnect(self, client: int, refused: Refused) -> None:
        """End the connection of a client after the message `refused`."""
        if (connection := self._joined.get(client)) is not None:
            self._refuse(connection, "server", refused.reason, refused.retry)

    def recheck_keys(self) -> None:
        """Close connections whose keys are no longer accepted, and count their assignments as lost. Send relays the accepted keys again."""
        keys = self.settings.keys
        if keys is None or keys.problem:
            return
        for client in [*self.pending]:
            key = self._keys.get(client)
            if key is not None and keys.find(key.hash).client != client:
                self.pending.lose(client, EXPELLED)
        relayed = [one for one in self._joined.values() if isinstance(one, RelayedClient)]
        connections: list[Connection] = [*self._streams, *relayed]
        for connection in connections:
            if not connection.closing and (reason := self.admission.key_problem(connection)):
                self._refuse(connection, "key", reason, retry=False)
        for relay in self._relays.values():
            self._send_keys(relay)

    async def send_farewell(self, farewell: Farewell, stay: bool = False) -> None:
        """Send a farewell to all clients, and wait up to FAREWELL_S seconds until the clients have left.

        If `stay` is true, wait the full FAREWELL_S seconds, so that clients that join later also receive the farewell.
        """
        self._farewell = farewell
        direct = [one for one in self._joined.values() if isinstance(one, Stream)]
        for stream in [*direct, *(relay.stream for relay in self._relays.values())]:
            self._dismiss(stream, farewell)
        deadline = time.monotonic() + FAREWELL_S
        while (self._joined or stay) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _dismiss(self, stream: Stream, farewell: Farewell) -> None:
        stream.withdraw()
        stream.put(wire.split(wire.encode(Kind.FAREWELL, farewell, self.settings.invitation)))

    async def read_traffic(self) -> TrafficReport | None:
        """Return the port's byte counts, or None if the platform does not count bytes."""
        return self.traffic.report(self._streams)

    async def figures(self) -> PortFigures:
        """Count the clients, relays and connections. If the platform does not list connections, count streams as connections."""
        streams, connections = len(self._streams), self.traffic.connections
        report = self.traffic.report(self._streams)
        return PortFigures(
            clients=self.clients,
            relays=len(self._relays),
            streams=streams,
            connections=streams if connections is None else connections,
            refused=dict(self.admission.refused),
            received_bytes=report and report.total.bytes_in,
            sent_bytes=report and report.total.bytes_out,
            by_client=report.by_client if report else {},
        )


def _add_port(server: grpc.aio.Server, where: str, credentials: Credentials | None) -> int:
    """Let a gRPC server listen at an address. Return the port's number. Raises RuntimeError if gRPC cannot open the port."""
    if credentials is None:
        return server.add_insecure_port(where)
    pair = credentials.key, credentials.certificate
    secure = grpc.ssl_server_credentials([pair], credentials.ca, require_client_auth=True)
    return server.add_secure_port(where, secure)
