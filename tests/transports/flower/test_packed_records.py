"""Records of arrays: arrays that make up the compressed vector, and arrays that are sent uncompressed."""

import numpy as np
import pytest
import torch
from cases import for_each
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedcomp.errors import ProtocolError
from fedcomp.messages import Assignment, failure
from fedcomp.transports.flower.packed_records import ArrayLayout, Parcel
from fedcomp.transports.flower.records import from_records

ASSIGNMENT = Assignment(1, "train", 3, "dense", "", "v", "f", [b"frame"], "")


def record() -> ArrayRecord:
    return ArrayRecord(
        {
            "w": Array(np.arange(6, dtype=np.float32).reshape(2, 3)),
            "count": Array(np.array(7)),
            "half": Array(np.array([0.5, 1.5], np.float16)),
            "bn.running_var": Array(np.ones(2, np.float32)),
            "scalar": Array(np.array(3.25)),
            "blob": Array("uint8", (4,), "mine.v1", b"\x00\x01\x02\x03"),
            "empty": Array(np.empty((0, 4), np.float32)),
        }
    )


def test_float_arrays_make_up_the_vector_in_order_and_are_restored_exactly():
    layout = ArrayLayout.of(record())
    vector = layout.vector(record())
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 0.5, 1.5, 3.25]
    again = layout.record(vector, layout.uncompressed(record()))
    assert list(again) == list(record())
    for name, array in record().items():
        assert vars(again[name]) == vars(array)


def test_arrays_that_match_a_pattern_are_sent_uncompressed():
    layout = ArrayLayout.of(record(), uncompressed=("w", "sc*"))
    assert layout.uncompressed(record()).keys() == {"w", "count", "scalar", "blob"}
    assert layout.vector(record()).tolist() == [0.5, 1.5, 1, 1]


def test_a_packed_layout_is_unpacked_unchanged():
    layout = ArrayLayout.of(record())
    unpacked = ArrayLayout.unpack(layout.pack())
    assert unpacked == layout
    assert unpacked.vector_layout.fingerprint == layout.vector_layout.fingerprint


@for_each(
    "data",
    [
        b"",
        b"{",
        b"[1]",
        b'[["w",[2],"complex64"]]',
        b'[["w",[-2],"float32"]]',
        b'[["w","x","float32"]]',
        b"\xff",
    ],
)
def test_a_malformed_layout_is_refused(data):
    with pytest.raises(ProtocolError):
        ArrayLayout.unpack(data)


def test_a_parcel_replaces_a_record_and_unpacks_to_it():
    layout, config = ArrayLayout.of(record()), ConfigRecord({"lr": 0.1})
    content = Parcel.of(ASSIGNMENT, "arrays", layout.uncompressed(record())).put(
        RecordDict({"arrays": record(), "config": config}), "arrays"
    )
    assert list(content) == ["fedcomp", "config"]
    assert content["fedcomp"].count_bytes() < 1200
    parcel = from_records(content, Parcel)
    assert Assignment.unpack(parcel.message) == ASSIGNMENT
    assert {name: array.data for name, array in parcel.uncompressed.items()} == {
        n: a.data for n, a in layout.uncompressed(record()).items()
    }
    back = parcel.unpacked(content, layout.record(layout.vector(record()), parcel.uncompressed))
    assert list(back) == ["arrays", "config"] and list(back["arrays"]) == list(record())


def test_a_parcel_without_arrays_is_put_last():
    config = ConfigRecord({"lr": 0.1})
    content = Parcel.of(failure(ASSIGNMENT, "train", "no")).put(RecordDict({"config": config}), "")
    assert list(content) == ["config", "fedcomp"]
    assert list(from_records(content, Parcel).unpacked(content, None)) == ["config"]


def test_a_message_without_a_parcel_is_refused():
    with pytest.raises(ProtocolError, match="use fedcomp in both"):
        from_records(RecordDict({"arrays": record()}), Parcel)


@for_each(
    "changed",
    [
        {"count": Array(np.array([7, 8]))},
        {"count": Array("int64", (), "numpy.ndarray", b"no array")},
        {"bn.running_var": Array(np.array([1.0, np.nan], np.float32))},
        {
            "bn.running_var": Array(
                "float32", (3,), "numpy.ndarray", Array(np.ones(2, np.float32)).data
            )
        },
        {"more": Array(np.ones(1))},
    ],
)
def test_arrays_that_do_not_fit_the_model_are_refused(changed):
    layout = ArrayLayout.of(record())
    with pytest.raises(ProtocolError):
        layout.check_uncompressed(layout.uncompressed(record()) | changed)
    layout.check_uncompressed(layout.uncompressed(record()))


def test_an_array_whose_data_contradicts_its_shape_is_refused():
    layout, lying = ArrayLayout.of(record()), record()
    lying["w"] = Array("float32", (2, 3), "numpy.ndarray", Array(np.ones(5, np.float32)).data)
    assert layout.fits(lying)
    with pytest.raises(ProtocolError, match="'w'"):
        layout.vector(lying)


def test_a_vector_is_rounded_to_the_precision_of_half_precision_arrays():
    layout = ArrayLayout.of(ArrayRecord({"h": Array(np.zeros(1, np.float16))}))
    vector = torch.tensor([1 / 3])
    assert layout.as_received(vector, layout.record(vector, {})).item() == np.float16(1 / 3)
    full = ArrayLayout.of(ArrayRecord({"h": Array(np.zeros(1, np.float32))}))
    assert full.as_received(vector, full.record(vector, {})) is vector
