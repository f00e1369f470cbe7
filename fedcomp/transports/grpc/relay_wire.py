"""The messages between a server and a relay, as docs/wire-format.md specifies them.

A relay has one stream for all of its clients. A frame that several assignments contain is sent to it once: the server numbers frames, the
relay keeps them, and assignments refer to them by number. The server decides which frames the relay forgets.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...codecs.frame import varint
from ...errors import ProtocolError
from ...messages import Assignment, Invitation, Presence, Report
from . import wire
from .wire import DOUBLE, Kind, Reader, Refused

KEPT = 64 << 20  # bytes of frames that a relay keeps for later assignments
BUNDLE = 4 << 20  # bytes of new frames and assignments, above which another bundle begins
KEY_HASH = 32  # bytes
UNTIL_ALL = -1.0  # in place of a number of seconds
Client = tuple[int, int]  # logical id and sequence number of an assignment


@dataclass
class Terms:
    """The server's answer to a relay: an invitation for the relay's clients, and the limits of their messages."""

    run: str
    options: str
    layout: str  # fingerprint of the model's layout
    version: str  # that the run started from
    clients: int  # of the run
    largest_report: int  # bytes
    largest_assignment: int  # bytes
    codec: str = ""  # spec of the uplink if the relay adds frames, else ""
    shapes: str = (
        ""  # JSON: the names and shapes of the layout's tensors if the relay adds frames, else ""
    )

    @property
    def invitation(self) -> Invitation:
        return Invitation(self.run, -1, self.options, self.layout, self.version)


@dataclass
class Bundle:
    """Assignments to clients of a relay, with their sequence numbers."""

    wait_s: (
        float  # after which a relay adds the frames that it has; UNTIL_ALL: when all have answered
    )
    assignments: list[tuple[int, Assignment]]


@dataclass
class Disconnect:
    """An order to end the connection of a client, with the reason."""

    client: int
    refused: Refused


@dataclass
class Kept:
    """The frames that a relay keeps, from the server's side."""

    numbers: "OrderedDict[bytes, int]" = field(default_factory=OrderedDict)  # oldest use first
    size: int = 0  # bytes
    next: int = 0

    def number(self, frame: bytes) -> int | None:
        """Return the number of a frame, None if the relay does not keep it."""
        if frame in self.numbers:
            self.numbers.move_to_end(frame)
        return self.numbers.get(frame)

    def add(self, frame: bytes) -> int:
        """Return the number of a new frame."""
        number = self.numbers[frame] = self.next
        self.next += 1
        self.size += len(frame)
        return number

    def forget(self) -> Iterator[int]:
        """Forget the frames whose last use is longest ago until at most KEPT bytes are left. Yield their numbers."""
        while self.size > KEPT and len(self.numbers) > 1:
            frame, number = self.numbers.popitem(last=False)
            self.size -= len(frame)
            yield number


# From the server.


def encode_terms(terms: Terms) -> list[bytes]:
    return wire.whole(Kind.TERMS, wire.encode_fields(terms, Terms("", "", "", "", 0, 0, 0)))


def decode_terms(reader: Reader) -> Terms:
    return wire.decode_fields(Terms("", "", "", "", 0, 0, 0), reader)[0]


def encode_keys(ids: Mapping[bytes, int]) -> list[bytes]:
    """Encode the keys of the clients that may join: SHA-256 of the public key [32 bytes] → logical id."""
    return wire.whole(Kind.KEYS, [hash + varint(client) for hash, client in ids.items()])


def decode_keys(reader: Reader) -> dict[bytes, int]:
    ids = {}
    while not reader.ended:
        hash = reader.take(KEY_HASH)
        ids[hash] = reader.varint()
    return ids


def encode_bundles(
    wait_s: float, assignments: Sequence[tuple[int, Assignment]], kept: Kept
) -> Iterator[list[bytes]]:
    """Yield messages with these assignments, given with their sequence numbers, and with the frames that the relay does not keep yet."""
    left = iter(assignments)
    while True:
        new: list[bytes] = []
        if not (entries := list(_entries(left, kept, new))):
            return
        forgotten = [varint(number) for number in kept.forget()]
        head = [DOUBLE.pack(wait_s), varint(len(new) // 3), *new]
        tail = [varint(len(forgotten)), *forgotten, varint(len(entries))]
        yield wire.whole(Kind.ASSIGNMENTS, [*head, *tail, *(p for e in entries for p in e)])


def _entries(
    assignments: Iterable[tuple[int, Assignment]], kept: Kept, new: list[bytes]
) -> Iterator[list[bytes]]:
    """Yield encoded assignments until they fill a bundle with their new frames. Append these with numbers and lengths to `new`."""
    size = 0  # bytes

    def refer(frame: bytes) -> bytes:
        if (number := kept.number(frame)) is None:
            nonlocal size
            number, size = kept.add(frame), size + len(frame)
            new.extend([varint(number), varint(len(frame)), frame])
        return varint(number)

    for sequence, assignment in assignments:
        pieces = wire.encode_assignment(sequence, assignment, refer)
        length = sum(map(len, pieces))
        size += length
        yield [varint(assignment.client), varint(length), *pieces]
        if size >= BUNDLE:
            return


def decode_bundle(reader: Reader, kept: dict[int, bytes]) -> Bundle:
    """Decode assignments. `kept`: the frames that the relay keeps by number; new ones are added and forgotten ones removed."""

    def resolve(reference: bytes) -> bytes:
        one = Reader(reference)
        number = one.varint()
        one.end()
        if number not in kept:
            raise ProtocolError(f"an assignment refers to the frame {number}, which was not sent")
        return kept[number]

    wait_s = reader.double()
    for _ in range(reader.count()):
        number = reader.varint()
        kept[number] = reader.blob()
    forgotten = [reader.varint() for _ in range(reader.count())]
    bundle = Bundle(wait_s, [])
    for _ in range(reader.count()):
        client = reader.varint()
        kind, entry = wire.opened(reader.blob())
        if kind is not Kind.ASSIGNMENT:
            raise ProtocolError(f"a bundle of assignments contains a {kind.name}")
        bundle.assignments.append(wire.decode_assignment(entry, client, resolve))
    reader.end()
    for number in forgotten:
        kept.pop(number, None)
    return bundle


def encode_withdrawn(assignments: Collection[Client]) -> list[bytes]:
    """Encode the withdrawal of assignments."""
    numbers = [varint(number) for one in assignments for number in one]
    return wire.whole(Kind.WITHDRAW, numbers)


def decode_withdrawn(reader: Reader) -> list[Client]:
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
    kind, rest = wire.opened(reader.rest())
    if kind is not Kind.REFUSED:
        raise ProtocolError(f"the reason for a disconnection is a {kind.name}")
    return Disconnect(client, wire.decode_refused(rest))


# From the relay.


def encode_joined(presence: Presence) -> list[bytes]:
    return wire.whole(Kind.JOINED, wire.encode_fields(presence, Presence("", -1, "", "")))


def decode_joined(reader: Reader) -> Presence:
    return wire.decode_fields(Presence("", -1, "", ""), reader)[0]


def encode_client(kind: Kind, client: int) -> list[bytes]:
    """Encode LEFT or HEARD."""
    return wire.whole(kind, [varint(client)])


def decode_client(reader: Reader) -> int:
    client = reader.varint()
    reader.end()
    return client


def encode_reports(answers: Sequence[tuple[int, Report, Assignment]]) -> list[bytes]:
    """Encode reports, given with the sequence numbers of the assignments that they answer, and with these. Frames are not copied."""
    pieces: list[bytes] = []
    for sequence, report, answered in answers:
        entry = wire.encode_report(sequence, report, answered)
        pieces += [varint(answered.client), varint(sum(map(len, entry))), *entry]
    return wire.whole(Kind.REPORTS, pieces)


def decode_reports(
    reader: Reader, answered: Callable[[int, int], Assignment | None]
) -> Iterator[tuple[int, int, Report | None]]:
    """Yield the client, the sequence number and the report of each entry; the report is None if its assignment is no longer open.

    `answered(client, sequence)` returns the open assignment, or None.
    """
    while not reader.ended:
        client = reader.varint()
        kind, entry = wire.opened(reader.blob())
        if kind is not Kind.REPORT:
            raise ProtocolError(f"a bundle of reports contains a {kind.name}")
        sequence = entry.varint()
        assignment = answered(client, sequence)
        yield client, sequence, assignment and wire.decode_report(entry, assignment)


def encode_lost(client: int, sequence: int, stage: str, reason: str) -> list[bytes]:
    pieces = [varint(client), varint(sequence), wire.encode_text(stage), wire.encode_text(reason)]
    return wire.whole(Kind.LOST, pieces)


def decode_lost(reader: Reader) -> tuple[int, int, str, str]:
    """Return the client, the sequence number, the stage and the reason."""
    lost = reader.varint(), reader.varint(), reader.text(), reader.text()
    reader.end()
    return lost
