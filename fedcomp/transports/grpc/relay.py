"""A relay, which serves many clients on its port and forwards their messages over one connection to the server.

A relay runs in the event loop of the gRPC streams. It stores nothing on disk. It can be restarted at any time, because clients store their
own states, and the server sends unanswered assignments again when clients reconnect.
"""

import asyncio
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ...codecs import Codec, codec
from ...errors import UnreachableError, UserError
from ...keys.registry import KeyStatus
from ...layout import Layout
from ...messages import Assignment, Farewell, Report
from ...server.transport import Lost
from ..relays import add_frames, can_add
from . import relay_wire, wire
from .client import GrpcConnection
from .events import Answered, AnsweredLate, Event, Joined, Left, Warned
from .pending_assignments import PendingAssignment
from .port import Port
from .relay_wire import AssignmentId, Bundle, Disconnect
from .settings import Credentials, PortSettings
from .values import Reader
from .wire import Kind, Refused, RelayTerms

REFUSED_KEY = (
    "the server of this relay does not accept the key of this client, because the key is not enrolled, has expired, was revoked or "
    "renewed, or belongs to a relay; enrol a new client with fedcomp keys add, renew an expired or revoked key with fedcomp keys renew, "
    "and give a client the enrolment file with its newest key; relays cannot connect to another relay"
)
TERMS_BYTES = 64 << 20  # size limit of messages with the run's terms or the accepted keys
# An answer to an assignment: the sequence number of the assignment, the client's report, and the assignment.
Answer = tuple[int, Report, Assignment]


class RelayConnection(GrpcConnection):
    """The stream of a relay to its server.

    In addition to a client's messages, `messages` yields the run's terms (RelayTerms), the accepted keys (dict from key hash to logical
    id), assignments (Bundle), withdrawn assignments (list of AssignmentId) and requests to disconnect a client (Disconnect).
    """

    def __init__(self, target: str, credentials: Credentials | None):
        super().__init__(target, largest=TERMS_BYTES, credentials=credentials, client=wire.RELAY)
        self._frames: dict[int, bytes] = {}  # by number: cached frame (encoded update)

    def fail(self, error: Exception) -> None:
        """Make `messages` raise `error`."""
        self._error = error
        self._changed.set()

    async def _handle(self, kind: Kind, reader: Reader) -> None:
        if kind is Kind.TERMS and self._invitation is None:
            terms = wire.decode(kind, reader)
            self._invitation = terms.invitation
            self._assembly.largest = max(TERMS_BYTES, terms.largest_assignment)
            self._unread.append(terms)
        elif kind is Kind.KEYS:
            self._unread.append(dict(relay_wire.decode_entries(kind, reader)))
        elif kind is Kind.ASSIGNMENTS:
            self._unread.append(relay_wire.decode_bundle(reader, self._frames))
        elif kind is Kind.WITHDRAW:
            self._unread.append(relay_wire.decode_entries(kind, reader))
        elif kind is Kind.DISCONNECT:
            self._unread.append(Disconnect(*relay_wire.decode_entry(kind, reader)))
        else:
            await super()._handle(kind, reader)


class Relay:
    """A relay: one connection to a server, and a port that serves clients while this connection lasts.

    Three functions are called back: `opened` with the port's number and the terms of the run (RelayTerms) when the port opens, `changed`
    with the number of connected clients when it changes, and `warn` with each warning. They run in the thread of the gRPC event loop.
    """

    connection: RelayConnection
    port: Port
    # The codec and the model's layout with which the relay adds encoded updates. None: the relay forwards updates unchanged.
    adder: tuple[Codec, Layout] | None = None
    problem = ""  # for the interface settings.Keys; a relay can always check keys

    def __init__(
        self,
        server: str,
        address: str,
        port: int,
        credentials: Credentials | None,
        *,
        opened: Callable[[int, RelayTerms], None],
        changed: Callable[[int], None],
        warn: Callable[[str], None],
    ):
        self.server, self.address, self.port_number = server, address, port
        self.credentials = credentials
        self.opened, self.changed, self.warn = opened, changed, warn
        self.served = False  # whether any client has joined
        self.numbers = itertools.count(1)  # numbers of the clients' connections
        self.connections: dict[int, int] = {}  # by client: number of the client's newest connection
        self.ids: dict[bytes, int] = {}  # key hash → logical id
        # By client: the answer whose update the relay will add to the updates of other clients.
        self.to_add: dict[int, Answer] = {}
        self.sum_timer: asyncio.TimerHandle | None = None
        self.waiting = True  # whether to wait for all reports before adding updates
        # Messages to the server: an encoded message, or a function that adds updates and returns the encoded message. The function runs in
        # another thread when the message is sent.
        self.outgoing: deque[list[bytes] | Callable[[], list[bytes]]] = deque()
        self.queued = asyncio.Event()

    async def run(self) -> Farewell:
        """Serve clients until the run is over, and return the server's farewell. May be called only once.

        Raises UnreachableError if the server cannot be reached or the connection to it is lost, and UserError if it refuses this relay.
        """
        async with RelayConnection(self.server, self.credentials) as self.connection:
            messages: AsyncIterator[object] = self.connection.messages()
            terms: object = await anext(messages)
            if isinstance(terms, Refused):
                raise terms.error
            if not isinstance(terms, RelayTerms):
                raise UserError(
                    f"{self.server} does not answer like a fedcomp server of this version; install the same fedcomp version on both sides"
                )
            return await self._serve(terms, messages)

    async def _serve(self, terms: RelayTerms, messages: AsyncIterator[object]) -> Farewell:
        if terms.codec:
            self.adder = codec(terms.codec), Layout.from_shapes(json.loads(terms.shapes))
        where = self.address, self.port_number, terms.invitation, terms.clients
        keys = self.credentials, self
        settings = PortSettings(*where, terms.largest_report, *keys, grace_s=terms.grace_s)
        self.port = Port(settings, self._handle_event)
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(self.port.serve(port.set_result))
        writing = asyncio.create_task(self._write())
        try:
            self._handle(await anext(messages))  # the keys
            both: set[asyncio.Future[Any]] = {port, serving}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving  # raises the error
            self.opened(port.result(), terms)
            async for message in messages:
                if isinstance(message, Farewell):
                    await self.port.send_farewell(message, stay=not self.served)
                    return message
                self._handle(message)
            raise UnreachableError(
                f"the server at {self.server} has ended the connection", "closed"
            )
        finally:
            self.port.stop()
            writing.cancel()
            if self.sum_timer is not None:
                self.sum_timer.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(serving, return_exceptions=True)

    # Methods of the interface settings.Keys.

    def find(self, key_hash: bytes) -> KeyStatus:
        if key_hash in self.ids:
            return KeyStatus(client=self.ids[key_hash])
        return KeyStatus(reason=REFUSED_KEY)

    def ids_by_hash(self) -> dict[bytes, int]:
        return self.ids

    # Messages from the server.

    def _handle(self, message: object) -> None:
        match message:
            case Bundle():
                self._assign(message)
            case Disconnect(client, connection, refused):
                # If the message is about an older connection of the client, that connection has already ended.
                if self.connections.get(client) == connection:
                    self.port.disconnect(client, refused)
            case Refused():
                raise message.error
            case dict():
                self.ids = message
                self.port.recheck_keys()
            case list():
                self._withdraw(message)

    def _assign(self, bundle: Bundle) -> None:
        self.port.assign(PendingAssignment(*entry) for entry in bundle.assignments)
        self.waiting = True
        if self.sum_timer is not None:
            self.sum_timer.cancel()
        if self.adder is not None and bundle.wait_s != relay_wire.UNTIL_ALL:
            loop = asyncio.get_running_loop()
            self.sum_timer = loop.call_later(bundle.wait_s, self._stop_waiting)

    def _withdraw(self, withdrawn: list[AssignmentId]) -> None:
        for client, sequence in withdrawn:
            if client in self.to_add and self.to_add[client][0] == sequence:
                del self.to_add[client]
                self._queue_entry(Kind.ANSWERED_LATE, client)
        self.port.cancel(withdrawn)
        self._queue_sum_if_complete()

    # Events of the port.

    def _handle_event(self, event: Event) -> None:
        match event:
            case Joined(client, presence, public_key):
                presence = replace(presence, key=public_key or presence.key)
                number = self.connections[client] = next(self.numbers)
                self._queue_entry(Kind.JOINED, number, presence)
                self.served = True
                self.changed(self.port.clients)
            case Left(client):
                self._queue_entry(Kind.LEFT, client)
                self.changed(self.port.clients)
            case AnsweredLate(client):
                self._queue_entry(Kind.ANSWERED_LATE, client)
            case Warned(sentence):
                self.warn(sentence)
            case Answered(sequence, assignment, Lost(reason, stage)):
                self._queue_entry(Kind.LOST, assignment.client, sequence, stage, reason)
                self._queue_sum_if_complete()
            case Answered(sequence, assignment, Report() as report):
                if self.adder is not None and can_add(assignment, report):
                    self.to_add[assignment.client] = sequence, report, assignment
                else:
                    self._queue_report((sequence, report, assignment))
                self._queue_sum_if_complete()

    def _stop_waiting(self) -> None:
        self.waiting = False
        self._queue_sum()

    def _queue_sum_if_complete(self) -> None:
        if not self.port.pending or not self.waiting:
            self._queue_sum()

    def _queue_sum(self) -> None:
        """Queue the reports in `to_add` as one message, in the order of the client ids."""
        if self.to_add and self.adder is not None:
            answers = [self.to_add[client] for client in sorted(self.to_add)]
            self._queue(partial(_encode_sum, *self.adder, answers))
            self.to_add = {}

    # Messages to the server.

    def _queue(self, message: list[bytes] | Callable[[], list[bytes]]) -> None:
        self.outgoing.append(message)
        self.queued.set()

    def _queue_entry(self, kind: Kind, *entry: object) -> None:
        self._queue(relay_wire.encode_entries(kind, [entry]))

    def _queue_report(self, answer: Answer) -> None:
        """Queue a report. If the relay adds no updates, the report joins the last queued message if that has reports and enough space.

        A message with several reports has at most wire.PART_BYTES bytes.
        """
        head, *entry = relay_wire.encode_reports([answer])
        last = self.outgoing[-1] if self.outgoing and self.adder is None else None
        if (
            isinstance(last, list)
            and last[0] == head
            and sum(map(len, [*last, *entry])) <= wire.PART_BYTES
        ):
            last.append(b"".join(entry))
        else:
            self._queue([head, *entry])

    async def _write(self) -> None:
        """Send the queued messages in order. On an error, make `run` raise the error."""
        try:
            while True:
                await self.queued.wait()
                self.queued.clear()
                while self.outgoing:
                    message = self.outgoing.popleft()
                    if not isinstance(message, list):
                        message = await asyncio.to_thread(message)
                    await self.connection.write(message)
        except Exception as error:
            self.connection.fail(error)


def _encode_sum(codec: Codec, layout: Layout, answers: list[Answer]) -> list[bytes]:
    """Add the updates of reports with `add_frames`, and encode the reports as one message."""
    sequences, reports, assignments = zip(*answers, strict=True)
    summed = add_frames(codec, layout, assignments, reports)
    return relay_wire.encode_reports([*zip(sequences, summed, assignments, strict=True)])
