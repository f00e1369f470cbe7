"""Codecs that send matrices as factors: their sections, decoding, and values that exceed float32."""

import struct

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import reseal, same_bits
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import FrameError, Layout, codec
from fedcomp.codecs.frame import SECTIONS, varint
from fedcomp.codecs.levels import LARGEST
from fedcomp.codecs.matrices import CHUNK, LowRankUpdate, shape_of
from fedcomp.errors import ConfigError

LAYOUT = Layout.from_shapes(
    {"w": (20, 30), "none": (0, 5), "kernel": (8, 4, 3, 3), "b": (7,), "row": (1, 9), "one": ()}
)
SPECS = [
    "powersgd",
    "powersgd:rank=4",
    "atomo",
    "atomo:budget=10%",
    "atomo:atoms=entries",
    "atomo:budget=10%,atoms=entries",
]
BODY = SECTIONS + len(varint(LAYOUT.numel))


def normal(numel: int = LAYOUT.numel, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def sealed(body: bytes, name: str = "powersgd", layout: Layout = LAYOUT) -> bytes:
    head = b"fc\x01" + bytes([codec(name).id, 0]) + bytes(4)
    return reseal(head + varint(layout.numel) + body, layout.numel)


def floats(values) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def test_a_tensor_is_a_matrix_with_its_first_dimension_as_rows():
    assert [shape_of(e) for e in LAYOUT] == [(20, 30), (0, 5), (8, 36), None, (1, 9), None]


def test_a_kernel_is_sent_as_its_matrix():
    flat = Layout.from_shapes({"m": (8, 36)})
    kernel = Layout.from_shapes({"m": (8, 4, 3, 3)})
    for spec in SPECS:
        assert codec(spec).encode(normal(288), seed=4, layout=kernel) == codec(spec).encode(
            normal(288), seed=4, layout=flat
        )


def test_the_body_has_factors_and_values_in_order():
    frame = codec("powersgd").encode(normal(), layout=LAYOUT)
    lengths = [1 + 4 * 2 * (20 + 30), 1 + 4 * 2 * (8 + 36), 4 * 7, 1 + 4 * 9, 4]
    assert len(frame) == BODY + sum(lengths)
    starts = BODY + np.cumsum([0, *lengths])
    assert [frame[at] for at in starts[[0, 1, 3]]] == [2, 2, 255]
    assert frame[starts[2] : starts[3]] == floats(normal()[888:895])
    left = np.frombuffer(frame[BODY + 1 :], "<f4", 40).reshape(20, 2)
    np.testing.assert_allclose(left.T @ left, np.eye(2), atol=1e-6)
    right = np.frombuffer(frame[BODY + 161 :], "<f4", 60).reshape(30, 2)
    sent = codec("powersgd").decode(frame, numel=LAYOUT.numel, layout=LAYOUT)
    np.testing.assert_allclose(sent[:600].reshape(20, 30), left @ right.T, atol=1e-6)


@for_each("spec", ["powersgd", "atomo"])
def test_a_matrix_of_zeros_is_encoded_as_one_byte(spec):
    x = normal()
    x[:600] = -0.0
    zeroed, whole = (len(codec(spec).encode(v, layout=LAYOUT)) for v in (x, normal()))
    columns = 2 if spec == "powersgd" else 3
    assert zeroed == whole - 4 * columns * 50
    assert (
        not codec(spec)
        .decode(codec(spec).encode(x, layout=LAYOUT), numel=LAYOUT.numel, layout=LAYOUT)[:600]
        .any()
    )


def test_a_product_is_the_same_in_any_blocks():
    rng = np.random.default_rng(1)
    for rows, columns, k in [(20, 30, 3), (3, CHUNK, 2), (CHUNK // 5, 11, 1), (4, 4, 0)]:
        product = LowRankUpdate(
            *(rng.standard_normal((n, k)).astype(np.float32) for n in (rows, columns))
        )
        whole = product.block(0, product.numel)
        assert whole.dtype == np.float32 and product.numel == rows * columns == product.nonzeros
        np.testing.assert_allclose(
            whole.reshape(rows, columns), product.left @ product.right.T, atol=1e-5
        )
        for start, stop in [
            (0, 0),
            (0, 1),
            (7, 7),
            (columns - 1, columns + 1),
            (5, product.numel - 3),
            (product.numel, product.numel),
        ]:
            assert same_bits(product.block(start, stop), whole[start:stop])


def test_a_product_is_clipped_to_float32():
    product = LowRankUpdate(np.full((2, 2), 0.9, np.float32), np.full((3, 2), 3e38, np.float32))
    assert (product.block(0, 6) == np.float32(LARGEST)).all()


@for_each("spec", SPECS)
@for_each("scale", [2.0**-149, 1e-42, 1e-36, 1e-30, 1e30, 3e38])
def test_matrices_whose_factors_exceed_float32_are_sent_as_values(spec, scale):
    c = codec(spec)
    x = ((1 + 0.1 * normal().double().clamp(-1, 1)) * scale).float()
    y = c.decode(c.encode(x, seed=2, layout=LAYOUT), numel=LAYOUT.numel, layout=LAYOUT)
    assert y.isfinite().all()
    if c.name == "powersgd" or c.atoms == "singular":
        assert same_bits(y[:600], x[:600]) == (not 1e-30 <= scale <= 1e30)
    if c.contraction(1) is not None:
        assert (x.double() - y).square().sum() <= x.double().square().sum() * (1 + 1e-7)


@for_each("spec", ["powersgd", "atomo", "atomo:budget=10%"])
def test_encoding_and_decoding_need_shapes(spec):
    c, x = codec(spec), normal()
    frame = c.encode(x, layout=LAYOUT)
    for call in (
        lambda: c.encode(x),
        lambda: c.encode_batch(x[None], [0]),
        lambda: c.decode(frame, numel=x.numel()),
        lambda: c.accumulate(frame, x.clone()),
    ):
        with pytest.raises(
            ConfigError,
            match=f"{c} needs the shapes of the tensors; give layout=fedcomp.Layout.of\\(model\\), or use a codec for vectors",
        ):
            call()


def test_entries_need_no_shapes():
    c, x = codec("atomo:atoms=entries"), normal()
    assert c.encode(x) == c.encode(x, layout=LAYOUT)
    assert same_bits(
        c.decode(c.encode(x), numel=x.numel()),
        c.decode(c.encode(x), numel=x.numel(), layout=LAYOUT),
    )


def test_layerwise_frames_have_the_same_factors():
    layer, model = codec("atomo@layer"), codec("atomo")
    alone = Layout.from_shapes({"w": (20, 30)})
    x = normal(600)
    y = layer.decode(layer.encode(x, seed=5, layout=alone), numel=600, layout=alone)
    assert same_bits(
        y, model.decode(model.encode(x, seed=5, layout=alone), numel=600, layout=alone)
    )


# Sections that no encoder makes.

SQUARE = Layout.from_shapes({"w": (6, 6)})
UNIT = np.eye(6, 2)


@for_each(
    "body, sentence",
    [
        (b"", "encoded values end too early"),
        (b"\x02" + floats(UNIT) + floats(np.ones((6, 2)))[:-1], "encoded values end too early"),
        (b"\x02" + floats(UNIT) + floats(np.ones((6, 2))) + b"\0", "bytes follow"),
        (b"\x03" + floats(np.eye(6, 3)) + floats(np.ones((6, 3))), "not smaller than the matrix"),
        (b"\xfe" + floats(np.ones(36)), "not smaller than the matrix"),
        (b"\x02" + floats(2 * UNIT) + floats(np.ones((6, 2))), "does not have norm 1"),
        (b"\x02" + floats(0 * UNIT) + floats(np.ones((6, 2))), "does not have norm 1"),
        (
            b"\x02" + floats(UNIT) + floats(np.full((6, 2), np.nan)),
            "^damaged frame: .* NaN or infinity",
        ),
        (
            b"\x02" + floats(UNIT + np.inf) + floats(np.ones((6, 2))),
            "^damaged frame: .* NaN or infinity",
        ),
        (b"\xff" + floats(np.full(36, -np.inf)), "^damaged frame: .* NaN or infinity"),
        (b"\xff" + floats(np.ones(35)), "encoded values end too early"),
    ],
)
def test_an_invalid_body_is_rejected(body, sentence):
    c = codec("powersgd")
    with np.errstate(invalid="ignore"), pytest.raises(FrameError, match=sentence):
        c.open(sealed(body, layout=SQUARE), 36, SQUARE)
    with pytest.raises(FrameError):
        c.open(sealed(body, layout=SQUARE), 36, Layout.flat(36))
    with pytest.raises(FrameError, match=sentence):
        codec("atomo").open(sealed(b"\0" + body, "atomo", SQUARE), 36, SQUARE)


def test_factors_of_the_largest_numbers_are_read_as_finite_ones():
    body = b"\x02" + floats(np.full((6, 2), 6**-0.5)) + floats(np.full((6, 2), 3.4e38))
    y = codec("powersgd").decode(sealed(body, layout=SQUARE), numel=36, layout=SQUARE)
    assert y.isfinite().all() and float(y[0]) > 2e38


FRAMES = {spec: codec(spec).encode(normal(), seed=3, layout=LAYOUT) for spec in SPECS}


@given(st.sampled_from(SPECS), st.data())
def test_any_change_with_a_valid_checksum_is_decoded_or_rejected(spec, data):
    frame, into = FRAMES[spec], torch.linspace(-1, 1, LAYOUT.numel)
    at = data.draw(st.integers(BODY, min(len(frame), BODY + 600)) | st.integers(4, len(frame)))
    new, kept = data.draw(st.binary(max_size=4)), data.draw(st.integers(0, 4))
    changed = reseal((frame[:at] + new + frame[at + kept :]).ljust(SECTIONS, b"\0"), LAYOUT.numel)
    before = into.clone()
    try:
        codec(spec).accumulate(changed, into, 0.25, layout=LAYOUT)
    except FrameError:
        assert same_bits(into, before)
    else:
        y = codec(spec).decode(changed, numel=LAYOUT.numel, layout=LAYOUT)
        assert y.isfinite().all() and torch.equal(into, before + np.float32(0.25) * y)


@given(st.sampled_from(SPECS), st.binary(max_size=80))
def test_any_body_is_decoded_or_rejected(spec, body):
    try:
        y = codec(spec).decode(sealed(body, codec(spec).name), numel=LAYOUT.numel, layout=LAYOUT)
        assert y.isfinite().all()
    except FrameError as error:
        assert str(error)


def test_invalid_flags_and_entries_are_rejected():
    frame = FRAMES["atomo:atoms=entries"]
    for flag in (2, 3):
        changed = bytearray(frame)
        changed[SECTIONS + 1] = changed[SECTIONS + 1] & 0x3F | flag << 6
        with pytest.raises(FrameError, match="unknown format"):
            codec("atomo").open(reseal(bytes(changed), LAYOUT.numel), LAYOUT.numel, LAYOUT)
    for value, sentence in [
        (0.0, "a value is 0"),
        (-0.0, "a value is 0"),
        (np.nan, "^damaged frame: .* NaN"),
        (np.inf, "NaN"),
    ]:
        changed = frame[: SECTIONS + 2] + struct.pack("<f", value) + frame[SECTIONS + 6 :]
        with pytest.raises(FrameError, match=sentence):
            codec("atomo").open(reseal(changed, LAYOUT.numel), LAYOUT.numel, LAYOUT)
