"""The messages between a server and a relay, as docs/reference/wire-format.md specifies them.

A relay has one stream for all of its clients. The server sends the relay a frame (an encoded vector) only once, even if several assignments
contain it. For this purpose, the server numbers frames, the relay caches them, and assignments refer to frames by number. The server also
decides which frames the relay removes from its cache.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...codecs.frame import varint
from ...errors import ProtocolError
from ...messages import Assignment, Presence, Report
from . import wire
from .values import CODECS, DOUBLE, FieldCodec, Reader, decode_fields, encode_blob, encode_fields
from .wire import Kind, Refused

CACHE_BYTES = 64 << 20  # size limit of a relay's frame cache
BUNDLE_BYTES = 4 << 20  # a message with assignments is full when it has this many bytes
KEY_HASH = 32  # length in bytes of the hash of a public key
UNTIL_ALL = -1.0  # value of `wait_s` with which the relay waits for all clients
AssignmentId = tuple[int, int]  # logical client id and sequence number of an assignment


@dataclass
class Bundle:
    """Assignments to clients of a relay, with their sequence numbers."""

    wait_s: float  # time after which the relay adds the updates received so far, or UNTIL_ALL to wait for all updates
    assignments: list[tuple[int, Assignment]]


@dataclass
class Disconnect:
    """A message that tells a relay to disconnect a client."""

    client: int
    connection: int  # number that the relay gave the connection in its JOINED message
    refused: Refused  # the message that the relay sends the client, with the reason


@dataclass
class FrameCache:
    """The server's record of the frames that a relay has cached."""

    # By frame: its number. The least recently used frame is the first.
    numbers: "OrderedDict[bytes, int]" = field(default_factory=OrderedDict)
    size: int = 0  # bytes
    next: int = 0  # number of the next new frame

    def number(self, frame: bytes) -> int | None:
        """Mark a frame as used and return its number, or None if the relay does not have the frame."""
        if frame in self.numbers:
            self.numbers.move_to_end(frame)
        return self.numbers.get(frame)

    def add(self, frame: bytes) -> int:
        """Add a new frame and return its number."""
        number = self.numbers[frame] = self.next
        self.next += 1
        self.size += len(frame)
        return number

    def forget(self) -> Iterator[int]:
        """Remove the least recently used frames, and yield their numbers, until the cache has at most CACHE_BYTES bytes or one frame."""
        while self.size > CACHE_BYTES and len(self.numbers) > 1:
            frame, number = self.numbers.popitem(last=False)
            self.size -= len(frame)
            yield number


# Messages of the kinds in ENTRY_FIELDS are lists of entries. KEYS and WITHDRAW messages have any number of entries, the other kinds one.


def _read_message(expected: Kind, message: bytes) -> Reader:
    """Return a reader of the body of a nested message. Raises ProtocolError if the message is not of the kind `expected`."""
    kind, reader = wire.read_kind(message)
    if kind is not expected:
        raise ProtocolError(
            f"a message contains a {kind.name} message; expected a {expected.name} message"
        )
    return reader


NO_PRESENCE = Presence("", -1, "", "")
VARINT = FieldCodec(lambda value: [varint(value)], Reader.varint)
TEXT = CODECS[str]
HASH = FieldCodec(lambda value: [value], lambda reader: reader.take(KEY_HASH))
REFUSED = FieldCodec(
    lambda value: [wire.encode_refused(value)],
    lambda reader: wire.decode_refused(_read_message(Kind.REFUSED, reader.rest())),
)
PRESENCE = FieldCodec(
    lambda value: encode_fields(value, NO_PRESENCE),
    lambda reader: decode_fields(NO_PRESENCE, reader)[0],
)
ENTRY_FIELDS = {
    Kind.KEYS: (HASH, VARINT),  # key hash and logical id of a client that may join
    Kind.WITHDRAW: (VARINT, VARINT),  # client and sequence number of an assignment
    Kind.DISCONNECT: (VARINT, VARINT, REFUSED),  # client, number of its connection, reason
    Kind.JOINED: (VARINT, PRESENCE),  # number of the connection, client's answer to the invitation
    Kind.LEFT: (VARINT,),  # client
    Kind.ANSWERED_LATE: (VARINT,),  # client
    Kind.LOST: (VARINT, VARINT, TEXT, TEXT),  # client, sequence number, stage of the loss, reason
}


def encode_entries(kind: Kind, entries: Iterable[Sequence[Any]]) -> list[bytes]:
    pieces = [bytes([kind])]
    for entry in entries:
        for field_codec, value in zip(ENTRY_FIELDS[kind], entry, strict=True):
            pieces += field_codec.write(value)
    return pieces


def decode_entries(kind: Kind, reader: Reader) -> list[tuple[Any, ...]]:
    entries = []
    while reader.remaining:
        entries.append(tuple(field_codec.read(reader) for field_codec in ENTRY_FIELDS[kind]))
    return entries


def decode_entry(kind: Kind, reader: Reader) -> tuple[Any, ...]:
    """Decode a message that must have a single entry."""
    entry = tuple(field_codec.read(reader) for field_codec in ENTRY_FIELDS[kind])
    reader.end()
    return entry


# Bundles.


def encode_bundle(
    wait_s: float, assignments: Iterator[tuple[int, Assignment]], cache: FrameCache
) -> list[bytes]:
    """Encode a message with assignments, their sequence numbers, and the frames that the relay does not have yet.

    Take assignments from the iterator until the message has BUNDLE_BYTES bytes. Return an empty list if there are no assignments.
    """
    new: list[list[bytes]] = []  # number, length and bytes of each new frame
    entries: list[list[bytes]] = []  # client, length and bytes of each assignment
    entry_bytes, cached_bytes = 0, cache.size

    def refer(frame: bytes) -> bytes:
        if (number := cache.number(frame)) is None:
            number = cache.add(frame)
            new.append([varint(number), *encode_blob(frame)])
        return varint(number)

    for sequence, assignment in assignments:
        message = wire.encode_assignment(sequence, assignment, refer)
        entries.append([varint(assignment.client), *encode_blob(*message)])
        entry_bytes += sum(map(len, message))
        if entry_bytes + cache.size - cached_bytes >= BUNDLE_BYTES:
            break
    if not entries:
        return []
    forgotten = [[varint(number)] for number in cache.forget()]
    pieces = [bytes([Kind.ASSIGNMENTS]), DOUBLE.pack(wait_s)]
    for values in (new, forgotten, entries):
        pieces += [varint(len(values)), *itertools.chain.from_iterable(values)]
    return pieces


def decode_bundle(reader: Reader, frames: dict[int, bytes]) -> Bundle:
    """Decode a message with assignments. Add its new frames to the cache `frames` (number → frame), and remove those that it names."""

    def resolve(reference: bytes) -> bytes:
        digits = Reader(reference)
        number = digits.varint()
        digits.end()
        if number not in frames:
            raise ProtocolError(
                f"an assignment refers to frame {number}, which this relay does not have"
            )
        return frames[number]

    wait_s = reader.double()
    for _ in range(reader.count()):
        number = reader.varint()
        frames[number] = reader.blob()
    forgotten = [reader.varint() for _ in range(reader.count())]
    bundle = Bundle(wait_s, [])
    for _ in range(reader.count()):
        client = reader.varint()
        entry = _read_message(Kind.ASSIGNMENT, reader.blob())
        bundle.assignments.append(wire.decode_assignment(entry, client, resolve))
    reader.end()
    for number in forgotten:
        frames.pop(number, None)
    return bundle


def encode_reports(answers: Sequence[tuple[int, Report, Assignment]]) -> list[bytes]:
    """Encode reports without copying their frames. Each answer is a tuple (sequence number, report, assignment)."""
    pieces = [bytes([Kind.REPORTS])]
    for sequence, report, assignment in answers:
        entry = wire.encode_report(sequence, report, assignment)
        pieces += [varint(assignment.client), *encode_blob(*entry)]
    return pieces


def decode_reports(
    reader: Reader, pending_assignment: Callable[[int, int], Assignment | None]
) -> Iterator[tuple[int, int, Report | None]]:
    """Yield the client, the assignment's sequence number and the report of each entry of a REPORTS message.

    The report is None if its assignment is no longer open. `pending_assignment(client, sequence)` returns the open assignment, or None.
    """
    while reader.remaining:
        client = reader.varint()
        entry = _read_message(Kind.REPORT, reader.blob())
        sequence = entry.varint()
        assignment = pending_assignment(client, sequence)
        report = None if assignment is None else wire.decode_report(entry, assignment)
        yield client, sequence, report
