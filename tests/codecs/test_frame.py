"""Frames byte by byte, as docs/reference/frame-format.md specifies them, and the size of frames."""

import math
import struct
import zlib

import pytest
import torch
from cases import for_each
from every_codec import ONE_EACH, SPECS, WHOLE, layout_of, reseal, vectors
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import FrameError, Layout, codec
from fedcomp.codecs.frame import (
    LAYER,
    MODEL,
    Section,
    read_varint,
    seal,
    unseal,
    varint,
)
from fedcomp.messages import in_process

STC, TOPK = codec("stc").id, codec("topk").id


def test_only_frames_that_stay_in_the_process_skip_the_checksum():
    made = codec("identity").encode(torch.ones(3))
    damaged = made[:5] + bytes(4) + made[9:]
    with in_process():
        assert codec("identity").decode(damaged, numel=3).tolist() == [1, 1, 1]
        with pytest.raises(FrameError):
            codec("identity").decode(made[:-1], numel=3)
    with pytest.raises(FrameError, match="checksum"):
        codec("identity").decode(damaged, numel=3)


def test_a_frame_byte_by_byte():
    head, size, sections = b"fc\x01\x04\x00", struct.pack("<Q", 1000), b"\xac\x02body"
    frame = seal(STC, MODEL, 1000, [Section(300, b"body")])
    assert frame == head + struct.pack("<I", zlib.crc32(head + size + sections)) + sections


def test_a_frame_by_layers_byte_by_byte():
    layout = Layout.from_shapes({"w": (20, 40), "none": (0,), "b": (200,)})
    head, size, sections = (
        b"fc\x01\x03\x01",
        struct.pack("<Q", 1000),
        b"\x06\xac\x02body" + b"\x01\x00" + b"\x03\x07de",
    )
    frame = seal(TOPK, LAYER, 1000, [Section(300, b"body"), Section(0, b""), Section(7, b"de")])
    assert frame == head + struct.pack("<I", zlib.crc32(head + size + sections)) + sections
    w, none, b = layout
    assert unseal(frame, TOPK, 1000, layout) == (
        0,
        [(w, (300, b"body")), (none, (0, b"")), (b, (7, b"de"))],
    )


def test_the_seed_precedes_the_sections():
    plain, seeded = (seal(STC, MODEL, 1000, [Section(300, b"body")], seed) for seed in (None, -2))
    assert seeded == reseal(plain[:9] + b"\xfe" + b"\xff" * 7 + plain[9:], 1000)
    assert unseal(seeded, STC, 1000, None, True) == (
        2**64 - 2,
        unseal(plain, STC, 1000)[1],
    )
    with pytest.raises(FrameError, match="the seed is incomplete"):
        unseal(plain, STC, 1000, None, True)


def test_reseal_computes_the_checksum_of_a_frame():
    for spec in ONE_EACH:
        frame = codec(spec).encode(vectors(401)["normal"], layout=layout_of(401))
        assert reseal(frame, 401) == frame != reseal(frame, 402)


@given(st.integers(0, 2**63 - 1), st.binary(max_size=3))
def test_varints_have_their_documented_bytes(value, tail):
    data = varint(value)
    assert len(data) == max(1, math.ceil(value.bit_length() / 7))
    assert read_varint(memoryview(data + tail)) == (value, len(data))


@for_each(
    "data",
    [b"", b"\x80", b"\xff" * 8, b"\x80\x00", b"\xac\x82\x00", varint(2**63), b"\xff" * 9 + b"\x01"],
)
def test_invalid_varints_are_rejected(data):
    with pytest.raises(FrameError, match="an integer is"):
        read_varint(memoryview(data))


@for_each(
    "change, sentence",
    [
        (lambda f: b"", "0 bytes are too short"),
        (lambda f: f[:8], "8 bytes are too short"),
        (lambda f: b"FC" + f[2:], "magic"),
        (lambda f: f[:2] + b"\x02" + f[3:], "does not know frame format 2"),
        (
            lambda f: f[:3] + b"\x03" + f[4:],
            "encoded with the codec topk, but is decoded with the codec stc",
        ),
        (
            lambda f: f[:3] + b"\x63" + f[4:],
            "encoded with the codec number 99, but is decoded with the codec stc",
        ),
        (lambda f: f[:-1] + bytes([f[-1] ^ 1]), "checksum"),
        (
            lambda f: reseal(f[:4] + b"\x02" + f[5:], 401),
            "the frame has the scope @chunk, but the codec that decodes it has no @chunk",
        ),
        (lambda f: reseal(f[:4] + b"\x03" + f[5:], 401), "the scope 3 is unknown"),
        (
            lambda f: reseal(f[:9] + varint(402) + f[10:], 401),
            "402 coordinates are encoded, but the vector has 401",
        ),
        (
            lambda f: reseal(f[:9] + b"\x00" + f[10:], 401),
            "bytes follow the coordinate count, although it is 0",
        ),
    ],
)
def test_errors_name_the_problem(change, sentence):
    c = codec("stc")
    frame = c.encode(vectors(401)["normal"])
    with pytest.raises(FrameError, match=sentence):
        c.decode(change(frame), numel=401)


@for_each("spec", ONE_EACH)
def test_a_layout_of_another_size_is_refused(spec):
    frame = codec(spec).encode(vectors(401)["normal"], layout=layout_of(401))
    into = torch.ones(401)
    with pytest.raises(FrameError, match="the layout has 400 elements, but the vector has 401"):
        codec(spec).accumulate(frame, into, layout=layout_of(400))
    assert torch.equal(into, torch.ones(401))


def test_a_frame_by_layers_needs_its_own_layout():
    c, x = codec("stc@layer"), vectors(401)["normal"]
    frame = c.encode(x, layout=layout_of(401))
    with pytest.raises(FrameError, match="without the shapes of the tensors"):
        c.decode(frame, numel=401)
    with pytest.raises(FrameError, match="follow the data of the last tensor"):
        c.decode(frame, numel=401, layout=Layout.flat(401))
    with pytest.raises(FrameError, match=r"\(tensor 'a'; give the layout of the sender's model\)"):
        c.decode(
            frame,
            numel=401,
            layout=Layout.from_shapes(
                {"a": (1,), "b": (200,), "c": (100,), "d": (100,), "e": (0,)}
            ),
        )


@for_each("spec", SPECS)
def test_the_overhead_of_a_frame_is_at_most_24_bytes_and_8_per_layer(spec):
    c, sizes = codec(spec), (1, 50, *([0, 20_000] if spec in ONE_EACH else []))
    for x in (v for n in sizes for v in (vectors(n)["normal"], torch.zeros(n))):
        numel = len(x)
        layout = layout_of(numel)
        frame = c.encode(x, layout=layout)
        _, sections = c._unseal(frame, numel, layout)
        bodies = sum(len(section.body) for _, section in sections)
        assert len(frame) - bodies <= (24 + 8 * len(layout) if spec.endswith("@layer") else 24)


@for_each("spec, numel, bytes_each", [("identity", 20_000, 4), ("fp16", 20_000, 2)])
def test_a_dense_frame_holds_its_values_as_float32(spec, numel, bytes_each):
    assert 0 <= len(codec(spec).encode(torch.ones(numel))) - bytes_each * numel <= 24


@for_each("spec", [s for s in WHOLE if codec(s).name in ("topk", "stc", "sbc")])
def test_a_sparse_frame_of_zeros_is_only_a_header(spec):
    assert len(codec(spec).encode(torch.zeros(10**6))) <= 24


def log2_binomial(n: int, k: int) -> float:
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


@for_each("density", ["1/25", "1/100", "1/400", "1/1000"])
@for_each("name, sign_bits", [("stc", 1), ("sbc", 0)])
def test_the_size_of_a_million_coordinates_is_near_their_entropy(name, sign_bits, density):
    """The Rice code of positions is within 1 % of log₂ of the number of ways to choose k of n positions."""
    n, x = 10**6, torch.randn(10**6, generator=torch.Generator().manual_seed(1))
    c = codec(f"{name}:density={density}")
    k = round(n * c.density)
    assert len(c.encode(x)) <= (log2_binomial(n, k) + sign_bits * k + 32) / 8 * 1.01 + 24
