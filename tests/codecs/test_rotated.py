"""Properties of the codecs that rotate vectors, in addition to those of all codecs (test_every_codec.py)."""

import struct

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import layout_of, normal, reseal, same_bits, vectors

from fedcomp import FrameError, codec
from fedcomp.codecs import rotated
from fedcomp.codecs.frame import SECTIONS
from fedcomp.kernels import hadamard

SPECS = (
    "srq",
    "srq:levels=10",
    "vlc",
    "vlc:step=0.125",
    "drive",
    "eden:bits=3",
    "eden:bits=4,damped=true",
)
HEADS = {
    "drive": (2, 3, 4, 255),
    "eden": (1, 3, 4, 5, 255),
    "srq": (1, 3, 127, 255),
    "vlc": (2, 255),
}  # first bytes of other sections, and bytes that no section has
BODY = SECTIONS + 8 + 2  # after the seed and a count of two bytes
every_spec = pytest.mark.parametrize("spec", SPECS)


@every_spec
def test_vectors_of_every_size_and_scale_decode_to_finite_values(spec):
    c = codec(spec)
    for numel in (0, 1, 7, 401):
        for name, x in vectors(numel).items():
            for layout, scope in ((None, ""), (layout_of(numel), "@layer")):
                chosen = codec(spec + scope)
                y = chosen.decode(
                    chosen.encode(x, seed=5, layout=layout), numel=numel, layout=layout
                )
                assert y.isfinite().all() and y.shape == (numel,), (numel, name)
            if name in ("zero", "minus zero"):
                assert not y.any() and not y.signbit().any()
    assert len(c.encode(torch.empty(0))) == SECTIONS + 8 + 1


@every_spec
def test_any_block_of_an_update_can_be_decoded(spec):
    c, numel = codec(spec), 40_000
    frame = c.encode(normal(numel), seed=1)
    y, update = c.decode(frame, numel=numel).numpy(), c.open(frame, numel)
    for start, stop in [
        (0, numel),
        (5, 5),
        (16383, 16385),
        (16384, 32768),
        (39_999, numel),
        (10, 39_000),
    ]:
        assert same_bits(update.block(start, stop), y[start:stop])


@every_spec
def test_seeds_have_different_rotations(spec):
    c, x = codec(spec), normal(1001)
    frames = [c.encode(x, seed=seed) for seed in (0, 1, 2**32)]
    assert len({frame[BODY:] for frame in frames}) == 3
    y = [c.decode(frame, numel=1001) for frame in frames]
    assert not torch.equal(y[0], y[1]) and not torch.equal(y[0], y[2])


@every_spec
@pytest.mark.parametrize("scale", [3e38, 1e-25, 2.0**-99])
def test_the_error_does_not_depend_on_the_scale(spec, scale):
    c, x = codec(spec), normal(1001).clip(-1, 1)
    unscaled = c.decode(c.encode(x, seed=1), numel=1001).double()
    power = 2.0 ** np.floor(np.log2(scale))
    scaled = c.decode(c.encode(x * power, seed=1), numel=1001).double()
    assert torch.allclose(
        scaled / power,
        unscaled.clip(-3.4028234e38 / power, 3.4028234e38 / power),
        rtol=1e-6,
        atol=0,
    )


@every_spec
def test_tiny_vectors_are_sent_without_rotation(spec):
    c = codec(spec)
    for name in ("denormal", "tiny"):
        x = vectors(401)[name] * (1 if name == "denormal" else 2.0**-20)
        frame = c.encode(x, seed=1)
        assert frame[BODY] == rotated.UNROTATED and len(frame) == BODY + 1 + 4 * 401
        assert same_bits(c.decode(frame, numel=401), x)
    edge = torch.full((401,), 2.0**-100)
    assert c.encode(edge)[BODY] != rotated.UNROTATED
    assert c.encode(torch.nextafter(edge, torch.zeros(())))[BODY] == rotated.UNROTATED


# Frames that no encoder makes.


def refuses(spec: str, frame: bytes, numel: int = 401) -> None:
    with pytest.raises(FrameError):
        codec(spec).decode(reseal(frame, numel), numel=numel)


@every_spec
@pytest.mark.parametrize(
    "half", [0x7FF00000, 0x7FF80000, 0xFFF00000, 0x80000000, 0x00000001, 0x7F000000, 0x00100000]
)
def test_invalid_scales_are_refused(spec, half):
    frame = codec(spec).encode(normal(401), seed=1)
    refuses(spec, frame[: BODY + 1] + struct.pack("<I", half) + frame[BODY + 5 :])


@every_spec
def test_negative_scales_are_refused(spec):
    frame = bytearray(codec(spec).encode(normal(401), seed=1))
    frame[BODY + 4] |= 0x80
    refuses(spec, bytes(frame))


@every_spec
def test_codes_of_a_block_without_a_scale_are_refused(spec):
    frame = codec(spec).encode(normal(401), seed=1)
    refuses(spec, frame[: BODY + 1] + bytes(4) + frame[BODY + 5 :])


@for_each("spec", HEADS)
def test_another_first_byte_is_refused(spec):
    frame = codec(spec).encode(normal(401), seed=1)
    for head in (rotated.UNROTATED, *HEADS[spec]):
        refuses(spec, frame[:BODY] + bytes([head]) + frame[BODY + 1 :])


@for_each("value", [float("nan"), float("inf")])
def test_unrotated_values_that_are_not_finite_are_refused(value):
    for spec in ("srq", "vlc", "drive", "eden"):
        frame = codec(spec).encode(torch.full((401,), 2.0**-120), seed=1)
        codec(spec).decode(frame, numel=401)
        values = np.zeros(401, "<f4")
        values[7] = value
        refuses(spec, frame[: BODY + 1] + values.tobytes())
        refuses(spec, frame[:-4])


@for_each("count", [0, 128, 400])
def test_a_section_must_count_every_coordinate(count):
    for spec in ("srq", "vlc", "drive", "eden"):
        frame = codec(spec).encode(normal(401), seed=1)
        refuses(spec, frame[: BODY - 2] + bytes([count & 0x7F | 0x80, count >> 7]) + frame[BODY:])


def test_frames_with_the_largest_scales_decode_to_finite_values():
    largest = struct.pack("<d", rotated.MAX_SCALE)[4:]
    for spec, numbers in [("drive", 1), ("eden:bits=4", 1), ("srq", 2), ("vlc", 1)]:
        frame, count = (
            codec(spec).encode(normal(401), seed=1),
            numbers * (hadamard.edges(401).size - 1),
        )
        changed = frame[: BODY + 1] + count * largest + frame[BODY + 1 + 4 * count :]
        y = codec(spec).decode(reseal(changed, 401), numel=401)
        assert y.isfinite().all() and float(y.abs().max()) > 3.4e38


def test_an_opened_frame_stays_compressed_in_memory():
    numel = 50_000
    update = codec("drive").open(codec("drive").encode(normal(numel), seed=1), numel)
    held = update.codes.args[0].nbytes + update.scale.nbytes + update.shift.nbytes
    assert held < numel / 8 * 1.02 + 200 and update.positions is None and update.nonzeros == numel
