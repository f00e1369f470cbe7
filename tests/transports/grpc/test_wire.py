"""Encodings: decoding inverts encoding, and any bytes decode to a message or raise ProtocolError."""

import re
import zlib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from grpc_ends import INVITATION, assignment, report
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.errors import ProtocolError
from fedcomp.messages import (
    Assignment,
    Farewell,
    Invitation,
    Presence,
    Report,
    WireMessage,
    next_version,
    ticket,
)
from fedcomp.transports.grpc import Refused, wire
from fedcomp.transports.grpc.values import DEFLATED

TEXTS = (
    st.sampled_from(
        ["", "train", "update", "frames", "failed", "ab" * 16, "AB", "0", "{}", "é" * 90]
    )
    | st.text(max_size=20)
    | st.text("0123456789abcdef", max_size=40)
    | st.text("ab", min_size=100, max_size=400)
)
OF_TYPE = {
    int: st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 300),
    float: st.floats() | st.sampled_from([0.0, -0.0, 1.0]),
    str: TEXTS,
    bytes: st.binary(max_size=300),
    list[bytes]: st.lists(st.binary(max_size=50), max_size=4),
}


def values(cls: type[WireMessage]) -> st.SearchStrategy:
    return st.builds(cls, *(OF_TYPE[field.type] for field in fields(cls)))


def read(pieces: list[bytes]) -> tuple[wire.Kind, wire.Reader]:
    """Split and assemble a message. Return its kind and a reader of its body."""
    assembly = wire.Assembly(1 << 30)
    wholes = [assembly.take(message) for message in wire.split(pieces)]
    assert wholes[:-1] == [None] * (len(wholes) - 1)
    return wholes[-1]


def sent_as(kind: wire.Kind, message: WireMessage, *invitation: Invitation) -> WireMessage:
    """Encode, split, assemble and decode a message."""
    got, reader = read(wire.encode(kind, message, *invitation))
    assert got is kind
    return wire.decode(kind, reader, *invitation)


def same(one: WireMessage, other: WireMessage) -> bool:
    """Return whether two messages have equal fields of equal types. 0.0 and -0.0 are not equal."""
    return type(one) is type(other) and repr(one) == repr(other)


@given(values(Invitation), st.data())
def test_encoded_messages_about_a_run_are_decoded_unchanged(invitation, data):
    assert same(sent_as(wire.Kind.INVITATION, invitation), invitation)
    for kind, cls in ((wire.Kind.PRESENCE, Presence), (wire.Kind.FAREWELL, Farewell)):
        message = data.draw(values(cls))
        assert same(sent_as(kind, message, invitation), message)


@given(values(Assignment), st.integers(0, 1 << 40))
def test_an_encoded_assignment_is_decoded_unchanged(sent, sequence):
    _, reader = read(wire.encode_assignment(sequence, sent))
    got_sequence, got = wire.decode_assignment(reader, sent.client)
    assert got_sequence == sequence and same(got, sent)


@given(values(Report), values(Assignment), st.booleans())
def test_an_encoded_report_is_decoded_unchanged(sent, answered, usual_ticket):
    if usual_ticket:
        sent = replace(sent, ticket=ticket(sent.round, sent.client, sent.frame))
    _, reader = read(wire.encode_report(5, sent, answered))
    assert reader.varint() == 5
    assert same(wire.decode_report(reader, answered), sent)


@given(st.text(max_size=50), st.booleans())
def test_encoded_hello_and_refused_are_decoded_unchanged(text, again):
    hello = wire.Hello(7, text)
    assert wire.decode_hello(read([wire.encode_hello(hello)])[1]) == hello
    refused = Refused(text, again)
    assert wire.decode_refused(read([wire.encode_refused(refused)])[1]) == refused


@pytest.mark.parametrize(
    "size", [wire.PART_BYTES - 100, wire.PART_BYTES, wire.PART_BYTES + 1, 3 * wire.PART_BYTES + 5]
)
def test_large_frames_travel_in_parts(size):
    sent = replace(assignment(1, frames=[b"a" * size, b"", b"b" * size]), returned=b"r" * size)
    assert all(len(m) <= wire.MAX_GRPC_BYTES for m in wire.split(wire.encode_assignment(1, sent)))
    assert wire.decode_assignment(read(wire.encode_assignment(1, sent))[1], 1) == (1, sent)
    answer = report(sent, b"u" * size)
    _, reader = read(wire.encode_report(1, answer, sent))
    assert reader.varint() == 1 and wire.decode_report(reader, sent) == answer


def test_an_assignment_or_report_adds_few_bytes_to_its_frame():
    frame = b"f" * 50
    sent = assignment(3, round=120, frames=[frame])
    assert sum(map(len, wire.encode_assignment(4000, sent))) - len(frame) <= 50
    assert sum(map(len, wire.encode_report(4000, report(sent, frame), sent))) - len(frame) <= 16


def everything(data: bytes) -> None:
    """Decode bytes as the message that their first byte names, and check its types."""
    whole = wire.Assembly(1 << 20).take(data)
    if whole is None:
        return
    kind, reader = whole
    match kind:
        case wire.Kind.HELLO:
            wire.decode_hello(reader)
        case wire.Kind.REFUSED:
            wire.decode_refused(reader)
        case wire.Kind.INVITATION | wire.Kind.PRESENCE | wire.Kind.FAREWELL:
            typed(wire.decode(kind, reader, INVITATION))
        case wire.Kind.ASSIGNMENT:
            typed(wire.decode_assignment(reader, 1)[1])
        case wire.Kind.REPORT:
            reader.varint()
            typed(wire.decode_report(reader, assignment(1)))


def typed(message: WireMessage) -> None:
    """Assert that the fields of a message have exactly their declared types."""
    for field in fields(message):
        value = getattr(message, field.name)
        if field.type == list[bytes]:
            assert type(value) is list and all(type(part) is bytes for part in value)
        else:
            assert type(value) is field.type, field.name


@given(st.sampled_from([*wire.Kind]), st.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error(kind, data):
    try:
        everything(bytes([kind]) + data)
    except ProtocolError:
        pass


@given(st.data())
def test_a_changed_message_is_another_message_or_an_error(data):
    sent = replace(assignment(1), announced=[b"scale", b"1.5"], phase="other", density=0.5)
    messages = [
        wire.encode_assignment(9, sent),
        wire.encode_report(9, report(sent), assignment(1)),
        wire.encode(wire.Kind.INVITATION, INVITATION),
    ]
    packed = bytearray(b"".join(data.draw(st.sampled_from(messages))))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        everything(bytes(packed[: data.draw(st.integers(1, len(packed)))]))
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        b"",  # no kind
        b"\x63",  # an unknown kind
        bytes([wire.Kind.BEGIN]) + wire.varint(1 << 40),  # too large
        bytes([wire.Kind.BEGIN, 0]),  # an empty message in parts
        bytes([wire.Kind.PART]) + b"part",  # of nothing
        bytes([wire.Kind.PING, 0]),  # a PING with a body
        bytes([wire.Kind.FAREWELL, 0x80, 0x00]),  # a number in a longer form
        bytes([wire.Kind.FAREWELL]) + b"\xff" * 10 + b"\x01",  # a number above 64 bits
        bytes([wire.Kind.FAREWELL, 0x04]),  # a field that does not exist
        bytes([wire.Kind.FAREWELL, 0x00, 0x00]),  # bytes too many
        bytes([wire.Kind.INVITATION, 0x04, 4 << 2 | 3]) + b"junk",  # not compressed
    ],
)
def test_malformed_messages_are_errors(data):
    with pytest.raises(ProtocolError):
        everything(data)


def test_a_compressed_text_cannot_grow_beyond_its_limit():
    bomb = zlib.compress(b"a" * (8 << 20), 9, -15)
    data = bytes([wire.Kind.INVITATION, 0x04]) + wire.varint(len(bomb) << 2 | DEFLATED) + bomb
    with pytest.raises(ProtocolError):
        everything(data)


def test_a_newer_message_discards_an_unfinished_one():
    assembly = wire.Assembly(1 << 20)
    large = [*wire.split(wire.encode_assignment(1, assignment(1, frames=[b"x" * (1 << 19)])))]
    small = [*wire.split(wire.encode_assignment(2, assignment(1, 2)))]
    assert [assembly.take(message) for message in large[:-1]] == [None] * (len(large) - 1)
    assert assembly.take(wire.PING)[0] is wire.Kind.PING
    assert wire.decode_assignment(assembly.take(small[0])[1], 1) == (2, assignment(1, 2))
    with pytest.raises(ProtocolError):
        assembly.take(large[-1])


def test_a_message_has_no_more_parts_than_it_needs():
    assembly = wire.Assembly(1 << 20)
    assembly.take(bytes([wire.Kind.BEGIN]) + wire.varint(1000))
    with pytest.raises(ProtocolError, match="more parts"):
        for _ in range(1000):
            assembly.take(bytes([wire.Kind.PART, 0]))


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1])
def test_numbers_beyond_64_bits_are_not_sent(value):
    with pytest.raises(ProtocolError):
        wire.encode(wire.Kind.FAREWELL, Farewell("", value), INVITATION)


def documented(name: str) -> bytes:
    """Return the example of a message in docs/reference/wire-format.md."""
    page = Path(__file__).parents[3] / "docs" / "reference" / "wire-format.md"
    blocks = page.read_text(encoding="utf-8").split("```hex\n")[1:]
    (block,) = [block.split("```")[0] for block in blocks if name in block.splitlines()[0]]
    digits = [re.match(r"(?:[0-9a-f]{2}(?: |$))+", line)[0] for line in block.splitlines()]
    return bytes.fromhex("".join(digits))


def test_the_examples_of_the_documentation_are_real():
    assert wire.encode_hello(wire.Hello(-1, "0.2.0")) == documented("HELLO")
    base = "00112233445566778899aabbccddeeff"
    accepted = "0123456789abcdef"
    sent = Assignment(
        2, "train", 3, "frames", base, next_version(base, b"fc"), "cd" * 16, [b"fc"], accepted
    )
    sent = replace(sent, density=0.01)
    assert sent.version == "6295283d56408c1e24a09402fcd25980"
    assert b"".join(wire.encode_assignment(300, sent)) == documented("ASSIGNMENT")
    answer = replace(report(sent, b"fc\x01"), committed=accepted)
    assert answer.ticket == "18cf3a4678233aa2"
    assert b"".join(wire.encode_report(300, answer, sent)) == documented("REPORT")
