"""Any byte string is decoded to a finite vector or raises FrameError, in memory proportional to the size of the vector."""

import tracemalloc
from collections.abc import Iterator
from functools import cache, partial

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import (
    ONE_EACH,
    PRODUCTS,
    SPECS,
    WHOLE,
    alike,
    layout_of,
    reseal,
    same_bits,
    vectors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp import FrameError, available_codecs, codec
from fedcomp.codecs.frame import LAYER, MODEL, NAMES, SECTIONS, Section, header_bytes, seal, varint

NUMELS = (0, 1, 8, 50, 401)
KINDS = ("normal", "ties", "one spike", "all scales", "zero")

specs, numels = st.sampled_from(SPECS), st.sampled_from(NUMELS)


@cache
def frame_of(spec: str, numel: int, kind: str) -> bytes:
    return codec(spec).encode(vectors(numel)[kind], layout=layout_of(numel))


frames = st.builds(
    lambda spec, numel, kind: (spec, numel, frame_of(spec, numel, kind)),
    specs,
    numels,
    st.sampled_from(KINDS),
)


def read(spec: str, data: bytes, numel: int) -> bool:
    """Return whether `data` is a valid frame. Check the decoded vector or the error."""
    c, layout, into = codec(spec), layout_of(numel), torch.linspace(-1, 1, numel)
    before = into.clone()
    try:
        c.accumulate(data, into, 0.5, layout=layout)
    except FrameError as error:
        assert str(error) and same_bits(into, before)
        with pytest.raises(FrameError):
            c.decode(data, numel=numel, layout=layout)
        return False
    y = c.decode(data, numel=numel, layout=layout)
    assert y.shape == (numel,) and y.dtype == torch.float32 and y.isfinite().all()
    assert torch.equal(into, before + np.float32(0.5) * y)
    return True


@for_each("spec", ONE_EACH)
def test_every_frame_of_these_tests_is_valid(spec):
    assert all(read(spec, frame_of(spec, numel, kind), numel) for numel in NUMELS for kind in KINDS)


@given(specs, numels, st.binary(max_size=60))
def test_random_bytes_are_rejected(spec, numel, data):
    assert not read(spec, data, numel)
    assert not read(spec, frame_of(spec, numel, "normal")[:SECTIONS] + data + b"\x01", numel)


@given(frames, st.data())
def test_flipped_bits_are_detected(frame, data):
    spec, numel, original = frame
    changed = bytearray(original)
    for bit in data.draw(st.sets(st.integers(0, 8 * len(original) - 1), min_size=1, max_size=5)):
        changed[bit // 8] ^= 1 << bit % 8
    assert not read(spec, bytes(changed), numel)


@given(frames, st.data())
def test_a_truncated_frame_is_detected_with_any_checksum(frame, data):
    spec, numel, original = frame
    cut = original[: data.draw(st.integers(0, len(original) - 1))]
    assert not read(spec, cut, numel)
    assert len(cut) < SECTIONS or not read(spec, reseal(cut, numel), numel)


@given(frames, st.binary(min_size=1, max_size=20), frames)
def test_trailing_bytes_are_detected_with_any_checksum(frame, tail, other):
    spec, numel, original = frame
    for longer in (
        original + tail,
        original + bytes(len(tail)),
        original + original,
        original + other[2],
        original + other[2][SECTIONS:],
    ):
        assert not read(spec, longer, numel) or longer == original
        assert not read(spec, reseal(longer, numel), numel)


@given(frames, st.integers(0, 500))
def test_a_frame_of_another_size_is_detected(frame, numel):
    spec, made_for, original = frame
    assert read(spec, original, numel) == (numel == made_for)
    read(spec, reseal(original, numel), numel)


@given(frames, specs, st.integers(0, 255))
def test_a_frame_of_another_codec_is_detected(frame, other, number):
    spec, numel, original = frame
    assert read(other, original, numel) == alike(other, spec)
    swapped = reseal(original[:3] + bytes([number]) + original[4:], numel)
    assert read(spec, swapped, numel) == (number == codec(spec).id)
    read(other, reseal(original[:3] + bytes([codec(other).id]) + original[4:], numel), numel)


@given(specs, numels, st.integers(0, 500), st.binary(max_size=120))
def test_any_body_with_a_valid_checksum_is_decoded_or_rejected(spec, numel, count, body):
    read(spec, seal(codec(spec).id, MODEL, numel, [Section(count, body)]), numel)


@given(specs, numels, st.lists(st.tuples(st.integers(0, 12), st.binary(max_size=40)), max_size=5))
def test_any_layers_with_a_valid_checksum_are_decoded_or_rejected(spec, numel, sections):
    read(
        spec, seal(codec(spec).id, LAYER, numel, [Section(*section) for section in sections]), numel
    )


@settings(max_examples=150)
@given(frames, st.data())
def test_any_change_with_a_valid_checksum_is_decoded_or_rejected(frame, data):
    """Bytes are replaced, inserted or deleted. The checksum is correct, so only the checks of the codec can detect the change."""
    spec, numel, original = frame
    at = data.draw(st.integers(4, len(original)))
    new, kept = data.draw(st.binary(max_size=3)), data.draw(st.integers(0, 3))
    read(
        spec,
        reseal((original[:at] + new + original[at + kept :]).ljust(SECTIONS, b"\0"), numel),
        numel,
    )


@given(
    frames,
    st.integers(0, 2**64) | st.sampled_from([2**31 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]),
)
def test_a_wrong_count_is_detected(frame, count):
    spec, numel, original = frame
    start = header_bytes(codec(spec).id, codec(spec).seeded)
    if not spec.endswith("@layer") and numel and original[start] < 0x80:
        changed = original[:start] + varint(count) + original[start + 1 :]
        assert not read(spec, reseal(changed, numel), numel) or count <= numel


@for_each("spec", ["identity", "fp16"])
@for_each("count", [0, 40, 49, 51])
def test_a_dense_frame_must_count_every_coordinate(spec, count):
    frame = frame_of(spec, 50, "normal")
    assert frame[SECTIONS] == 50
    assert not read(spec, reseal(frame[:SECTIONS] + bytes([count]) + frame[SECTIONS + 1 :], 50), 50)


@for_each("value", [np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0])
@for_each("spec", ["stc", "sbc"])
def test_an_invalid_mean_is_rejected(spec, value):
    frame = frame_of(spec, 401, "normal")
    start = SECTIONS + 2  # count, first byte
    assert not read(
        spec,
        reseal(frame[:start] + np.array(value, "<f4").tobytes() + frame[start + 4 :], 401),
        401,
    )


@for_each("spec", ["stc", "sbc", "topk", "topk:values=fp16"])
def test_unknown_flags_are_rejected(spec):
    frame = frame_of(spec, 401, "normal")
    for flag in (2, 3) if spec != "stc" else (1, 2, 3):
        changed = bytearray(frame)
        changed[SECTIONS + 1] = changed[SECTIONS + 1] & 0x3F | flag << 6
        assert not read(spec, reseal(bytes(changed), 401), 401)


# Checks that every decoder needs.


NUMEL = 9
# A number of coordinates that gives frames with padding bits, because values of 1 to 4 bits do not fill the last byte.
LONG = 73
NOT_FINITE = [
    np.array(value, dtype).tobytes() for dtype in ("<f4", "<f2") for value in (np.nan, np.inf)
]
HUGE = [varint(10**7), varint(2**62), (10**7).to_bytes(4, "little")]
# Codecs without a sketch. In a sketch, a single cell may have no effect, because coordinates are medians of several cells.
NOT_SKETCHES = [
    spec for spec in (*available_codecs(), *PRODUCTS) if not {"sketch", "s2"} & {*spec.split("+")}
]


def decoded(spec: str, data: bytes, numel: int = NUMEL) -> torch.Tensor | None:
    """Return the decoded vector [numel], or None if the frame is rejected. The checksum of `data` need not match."""
    try:
        update = codec(spec).open(reseal(data, numel), numel, layout_of(numel))
    except FrameError:
        return None
    y, positions = update.dense(), update.positions
    assert y.shape == (numel,) and y.isfinite().all(), "a value is NaN or infinite"
    if positions is not None:
        assert np.all(np.diff(positions, prepend=-1, append=numel) > 0), "a position is invalid"
    return y


def places(spec: str, frame: bytes) -> list[int]:
    """Return the indices of bytes in the sections of a frame: the first 32, the last 8, and every fifth in between."""
    start, stop = sections_start(spec), len(frame)
    return [at for at in range(start, stop) if at < start + 32 or at >= stop - 8 or at % 5 == 0]


def changed_frames(spec: str, changes: list[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield an index of a byte in the sections of a frame, and the frame with one of `changes` at this index."""
    frame = frame_of(spec, NUMEL, "normal")
    for at in places(spec, frame):
        for new in changes:
            yield at, (frame[:at] + new + frame[at + len(new) :])[: len(frame)]


def sections_start(spec: str) -> int:
    return header_bytes(codec(spec).id, codec(spec).seeded)


@for_each("spec", WHOLE)
def test_nan_and_infinity_are_not_decoded(spec):
    for _, data in changed_frames(spec, NOT_FINITE):
        decoded(spec, data)


@for_each("spec", NOT_SKETCHES)
def test_no_bit_is_ignored(spec):
    """A frame with a changed bit, such as a padding bit that is not 0, is invalid or is decoded to another vector."""
    frame = frame_of(spec, LONG, "normal")
    y = decoded(spec, frame, LONG)
    for at in places(spec, frame):
        for bit in range(8):
            data = frame[:at] + bytes([frame[at] ^ 1 << bit]) + frame[at + 1 :]
            found = decoded(spec, data, LONG)
            assert found is None or not same_bits(found, y), f"bit {bit} of byte {at} has no effect"


@for_each("spec", SPECS)
def test_one_byte_more_or_less_is_rejected(spec):
    frame = frame_of(spec, NUMEL, "normal")
    for data in (frame[:-1], *(frame + bytes([byte]) for byte in (0, 1, 0x80, 0xFF))):
        assert decoded(spec, data) is None


@for_each("spec", WHOLE)
def test_the_coordinate_count_is_not_ignored(spec):
    frame = frame_of(spec, NUMEL, "normal")
    y, start = decoded(spec, frame), sections_start(spec)
    for count in {*range(NUMEL + 1), 127} - {frame[start]}:
        found = decoded(spec, frame[:start] + bytes([count]) + frame[start + 1 :])
        assert found is None or not same_bits(found, y), f"the count {count} is ignored"


def peak(call) -> int:
    """Return the peak of allocated bytes while `call` runs."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@for_each("spec", ONE_EACH)
def test_claimed_sizes_are_not_allocated(spec):
    numel, c = 10**6, codec(spec)
    layout = layout_of(numel)

    def refuse(data: bytes) -> None:
        with pytest.raises(FrameError):
            c.open(data, numel, layout)

    for count, limit in [
        (numel, 8 * numel),
        (numel + 1, 200_000),
        (2**40, 200_000),
        (2**62, 200_000),
    ]:
        for first in (0, 40, 0x3F, 0x40, 0x80 + 30, 0xFF):
            body = bytes([first]) + bytes(range(1, 200))
            section = varint(count) + body
            for scope, length in [
                (MODEL, b""),
                (LAYER, varint(len(section))),
                (LAYER, varint(2**62)),
            ]:
                head = (
                    b"fc\x01"
                    + bytes([c.id, scope])
                    + bytes(4)
                    + getattr(c.id, "halves", b"")
                    + bytes(8 * c.seeded)
                )
                sealed = reseal(head + length + section, numel)
                call = partial(refuse, sealed)
                assert peak(call) < limit or peak(call) < limit  # the first call may load modules


@for_each("spec", ONE_EACH)
def test_huge_numbers_in_a_body_are_not_allocated(spec):
    for at, data in changed_frames(spec, HUGE):
        call = partial(decoded, spec, data)
        assert peak(call) < 200_000 or peak(call) < 200_000, f"for a huge number at byte {at}"


@for_each("spec", ONE_EACH)
def test_decoding_needs_memory_proportional_to_numel(spec):
    numel, c = 25_000, codec(spec)
    layout, x = layout_of(numel), torch.randn(numel, generator=torch.Generator().manual_seed(1))
    frame = c.encode(x, layout=layout)
    c.accumulate(frame, x, layout=layout)  # loads all modules
    assert peak(lambda: c.decode(frame, numel=numel, layout=layout)) < 80 * numel + 100_000
    assert peak(lambda: c.accumulate(frame, x, layout=layout)) < 80 * numel + 100_000


def test_unknown_ids_are_rejected():
    for number in set(range(256)) - NAMES.keys():
        assert not read("stc", reseal(b"fc\x01" + bytes([number, 0]) + bytes(4) + b"\x00", 50), 50)
