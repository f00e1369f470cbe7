"""The server's end of a relay: one stream that stands for the connections of many clients."""

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from ...errors import ProtocolError
from ...messages import Presence, Report
from ...server.transport import Lost
from . import relay_wire, wire
from .credentials import PeerKey, point_key
from .relay_wire import Disconnect, Kept
from .stream import Heard
from .wire import Kind, Reader, Refused

if TYPE_CHECKING:
    from .port import Port
    from .stream import Open, Stream


class Relay:
    """A relay that is connected: its stream, its clients by logical id, and the frames that it keeps."""

    def __init__(self, port: "Port", stream: "Stream"):
        self.port, self.stream = port, stream
        self.clients: dict[int, RelayedClient] = {}
        self.lost = False
        self._kept = Kept()
        self._queued: list[Open] = []

    def assign(self, open: "Open") -> None:
        """Send an assignment together with the others of this turn of the event loop."""
        if not self._queued:
            asyncio.get_running_loop().call_soon(self._flush)
        self._queued.append(open)

    def send(self, pieces: Iterable[bytes]) -> None:
        if not self.stream.closing:
            self.stream.put(wire.split([*pieces]))

    def withdraw(self, client: int, sequence: int) -> None:
        self._queued = [open for open in self._queued if open.sequence != sequence]
        if not self.lost:
            self.send(relay_wire.encode_withdrawn([(client, sequence)]))

    def take(self, kind: Kind, reader: Reader) -> None:
        """Handle a message of the relay. Raises ProtocolError."""
        port = self.port
        if kind is Kind.JOINED:
            port.join_relayed(self, relay_wire.decode_joined(reader))
        elif kind is Kind.LEFT:
            client = self.clients.pop(relay_wire.decode_client(reader), None)
            if client is not None:
                port.leave(client)
        elif kind is Kind.HEARD:
            self._hear(relay_wire.decode_client(reader))
        elif kind is Kind.REPORTS:
            self._take_reports(reader)
        elif kind is Kind.LOST:
            who, sequence, stage, reason = relay_wire.decode_lost(reader)
            if port.opened(who, sequence, self) is not None:
                port.answer(who, Lost(reason, stage))
        else:
            raise ProtocolError(f"a relay sent a {kind.name}, which is not expected now")

    def _take_reports(self, reader: Reader) -> None:
        """Decode all reports before the first one counts: they may contain a sum."""
        reports: dict[int, Report] = {}
        gone: dict[int, None] = {}  # in order, each client once
        answered = partial(self.port.opened, relay=self)
        for who, _, report in relay_wire.decode_reports(reader, answered):
            if report is None:
                gone[who] = None
            elif who in reports:
                raise ProtocolError(f"a relay sent two reports of client {who} in one message")
            else:
                reports[who] = report
        for who in gone:
            self._hear(who)
        terms = self.port.settings.relay_terms
        if terms is not None and terms.codec:
            self.port.answer_together(reports, [*gone])
        else:
            for who, report in reports.items():
                self.port.answer(who, report)

    def _hear(self, client: int) -> None:
        if client in self.clients:
            self.port.events.put(Heard(client))

    def _flush(self) -> None:
        opens, self._queued = self._queued, []
        if self.lost or not opens:
            return
        self.stream.assignments += len(opens)
        due_s = [open.due_s for open in opens if open.due_s is not None]
        wait_s = max(0.0, min(due_s) - time.monotonic()) if due_s else relay_wire.UNTIL_ALL
        assignments = [(open.sequence, open.assignment) for open in opens]
        for pieces in relay_wire.encode_bundles(wait_s, assignments, self._kept):
            self.send(pieces)
        for open in opens:
            open.sent = True


class RelayedClient:
    """A client that has joined through a relay, in place of its `Stream`. Raises ProtocolError for a malformed key."""

    relay_id = None

    def __init__(self, relay: Relay, presence: Presence):
        self.relay, self.client = relay, presence.client
        self.key: PeerKey | None = point_key(presence.key) if presence.key else None
        self.closing = False

    @property
    def carrier(self) -> "Stream":
        return self.relay.stream

    def replaces(self, older: "Stream | RelayedClient") -> bool:
        """Return whether an older stream needs no message: the relay has ended it."""
        return isinstance(older, RelayedClient) and older.relay is self.relay

    def close(self, refused: Refused | None = None) -> None:
        """Have the relay disconnect the client."""
        if not self.closing:
            self.closing = True
            reason = refused or Refused("the server ended the connection", True)
            self.relay.send(relay_wire.encode_disconnect(Disconnect(self.client, reason)))
