"""The encoding of gRPC messages, as docs/reference/wire-format.md specifies it.

The first byte of a gRPC message gives its kind, and the other bytes are its body. Most bodies encode a dataclass of `fedcomp.messages`.
Such a body starts with a bit mask of the fields that follow. All other fields have the values of a base message that both sides know. For
example, the base of a report is made from the assignment that the report answers. Large messages are sent in parts.
"""

import dataclasses
import functools
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from ...codecs.frame import varint
from ...errors import ProtocolError, UnreachableError, UserError
from ...messages import (
    FRAMES,
    TRAIN,
    UPDATE,
    Assignment,
    Farewell,
    Invitation,
    Presence,
    Report,
    fields_of,
    next_version,
    ticket,
)
from ...server.transport import GRACE_S
from .values import Reader, decode_fields, encode_fields, encode_int, encode_text

PROTOCOL = 2  # version of the protocol, which must be equal on the server and the client
RELAY = -2  # value of the client id in a relay's HELLO message
SERVICE = "fedcomp.Transport"
METHOD = f"/{SERVICE}/Attend"
PART_BYTES = 1 << 18  # a larger message is sent in parts of at most this size
MAX_GRPC_BYTES = PART_BYTES + 64  # size of the largest gRPC message
# If the frames (encoded vectors) of a message have at most MAX_DERIVED_BYTES bytes, their hash (the field `version` of an assignment, or
# `ticket` of a report) is not sent, because the receiver can compute it.
MAX_DERIVED_BYTES = 1 << 16
MAX_NAME_BYTES = 128  # size limit of each text in a Presence or Report, except `reason`
MAX_REASON_CHARS = 1000
PresenceOrReport = TypeVar("PresenceOrReport", Presence, Report)


class Kind(IntEnum):
    """The kind of a message, which is the message's first byte."""

    HELLO = 1
    REFUSED = 2
    INVITATION = 3
    PRESENCE = 4
    ASSIGNMENT = 5
    REPORT = 6
    PING = 7
    PONG = 8
    FAREWELL = 9
    BEGIN = 10
    PART = 11
    # The following kinds are used only between a server and a relay (relay_wire.py).
    TERMS = 12
    KEYS = 13
    ASSIGNMENTS = 14
    WITHDRAW = 15
    DISCONNECT = 16
    JOINED = 17
    LEFT = 18
    ANSWERED_LATE = 19
    REPORTS = 20
    LOST = 21


PING, PONG = bytes([Kind.PING]), bytes([Kind.PONG])


@dataclass(frozen=True)
class Hello:
    """The first message of a client or relay to the server."""

    client: int  # id that the client claims (ignored with TLS), -1 for no id, or RELAY for a relay
    version: str  # version of fedcomp
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Refused:
    """The server's last message to a client or relay that is refused or disconnected."""

    reason: str  # one sentence
    retry: bool  # whether a later attempt may succeed

    @property
    def error(self) -> UserError:
        """The error for the client or relay: an UnreachableError if a later attempt may succeed, else a UserError."""
        return UnreachableError(self.reason, "starting") if self.retry else UserError(self.reason)


@dataclass
class RelayTerms:
    """The server's answer to a relay's HELLO: the contents of the invitation for clients, size limits, and the codec of the updates."""

    run: str
    options: str
    layout: str  # fingerprint of the model's layout
    version: str  # the model's version when the run started
    clients: int  # number of clients of the run
    largest_report: int  # bytes
    largest_assignment: int  # bytes
    codec: str = ""  # spec of the uplink codec, or "" if the relay does not add updates
    # JSON object with the shape of each tensor by name, or "" if the relay does not add updates.
    shapes: str = ""
    grace_s: float = GRACE_S  # time limit for a client to reconnect; inf means no limit

    @property
    def invitation(self) -> Invitation:
        """The invitation for a client that has no id yet."""
        return Invitation(self.run, -1, self.options, self.layout, self.version)


# Messages.


def _version_after(assignment: Assignment) -> str:
    return functools.reduce(next_version, assignment.frames, assignment.base)


def _assignment_base(client: int) -> Assignment:
    return Assignment(0, TRAIN, client, FRAMES, "", "", "", [], "")


def _report_base(answered: Assignment) -> Report:
    a = answered
    head = a.round, a.phase, a.client, UPDATE, a.version, a.fingerprint
    return Report(*head, b"", "", 0, 0.0, "", "", a.accepted)


def encode_hello(hello: Hello) -> bytes:
    head = bytes([Kind.HELLO]) + varint(hello.protocol)
    return head + encode_text(hello.version) + encode_int(hello.client)


def decode_hello(reader: Reader) -> Hello:
    """Decode a HELLO message. If the sender uses another version of the protocol, decode only the two version fields."""
    protocol, version = reader.varint(), reader.text()
    if protocol != PROTOCOL:
        return Hello(-1, version, protocol)
    hello = Hello(reader.signed(), version)
    reader.end()
    return hello


def encode_refused(refused: Refused) -> bytes:
    return bytes([Kind.REFUSED, refused.retry]) + refused.reason.encode(errors="replace")


def decode_refused(reader: Reader) -> Refused:
    retry = reader.take(1) != b"\0"
    return Refused(reader.rest().decode(errors="replace"), retry)


NO_INVITATION = Invitation("", -1, "", "", "")
# By kind of message: a function from the stream's invitation to the base message. Only fields that differ from the base are sent.
BASES: dict[Kind, Callable[[Invitation], Any]] = {
    Kind.INVITATION: lambda invitation: NO_INVITATION,
    Kind.PRESENCE: lambda i: Presence(i.run, i.client, i.version, ""),
    Kind.FAREWELL: lambda invitation: Farewell(invitation.run, 0),
    Kind.TERMS: lambda invitation: RelayTerms("", "", "", "", 0, 0, 0, grace_s=0.0),
}


def encode(kind: Kind, message: Any, invitation: Invitation = NO_INVITATION) -> list[bytes]:
    """Encode an Invitation, Presence, Farewell or RelayTerms as a list of byte strings.

    `invitation`: the invitation sent on the stream, from which the base message is made.
    """
    return [bytes([kind]), *encode_fields(message, BASES[kind](invitation))]


def decode(kind: Kind, reader: Reader, invitation: Invitation = NO_INVITATION) -> Any:
    """Decode a message that was made by `encode`."""
    return decode_fields(BASES[kind](invitation), reader)[0]


def encode_assignment(
    sequence: int, assignment: Assignment, refer: Callable[[bytes], bytes] | None = None
) -> list[bytes]:
    """Encode an assignment as a list of byte strings, without copying its large byte strings.

    The client id is not encoded, because both sides know it. If `refer` is given, `refer(data)` replaces each byte string `data` in
    `frames` and `announced`; for example, a number replaces a frame that a relay has cached.
    """
    base = _assignment_base(assignment.client)
    if sum(map(len, assignment.frames)) <= MAX_DERIVED_BYTES:
        base.version = _version_after(assignment)
    if refer is not None:
        frames, announced = map(refer, assignment.frames), map(refer, assignment.announced)
        assignment = dataclasses.replace(assignment, frames=[*frames], announced=[*announced])
    return [bytes([Kind.ASSIGNMENT]), varint(sequence), *encode_fields(assignment, base)]


def decode_assignment(
    reader: Reader, client: int, resolve: Callable[[bytes], bytes] | None = None
) -> tuple[int, Assignment]:
    """Decode a sequence number and an assignment. `resolve` is the inverse of `refer` in `encode_assignment`."""
    sequence = reader.varint()
    assignment, omitted = decode_fields(_assignment_base(client), reader)
    if resolve is not None:
        assignment.frames = [*map(resolve, assignment.frames)]
        assignment.announced = [*map(resolve, assignment.announced)]
    if "version" in omitted:
        assignment.version = _version_after(assignment)
    return sequence, assignment


def encode_report(sequence: int, report: Report, answered: Assignment) -> list[bytes]:
    """Encode a report as a list of byte strings, without copying the frame.

    Fields whose values the receiver can derive from the assignment `answered` are omitted.
    """
    base = _report_base(answered)
    if len(report.frame) <= MAX_DERIVED_BYTES:
        base.ticket = ticket(report.round, report.client, report.frame)
    return [bytes([Kind.REPORT]), varint(sequence), *encode_fields(report, base)]


def decode_report(reader: Reader, answered: Assignment) -> Report:
    """Decode a report on the assignment `answered`. The reader must already have read the sequence number of the assignment."""
    report, omitted = decode_fields(_report_base(answered), reader)
    if "ticket" in omitted and len(report.frame) <= MAX_DERIVED_BYTES:
        report.ticket = ticket(report.round, report.client, report.frame)
    return report


def limit_texts(message: PresenceOrReport) -> PresenceOrReport:
    """Truncate the `reason` of a message to MAX_REASON_CHARS characters.

    Raises ProtocolError if any other text of the message has more than MAX_NAME_BYTES bytes.
    """
    for name, kind in fields_of(type(message)):
        short = kind is str and name != "reason"
        if short and len(getattr(message, name).encode()) > MAX_NAME_BYTES:
            raise ProtocolError(
                f"the '{name}' of a {type(message).__name__} has more than {MAX_NAME_BYTES} bytes"
            )
    return dataclasses.replace(message, reason=message.reason[:MAX_REASON_CHARS])


# Parts.


def split(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the gRPC messages that carry a message: a single one, or BEGIN and parts for a message larger than PART_BYTES.

    A part that contains data of a large frame contains no other data.
    """
    total = sum(map(len, pieces))
    if total <= PART_BYTES:
        yield b"".join(pieces)
        return
    yield bytes([Kind.BEGIN]) + varint(total)
    for large, group in itertools.groupby(pieces, lambda piece: len(piece) >= PART_BYTES):
        for data in group if large else [b"".join(group)]:
            view = memoryview(data)
            for start in range(0, len(data), PART_BYTES):
                yield b"".join((bytes([Kind.PART]), view[start : start + PART_BYTES]))


class Assembly:
    """An assembler of messages that arrive in parts.

    `largest`: size limit in bytes of a message in parts, which is checked before memory is allocated.

    A message is assembled as a list of byte strings (pieces). A piece ends with the last part, or with a part shorter than PART_BYTES.
    `split` sends a large frame in parts of its own, so that the frame becomes one piece and is stored only once. Messages that are split in
    another way are accepted too.
    """

    def __init__(self, largest: int):
        self.largest = largest
        self.n_announced = 0  # number of multi-part messages that have begun
        self._pieces: list[bytes] = []
        self._piece: io.BytesIO | None = None  # an unfinished piece
        self._bytes_left = self._parts_left = 0

    def take(self, data: bytes) -> tuple[Kind, Reader] | None:
        """Process a gRPC message. Return the kind of the complete message and a reader of its body, or None if parts are missing.

        Any gRPC message other than PART, PING and PONG discards an unfinished message. Raises ProtocolError for a malformed message.
        """
        kind, reader = read_kind(data)
        if kind in (Kind.PING, Kind.PONG):
            reader.end()
            return kind, reader
        if kind is Kind.PART:
            return self._add(memoryview(data)[1:])
        self._pieces, self._piece, self._bytes_left = [], None, 0
        if kind is not Kind.BEGIN:
            return kind, reader
        total = reader.varint()
        reader.end()
        if not 0 < total <= self.largest:
            raise ProtocolError(
                f"a message of {total} bytes was announced; at most {self.largest} bytes are allowed now"
            )
        self._bytes_left, self._parts_left = total, 2 * (total // PART_BYTES) + 4
        self.n_announced += 1
        return None

    def _add(self, part: memoryview) -> tuple[Kind, Reader] | None:
        if not 0 < len(part) <= self._bytes_left:
            raise ProtocolError(
                f"a part of {len(part)} bytes arrived, but {self._bytes_left} bytes of an announced message are missing"
            )
        ends = len(part) < PART_BYTES or len(part) == self._bytes_left
        if self._piece is None and ends:
            self._pieces.append(bytes(part))
        else:
            if self._piece is None:  # the system allocates memory only for bytes that are written
                self._piece = io.BytesIO(bytes(self._bytes_left))
            self._piece.write(part)
            if ends:
                self._piece.truncate()
                self._pieces.append(self._piece.getvalue())  # not copied
                self._piece = None
        self._bytes_left -= len(part)
        self._parts_left -= 1
        if self._bytes_left:
            if self._parts_left == 0:
                raise ProtocolError("a message has more parts than its size needs")
            return None
        pieces, self._pieces = self._pieces, []
        kind, reader = read_kind(*pieces)
        if kind in (Kind.PING, Kind.PONG, Kind.BEGIN, Kind.PART):
            raise ProtocolError(
                f"a {kind.name} message was sent in parts, which is not allowed for this kind"
            )
        return kind, reader


def read_kind(*pieces: bytes) -> tuple[Kind, Reader]:
    """Return the kind of a message and a reader of its body. Raises ProtocolError for an unknown kind."""
    reader = Reader(*pieces)
    number = reader.varint()
    try:
        return Kind(number), reader
    except ValueError as error:
        raise ProtocolError(f"a message has the unknown kind {number}") from error
