"""The messages between a server and a relay, as docs/wire-format.md specifies them.

A relay has one stream for all of its clients. A frame that several assignments contain is sent to the relay once: the server numbers
frames, the relay caches them, and assignments refer to them by number. The server decides which frames the relay forgets.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...codecs.frame import varint
from ...errors import ProtocolError
from ...messages import Assignment, Invitation, Presence, Report
from . import wire
from .wire import DOUBLE, Kind, Reader, Refused

CACHE_BYTES = 64 << 20  # of frames that a relay keeps for later assignments
BUNDLE_BYTES = 4 << 20  # of new frames and assignments; a bundle that reaches this is complete
KEY_HASH = 32  # bytes
UNTIL_ALL = -1.0  # `wait_s` of a relay that waits for all clients
AssignmentId = tuple[int, int]  # logical id of the client, sequence number


@dataclass
class Terms:
    """The server's answer to a relay: the invitation for its clients, the limits of messages, and how to add frames."""

    run: str
    options: str
    layout: str  # fingerprint of the model's layout
    version: str  # that the run started from
    clients: int  # of the run
    largest_report: int  # bytes
    largest_assignment: int  # bytes
    codec: str = ""  # spec of the uplink; "": the relay does not add frames
    shapes: str = (
        ""  # JSON: name → shape of the layout's tensors; "": the relay does not add frames
    )

    @property
    def invitation(self) -> Invitation:
        """The invitation for a client that has no id yet."""
        return Invitation(self.run, -1, self.options, self.layout, self.version)


@dataclass
class Bundle:
    """Assignments to clients of a relay, with their sequence numbers."""

    wait_s: float  # after which a relay adds the frames that have arrived; UNTIL_ALL: no limit
    assignments: list[tuple[int, Assignment]]


@dataclass
class Disconnect:
    """An order to end the connection of a client, with the reason."""

    client: int
    refused: Refused


@dataclass
class FrameCache:
    """The server's record of the frames that a relay has cached."""

    numbers: "OrderedDict[bytes, int]" = field(default_factory=OrderedDict)  # oldest use first
    size: int = 0  # bytes
    next: int = 0

    def number(self, frame: bytes) -> int | None:
        """Return the number of a cached frame and mark it as used; None if the relay does not have it."""
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
        """Remove the least recently used frames until CACHE_BYTES or one frame is left. Yield their numbers."""
        while self.size > CACHE_BYTES and len(self.numbers) > 1:
            frame, number = self.numbers.popitem(last=False)
            self.size -= len(frame)
            yield number


# From the server.


def encode_terms(terms: Terms) -> list[bytes]:
    return wire.whole(Kind.TERMS, wire.encode_fields(terms, Terms("", "", "", "", 0, 0, 0)))


def decode_terms(reader: Reader) -> Terms:
    return wire.decode_fields(Terms("", "", "", "", 0, 0, 0), reader)[0]


def encode_keys(ids: Mapping[bytes, int]) -> list[bytes]:
    """Encode the table of the clients that may join: key hash [32 bytes] → logical id."""
    return wire.whole(Kind.KEYS, [hash + varint(client) for hash, client in ids.items()])


def decode_keys(reader: Reader) -> dict[bytes, int]:
    ids = {}
    while not reader.ended:
        hash = reader.take(KEY_HASH)
        ids[hash] = reader.varint()
    return ids


def encode_bundles(
    wait_s: float, assignments: Sequence[tuple[int, Assignment]], cache: FrameCache
) -> Iterator[list[bytes]]:
    """Yield messages with assignments, given with their sequence numbers, and with the frames that the relay does not have."""
    left = iter(assignments)
    while True:
        new: list[bytes] = []
        if not (entries := list(_entries(left, cache, new))):
            return
        forgotten = [varint(number) for number in cache.forget()]
        head = [DOUBLE.pack(wait_s), varint(len(new) // 3), *new]
        tail = [varint(len(forgotten)), *forgotten, varint(len(entries))]
        yield wire.whole(Kind.ASSIGNMENTS, [*head, *tail, *(p for e in entries for p in e)])


def _entries(
    assignments: Iterable[tuple[int, Assignment]], cache: FrameCache, new: list[bytes]
) -> Iterator[list[bytes]]:
    """Yield encoded assignments until the bundle is complete. Append the number, length and bytes of each new frame to `new`."""
    size = 0  # bytes

    def refer(frame: bytes) -> bytes:
        if (number := cache.number(frame)) is None:
            nonlocal size
            number, size = cache.add(frame), size + len(frame)
            new.extend([varint(number), varint(len(frame)), frame])
        return varint(number)

    for sequence, assignment in assignments:
        pieces = wire.encode_assignment(sequence, assignment, refer)
        length = sum(map(len, pieces))
        size += length
        yield [varint(assignment.client), varint(length), *pieces]
        if size >= BUNDLE_BYTES:
            return


def decode_bundle(reader: Reader, frames: dict[int, bytes]) -> Bundle:
    """Decode assignments, and add new frames to the cache `frames` (number → frame) and remove the forgotten ones."""

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
        kind, entry = wire.read_kind(reader.blob())
        if kind is not Kind.ASSIGNMENT:
            raise ProtocolError(f"a bundle of assignments contains a {kind.name}")
        bundle.assignments.append(wire.decode_assignment(entry, client, resolve))
    reader.end()
    for number in forgotten:
        frames.pop(number, None)
    return bundle


def encode_withdrawn(assignments: Collection[AssignmentId]) -> list[bytes]:
    """Encode the withdrawal of assignments, given as client and sequence number."""
    numbers = [varint(number) for assignment in assignments for number in assignment]
    return wire.whole(Kind.WITHDRAW, numbers)


def decode_withdrawn(reader: Reader) -> list[AssignmentId]:
    withdrawn = []
    while not reader.ended:
        client = reader.varint()
        withdrawn.append((client, reader.varint()))
    return withdrawn


def encode_disconnect(order: Disconnect) -> list[bytes]:
    pieces = [varint(order.client), wire.encode_refused(order.refused)]
    return wire.whole(Kind.DISCONNECT, pieces)


def decode_disconnect(reader: Reader) -> Disconnect:
    client = reader.varint()
    kind, rest = wire.read_kind(reader.rest())
    if kind is not Kind.REFUSED:
        raise ProtocolError(f"the reason for a disconnection is a {kind.name}")
    return Disconnect(client, wire.decode_refused(rest))


# From the relay.


def encode_joined(presence: Presence) -> list[bytes]:
    return wire.whole(Kind.JOINED, wire.encode_fields(presence, Presence("", -1, "", "")))


def decode_joined(reader: Reader) -> Presence:
    return wire.decode_fields(Presence("", -1, "", ""), reader)[0]


def encode_client(kind: Kind, client: int) -> list[bytes]:
    """Encode a message of kind LEFT or HEARD."""
    return wire.whole(kind, [varint(client)])


def decode_client(reader: Reader) -> int:
    client = reader.varint()
    reader.end()
    return client


def encode_reports(answers: Sequence[tuple[int, Report, Assignment]]) -> list[bytes]:
    """Encode reports, each given with its sequence number and its assignment. Frames are not copied."""
    pieces: list[bytes] = []
    for sequence, report, assignment in answers:
        entry = wire.encode_report(sequence, report, assignment)
        pieces += [varint(assignment.client), varint(sum(map(len, entry))), *entry]
    return wire.whole(Kind.REPORTS, pieces)


def decode_reports(
    reader: Reader, open_assignment: Callable[[int, int], Assignment | None]
) -> Iterator[tuple[int, int, Report | None]]:
    """Yield the client, the sequence number and the report of each entry. The report is None if its assignment is no longer open.

    `open_assignment(client, sequence)` returns the open assignment, or None if there is none.
    """
    while not reader.ended:
        client = reader.varint()
        kind, entry = wire.read_kind(reader.blob())
        if kind is not Kind.REPORT:
            raise ProtocolError(f"a bundle of reports contains a {kind.name}")
        sequence = entry.varint()
        assignment = open_assignment(client, sequence)
        yield client, sequence, assignment and wire.decode_report(entry, assignment)


def encode_lost(client: int, sequence: int, stage: str, reason: str) -> list[bytes]:
    pieces = [varint(client), varint(sequence), wire.encode_text(stage), wire.encode_text(reason)]
    return wire.whole(Kind.LOST, pieces)


def decode_lost(reader: Reader) -> tuple[int, int, str, str]:
    """Return the client, the sequence number, the stage and the reason."""
    lost = reader.varint(), reader.varint(), reader.text(), reader.text()
    reader.end()
    return lost
