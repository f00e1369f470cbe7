"""Messages between a server and a relay: decoding inverts encoding, and any bytes decode to a message or raise ProtocolError."""

import math
from dataclasses import replace

import pytest
from grpc_ends import assignment, report
from hypothesis import given, settings
from hypothesis import strategies as st
from test_wire import TEXTS, read, same, sent_as, typed, values

from fedcomp.errors import ProtocolError
from fedcomp.messages import Assignment, Presence, Report
from fedcomp.transports.grpc import Refused, RelayTerms, relay_wire, wire
from fedcomp.transports.grpc.relay_wire import UNTIL_ALL, Bundle, FrameCache
from fedcomp.transports.grpc.wire import Kind, Reader

CLIENTS = st.integers(0, (1 << 31) - 1)
SEQUENCES = st.integers(0, 1 << 40)


def sent(pieces: list[bytes], kind: Kind) -> Reader:
    """Split and assemble a message. Return a reader of its body."""
    got, reader = read(pieces)
    assert got is kind
    return reader


class RelayEnd:
    """The frames that a relay has cached, and the bundles that it received."""

    def __init__(self) -> None:
        self.cached: dict[int, bytes] = {}
        self.sizes: list[int] = []  # bytes of messages

    def take(self, pieces: list[bytes]) -> Bundle:
        self.sizes.append(sum(map(len, pieces)))
        return relay_wire.decode_bundle(sent(pieces, Kind.ASSIGNMENTS), self.cached)

    def take_all(
        self, wait_s: float, assignments: list[tuple[int, Assignment]], cache: FrameCache
    ) -> list[tuple[int, Assignment]]:
        """Send assignments in bundles. Return those that the relay received."""
        got, remaining = [], iter(assignments)
        while pieces := relay_wire.encode_bundle(wait_s, remaining, cache):
            bundle = self.take(pieces)
            assert bundle.wait_s == wait_s
            got += bundle.assignments
        return got


def same_frames(cache: FrameCache, relay: RelayEnd) -> bool:
    """Return whether the server's record names the frames that the relay has cached."""
    return {number: frame for frame, number in cache.numbers.items()} == relay.cached


@given(TEXTS, TEXTS, st.integers(0, 1 << 62))
def test_encoded_terms_are_decoded_unchanged(run, shapes, limit):
    terms = RelayTerms(
        run, '{"lr":0.1}', "ab" * 16, "cd" * 16, 7, limit, 3, "identity", shapes, math.inf
    )
    assert sent_as(Kind.TERMS, terms) == terms


HASHES = st.binary(min_size=32, max_size=32)
REASONS = st.builds(Refused, st.text(max_size=20), st.booleans())


@given(
    st.one_of(
        st.tuples(st.just(kind), st.lists(st.tuples(*columns), min_size=fewest, max_size=most))
        for kind, columns, fewest, most in (
            (Kind.KEYS, (HASHES, CLIENTS), 0, 5),
            (Kind.WITHDRAW, (CLIENTS, SEQUENCES), 0, 5),
            (Kind.DISCONNECT, (CLIENTS, SEQUENCES, REASONS), 1, 1),
            (Kind.LEFT, (CLIENTS,), 1, 1),
            (Kind.ANSWERED_LATE, (CLIENTS,), 1, 1),
            (Kind.LOST, (CLIENTS, SEQUENCES, TEXTS, TEXTS), 1, 1),
        )
    )
)
def test_encoded_entries_are_decoded_unchanged(kind_and_rows):
    kind, rows = kind_and_rows
    assert (
        relay_wire.decode_entries(kind, sent(relay_wire.encode_entries(kind, rows), kind)) == rows
    )
    if len(rows) == 1:
        reader = sent(relay_wire.encode_entries(kind, rows), kind)
        assert relay_wire.decode_entry(kind, reader) == rows[0]


@settings(max_examples=15)
@given(
    st.lists(st.tuples(SEQUENCES, values(Assignment).filter(lambda a: a.client >= 0)), max_size=4),
    st.floats(allow_nan=False),
)
def test_encoded_assignments_are_decoded_unchanged(assignments, wait_s):
    cache, relay = FrameCache(), RelayEnd()
    for _ in range(2):  # the second time, the relay has every frame
        got = relay.take_all(wait_s, assignments, cache)
        assert [sequence for sequence, _ in got] == [sequence for sequence, _ in assignments]
        assert all(same(a, b) for (_, a), (_, b) in zip(got, assignments, strict=True))
    assert same_frames(cache, relay)


@given(SEQUENCES, values(Presence))
def test_an_encoded_joined_client_is_decoded_unchanged(connection, presence):
    reader = sent(relay_wire.encode_entries(Kind.JOINED, [(connection, presence)]), Kind.JOINED)
    number, got = relay_wire.decode_entry(Kind.JOINED, reader)
    assert number == connection and same(got, presence)


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(
            SEQUENCES, values(Report), values(Assignment), CLIENTS, st.booleans(), st.booleans()
        ),
        max_size=4,
        unique_by=lambda entry: entry[3],
    )
)
def test_encoded_reports_on_open_assignments_are_decoded_unchanged(entries):
    answers, open = [], {}
    for sequence, answer, asked, client, own, is_open in entries:
        asked = replace(asked, client=client)
        answers.append((sequence, replace(answer, client=client) if own else answer, asked))
        if is_open:
            open[client, sequence] = asked
    reader = sent(relay_wire.encode_reports(answers), Kind.REPORTS)
    got = [*relay_wire.decode_reports(reader, lambda *which: open.get(which))]
    assert [(client, s) for client, s, _ in got] == [(a.client, s) for s, _, a in answers]
    for (client, sequence, answer), (_, expected, _) in zip(got, answers, strict=True):
        if (client, sequence) in open:
            assert same(answer, expected)
        else:
            assert answer is None


def test_large_reports_travel_in_parts():
    answers = [
        (i, report(assignment(i), bytes([i]) * wire.PART_BYTES), assignment(i)) for i in range(3)
    ]
    reader = sent(relay_wire.encode_reports(answers), Kind.REPORTS)
    got = [*relay_wire.decode_reports(reader, lambda client, _: assignment(client))]
    assert [answer for *_, answer in got] == [answer for _, answer, _ in answers]


# Frames that several assignments share.


def test_a_shared_frame_is_sent_once():
    broadcast, cache, relay = bytes(range(256)) * 400, FrameCache(), RelayEnd()
    first = [(i, assignment(i, 1, [broadcast])) for i in range(50)]
    again = [(50 + i, assignment(i, 2, [broadcast, b"newer"])) for i in range(50)]
    for assignments in (first, again):
        assert relay.take_all(UNTIL_ALL, assignments, cache) == assignments
    whole, later = relay.sizes
    assert len(broadcast) < whole < 1.1 * len(broadcast)
    assert later < 0.1 * len(broadcast)


def test_announced_values_of_several_assignments_are_sent_once():
    keys, cache, relay = b"k" * 100_000, FrameCache(), RelayEnd()
    sent = [(i, replace(assignment(i), announced=[b"keys", keys])) for i in range(10)]
    assert relay.take_all(UNTIL_ALL, sent, cache) == sent
    assert sum(relay.sizes) < 1.1 * len(keys)


def test_a_relay_forgets_the_least_recently_used_frames(monkeypatch):
    monkeypatch.setattr(relay_wire, "CACHE_BYTES", 1000)
    cache, relay = FrameCache(), RelayEnd()
    frames = [bytes([i]) * 300 for i in range(6)]

    def send(*which: int) -> int:
        """Send a message with these frames. Return the size of the message in bytes."""
        assignments = [(9, assignment(1, 1, [frames[i] for i in which]))]
        assert relay.take_all(UNTIL_ALL, assignments, cache) == assignments
        assert same_frames(cache, relay) and sum(map(len, relay.cached.values())) <= 1000
        assert cache.size == sum(map(len, relay.cached.values()))
        return relay.sizes[-1]

    assert send(0) > 300 and send(1) > 300 and send(2) > 300
    assert send(0) < 300  # frame 0 is cached, and now the most recently used
    assert send(3) > 300  # frame 3 replaces frame 1
    assert send(0) < 300 and send(2) < 300
    assert 300 < send(1) < 600
    assert send(0, 1, 2, 3, 4, 5) > 900  # no frame is forgotten before it is used
    assert send(5) < 300


def test_a_frame_larger_than_the_cache_is_kept_until_the_next_one(monkeypatch):
    monkeypatch.setattr(relay_wire, "CACHE_BYTES", 1000)
    cache, relay = FrameCache(), RelayEnd()
    large = [(i, assignment(i, 1, [b"x" * 5000])) for i in range(20)]
    assert relay.take_all(UNTIL_ALL, large, cache) == large
    assert sum(relay.sizes) < 10_000
    small = [(21, assignment(1, 2))]
    assert relay.take_all(UNTIL_ALL, small, cache) == small
    assert [*relay.cached.values()] == [b"f" * 50] and same_frames(cache, relay)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=12),
    st.integers(0, 40),
)
def test_server_and_relay_have_the_same_frames(rounds, bound):
    cache, relay = FrameCache(), RelayEnd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay_wire, "CACHE_BYTES", bound)
        patch.setattr(relay_wire, "BUNDLE_BYTES", 15)
        for number, which in enumerate(rounds):
            frames = [bytes([i]) * (i + 1) for i in which]
            assignments = [(i, assignment(i, number, frames[i:])) for i in range(len(frames))]
            assert relay.take_all(UNTIL_ALL, assignments, cache) == assignments
            assert same_frames(cache, relay)
            assert cache.size == sum(map(len, relay.cached.values()))
            assert cache.size <= bound or len(relay.cached) == 1


def test_a_large_bundle_is_divided(monkeypatch):
    monkeypatch.setattr(relay_wire, "BUNDLE_BYTES", 10_000)
    cache, relay = FrameCache(), RelayEnd()
    assignments = [
        (i, replace(assignment(i, 1, [bytes([i]) * 1000]), returned=b"r" * 1000)) for i in range(30)
    ]
    assert relay.take_all(UNTIL_ALL, assignments, cache) == assignments
    assert len(relay.sizes) > 1 and max(relay.sizes) <= 10_000 + 3000


def test_returned_frames_count_towards_the_size_of_a_bundle(monkeypatch):
    monkeypatch.setattr(relay_wire, "BUNDLE_BYTES", 10_000)
    cache, relay = FrameCache(), RelayEnd()
    assignments = [(i, replace(assignment(i), returned=b"r" * 1000)) for i in range(50)]
    assert relay.take_all(UNTIL_ALL, assignments, cache) == assignments
    assert max(relay.sizes) <= 12_000


# Malformed messages.


def everything(data: bytes, cached: dict[int, bytes]) -> None:
    """Decode bytes as the message that their first byte names, and check its types."""
    whole = wire.Assembly(1 << 20).take(data)
    if whole is None:
        return
    kind, reader = whole
    match kind:
        case Kind.TERMS:
            terms = wire.decode(kind, reader)
            typed(terms), typed(terms.invitation)
        case Kind.KEYS:
            rows = relay_wire.decode_entries(kind, reader)
            assert all(len(hash) == relay_wire.KEY_HASH for hash, _ in rows)
        case Kind.ASSIGNMENTS:
            for _, assigned in relay_wire.decode_bundle(reader, cached).assignments:
                typed(assigned)
        case Kind.WITHDRAW:
            relay_wire.decode_entries(kind, reader)
        case Kind.DISCONNECT:
            _, _, refused = relay_wire.decode_entry(kind, reader)
            assert type(refused.reason) is str
        case Kind.JOINED:
            _, presence = relay_wire.decode_entry(kind, reader)
            typed(presence)
        case Kind.LEFT | Kind.ANSWERED_LATE | Kind.LOST:
            relay_wire.decode_entry(kind, reader)
        case Kind.REPORTS:
            for _, _, answer in relay_wire.decode_reports(reader, lambda *_: assignment(1)):
                typed(answer)


RELAYED = [kind for kind in Kind if kind >= Kind.TERMS]


@given(st.sampled_from(RELAYED), st.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error(kind, data):
    try:
        everything(bytes([kind]) + data, {0: b"f" * 50})
    except ProtocolError:
        pass


def examples() -> list[bytes]:
    answers = [(i, report(assignment(i)), assignment(i)) for i in range(3)]
    asked = [(i, replace(assignment(i), announced=[b"scale", b"1"])) for i in range(3)]
    messages = [
        wire.encode(Kind.TERMS, RelayTerms("ab" * 16, "{}", "", "", 3, 4, 5, "identity", "{}")),
        relay_wire.encode_entries(Kind.KEYS, [(bytes(32), 0), (b"x" * 32, 300)]),
        relay_wire.encode_bundle(1.5, iter(asked), FrameCache()),
        relay_wire.encode_entries(Kind.WITHDRAW, [(1, 2), (300, 4000)]),
        relay_wire.encode_entries(Kind.DISCONNECT, [(3, 5, Refused("no", False))]),
        relay_wire.encode_entries(Kind.JOINED, [(5, Presence("ab" * 16, 3, "", "", b"p" * 49))]),
        relay_wire.encode_reports(answers),
        relay_wire.encode_entries(Kind.LOST, [(1, 2, "reply", "gone")]),
    ]
    return [b"".join(pieces) for pieces in messages]


def test_the_examples_are_well_formed():
    for data in examples():
        everything(data, {})


@given(st.sampled_from(examples()), st.data())
def test_a_changed_message_is_another_message_or_an_error(message, data):
    packed = bytearray(message)
    for _ in range(data.draw(st.integers(1, 2))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        everything(bytes(packed[: data.draw(st.integers(1, len(packed)))]), {})
    except ProtocolError:
        pass


def bundle_of(*references: bytes) -> bytes:
    """Return the body of a bundle with one assignment whose frames are `references`."""
    asked = wire.encode_assignment(1, assignment(1, 1, [*references]))
    entry = wire.varint(sum(map(len, asked))) + b"".join(asked)
    return bytes(8) + b"\0\0" + b"\1" + b"\1" + entry


@pytest.mark.parametrize(
    "kind, data",
    [
        (Kind.TERMS, b"\xff\xff\x07"),  # fields that do not exist
        (Kind.KEYS, bytes(32)),  # a key without a client
        (Kind.KEYS, bytes(10)),  # a short hash
        (Kind.ASSIGNMENTS, bytes(4)),  # half a number
        (Kind.ASSIGNMENTS, bytes(8) + b"\x05"),  # more frames than there are bytes
        (Kind.ASSIGNMENTS, bytes(8) + b"\0\0\1\1\2" + bytes([Kind.PING, 0])),  # no ASSIGNMENT
        (Kind.ASSIGNMENTS, bytes(8) + b"\0\0\0\0"),  # bytes too many
        (Kind.ASSIGNMENTS, bundle_of(wire.varint(7))),  # a frame that was not sent
        (Kind.ASSIGNMENTS, bundle_of(b"\0", wire.varint(1))),
        (Kind.ASSIGNMENTS, bundle_of(b"")),  # no number
        (Kind.ASSIGNMENTS, bundle_of(b"\0\0")),  # a number with a byte too many
        (Kind.WITHDRAW, b"\1"),
        (Kind.DISCONNECT, b"\1"),
        (Kind.DISCONNECT, b"\1" + wire.encode_refused(Refused("no", False))),  # a number too few
        (Kind.DISCONNECT, b"\1\1" + wire.PING),
        (Kind.JOINED, b"\x40"),
        (Kind.JOINED, b"\1\x40"),
        (Kind.LEFT, b""),
        (Kind.ANSWERED_LATE, b"\1\1"),
        (Kind.REPORTS, b"\1\1" + wire.PING),
        (Kind.REPORTS, b"\1\5" + bytes([Kind.REPORT])),
        (Kind.LOST, b"\1\1\0"),
        (Kind.LOST, b"\1\1\0\0\0"),
    ],
)
def test_malformed_messages_are_errors(kind, data):
    with pytest.raises(ProtocolError):
        everything(bytes([kind]) + data, {0: b"f" * 50})


def test_a_reference_to_a_forgotten_frame_is_an_error(monkeypatch):
    monkeypatch.setattr(relay_wire, "CACHE_BYTES", 100)
    cache, relay = FrameCache(), RelayEnd()
    for number in range(3):
        relay.take_all(UNTIL_ALL, [(number, assignment(1, 1, [bytes([number]) * 60]))], cache)
    assert [*relay.cached] == [2]
    with pytest.raises(ProtocolError, match="refers to frame 0, which this relay does not have"):
        everything(bytes([Kind.ASSIGNMENTS]) + bundle_of(wire.varint(0)), relay.cached)
