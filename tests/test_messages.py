"""Messages are unpacked as they were packed, and other bytes are refused."""

from dataclasses import replace

import pytest
from cases import for_each
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.errors import ProtocolError
from fedcomp.messages import (
    FRAMES,
    MAX_METRICS_BYTES,
    UPDATE,
    Assignment,
    Report,
    ReportedMetrics,
    failure,
    ticket,
)
from fedcomp.transports.flower.records import MAX_CONFIG_BYTES, from_records, to_records

ASSIGNMENT = Assignment(
    3, "train", 7, FRAMES, "v0", "v2", "abc", [b"one", b"", b"three"], "", [b"scale", b"1.5"]
)
REPORT = Report(3, "train", 7, UPDATE, "v2", "abc", b"\x00frame", "t", 20, 0.5, "", "")


@for_each(
    "message",
    [ASSIGNMENT, REPORT, replace(REPORT, loss=float("inf")), replace(ASSIGNMENT, frames=[])],
)
def test_a_message_is_unpacked_as_it_was_packed(message):
    assert type(message).unpack(message.pack()) == message
    assert from_records(to_records(message), type(message)) == message


def test_large_messages_are_sent_as_arrays_that_flower_can_split():
    large = replace(REPORT, frame=bytes(MAX_CONFIG_BYTES))
    assert isinstance(to_records(large)["fedcomp"], ArrayRecord) and isinstance(
        to_records(REPORT)["fedcomp"], ConfigRecord
    )
    assert from_records(to_records(large), Report) == large


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(data):
    with pytest.raises(ProtocolError):
        Report.unpack(data)


@given(st.data())
def test_a_changed_message_is_another_message_or_an_error(data):
    packed = bytearray(REPORT.pack())
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        changed = Report.unpack(bytes(packed))
    except ProtocolError:
        return
    assert {name: type(value) for name, value in vars(changed).items()} == {
        name: type(value) for name, value in vars(REPORT).items()
    }


@for_each("cut", [0, 3, 4, 50, -1])
def test_a_message_cut_short_is_an_error(cut):
    with pytest.raises(ProtocolError):
        Assignment.unpack(ASSIGNMENT.pack()[:cut])
    with pytest.raises(ProtocolError):
        Assignment.unpack(ASSIGNMENT.pack() + b"x")


def test_a_message_of_another_kind_is_an_error():
    with pytest.raises(ProtocolError, match="same version"):
        Report.unpack(ASSIGNMENT.pack())


def test_records_of_other_apps_are_an_error():
    strange = [
        {},
        {"fedcomp": ConfigRecord({"fedcomp": "text"})},
        {"fedcomp": ConfigRecord({"other": b""})},
        {
            "fedcomp": ArrayRecord(
                {"fedcomp": Array(dtype="uint8", shape=(3,), stype="numpy.ndarray", data=b"abc")}
            )
        },
    ]
    for records in strange:
        with pytest.raises(ProtocolError, match="use fedcomp in both"):
            from_records(RecordDict(records), Report)


def test_different_proposals_have_different_tickets():
    assert ticket(1, 2, b"frame") != ticket(2, 2, b"frame") != ticket(2, 1, b"frame")
    assert failure(ASSIGNMENT, "train", "it broke").kind == "failed"


NAMES = st.text("aéß_ ", min_size=1, max_size=20)
NUMBERS = st.dictionaries(NAMES, st.floats(), max_size=64)


@given(NUMBERS, NUMBERS, st.integers(1, 1 << 53))
def test_metrics_are_unpacked_as_they_were_packed(training, evaluation, examples):
    sent = ReportedMetrics(training, evaluation, examples if evaluation else 0)
    packed = sent.pack()
    assert len(packed) <= MAX_METRICS_BYTES
    assert repr(ReportedMetrics.unpack(packed)) == repr(sent)


def test_packed_metrics_have_the_documented_bytes():
    told = ReportedMetrics({"norm": 1.25}, {"é": -2.0}, 300)
    numbers = ["01046e6f726d000000000000f43f", "02c3a900000000000000c0"]
    assert told.pack().hex() == "2c01000000000000" + "".join(numbers)


@given(st.binary(min_size=1, max_size=60))
def test_any_bytes_are_metrics_or_an_error(data):
    try:
        found = ReportedMetrics.unpack(data)
    except ProtocolError:
        return
    assert found.pack() == data


NINE = bytes(8) + b"\x01"
VALUE = bytes(8)


@for_each(
    "data",
    [
        b"\0",
        NINE,  # announces a metric that is missing
        NINE + b"\x01a" + VALUE[:-1],
        NINE + b"\0" + VALUE,
        NINE + b"\x41" + b"a" * 65 + VALUE,
        NINE + b"\x01\xff" + VALUE,
        NINE + b"\x01\n" + VALUE,
        bytes(8) + b"\x02" + 2 * (b"\x01a" + VALUE),
        bytes(8) + b"\x00" + b"\x01a" + VALUE,  # an evaluation on 0 examples
        b"\xff" * 8 + b"\x00" + b"\x01a" + VALUE,
        b"\x01" + bytes(7) + b"\x01" + b"\x01a" + VALUE,
        bytes(8) + b"\x41" + b"".join(b"\x01" + bytes([48 + i]) + VALUE for i in range(65)),
        bytes(MAX_METRICS_BYTES + 1),
    ],
)
def test_malformed_metrics_are_an_error(data):
    with pytest.raises(ProtocolError):
        ReportedMetrics.unpack(data)
