"""The encoding of levels: packed or entropy-coded symbols, and multiples of a unit."""

import itertools
import math
from contextlib import suppress

import numpy as np
import pytest
from cases import for_each
from every_codec import layout_of, normal, vectors
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import codec
from fedcomp.codecs import levels, longest_frame
from fedcomp.codecs.frame import Section, varint
from fedcomp.errors import FrameError
from fedcomp.kernels import range_coder

SIZES = (2, 3, 5, 17, 33, 255, 256, 257, 4093, 5001, 65535)


def draw(count: int, size: int, power: float = 1.0) -> np.ndarray:
    """Return random symbols below `size`. A higher power gives more small symbols."""
    drawn = np.random.default_rng(count).random(count) ** power * size
    return drawn.astype(np.uint8 if size <= 256 else np.uint16)


@for_each("size", SIZES)
def test_symbols_are_unpacked_as_packed(size):
    for count, power in itertools.product((1, 2, 7, 40, 1000), (1.0, 9.0)):
        symbols = draw(count, size, power)
        data = levels.pack(symbols, size)
        assert np.array_equal(levels.unpack(memoryview(data), count, size), symbols)
        assert len(data) <= levels.packed_bytes(count, size)


@for_each(
    "size, bits",
    [(2, 1), (3, 1.6), (5, 64 / 27), (9, 3.2), (16, 4), (17, 64 / 15), (33, 64 / 12), (256, 8)],
)
def test_uniform_symbols_are_packed_into_words(size, bits):
    for count in (10, 100, 300):
        assert len(levels.pack(draw(count, size), size)) <= math.ceil(count * bits / 8) + 1


@given(st.data())
def test_short_sequences_of_any_alphabet_are_unpacked_as_packed(data):
    size = data.draw(st.integers(2, 65535))
    symbols = np.array(
        data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=70)),
        np.uint8 if size <= 256 else np.uint16,
    )
    packed = levels.pack(symbols, size)
    assert np.array_equal(levels.unpack(memoryview(packed), symbols.size, size), symbols)
    for damaged in (packed + b"\0", packed[:-1]):
        with suppress(FrameError):  # or the bytes are the valid form of other symbols
            other = levels.unpack(memoryview(damaged), symbols.size, size)
            assert levels.pack(other, size) == damaged and not np.array_equal(other, symbols)


@given(st.integers(2, 5001), st.integers(1, 60), st.binary(max_size=100))
def test_any_bytes_are_rejected_or_encode_back_to_themselves(size, count, data):
    try:
        symbols = levels.unpack(memoryview(data), count, size)
    except FrameError:
        return
    symbols = symbols.astype(np.uint8 if size <= 256 else np.uint16)
    assert symbols.size == count and symbols.max() < size and levels.pack(symbols, size) == data


@given(st.integers(2, 300), st.integers(1, 60), st.data())
def test_packed_symbols_out_of_range_are_rejected(size, count, data):
    length = levels.packed_bytes(count, size)
    raw = data.draw(st.binary(min_size=length, max_size=length))
    try:
        symbols = levels.unpack(memoryview(raw), count, size)
    except FrameError:
        return
    assert symbols.max() < size and levels._packed(symbols, size) == raw


def test_packed_symbols_are_rejected_if_coding_is_shorter():
    symbols = np.zeros(1000, np.uint8)
    assert len(levels.pack(symbols, 3)) == 3
    with pytest.raises(FrameError, match="although entropy coding is shorter"):
        levels.unpack(memoryview(levels._packed(symbols, 3)), 1000, 3)


def test_coded_symbols_are_rejected_if_not_shorter():
    symbols = draw(40, 256)
    assert len(levels.pack(symbols, 256)) == 40
    with pytest.raises(FrameError):
        levels.unpack(memoryview(range_coder.encode(symbols, 256)), 40, 256)


@given(st.integers(2, 256), st.integers(0, 100), st.integers(1, 8))
def test_symbols_are_joined_and_split_as_digits(size, count, width):
    dtype = next(
        np.dtype(t) for t in ("u1", "u2", "u4", "u8") if size < 256 ** np.dtype(t).itemsize
    )
    width = min(width, int(8 * dtype.itemsize / math.log2(size)))
    symbols = draw(count, size)
    integers = levels.join(symbols, size, width, dtype)
    padded = np.append(symbols, np.zeros(-count % width, np.int64)).reshape(-1, width)
    assert integers.dtype == dtype and integers.tolist() == [
        sum(int(d) * size**j for j, d in enumerate(row)) for row in padded
    ]
    read, rest = levels.split(integers, size, width)
    assert np.array_equal(read, padded.ravel()) and not rest.any()


def test_as_many_symbols_as_possible_are_combined_before_coding():
    long, sizes = levels.MIN_GROUPED, (2, 3, 4, 5, 6, 7, 15, 16, 17, 256)
    assert [levels._group_width(long, size) for size in sizes] == [8, 5, 4, 3, 3, 2, 2, 2, 1, 1]
    assert levels._group_width(long - 1, 2) == 1


@for_each("padding", [0, 1, 2])
def test_combined_symbols_are_rejected_if_their_padding_is_not_zero(padding):
    symbols = np.append(draw(levels.MIN_GROUPED + 1, 3, 4.0), [0, 0, padding]).astype(np.uint8)
    count = symbols.size - 3
    data = range_coder.encode(levels.join(symbols, 3, 5, levels.BYTE), 243)
    if not padding:
        assert levels.pack(symbols[:count], 3) == data
    else:
        with pytest.raises(FrameError, match="padding of the last entropy-coded symbol"):
            levels.unpack(memoryview(data), count, 3)


@for_each("size", [3, 9, 17])
def test_long_sequences_are_coded_in_groups_near_their_entropy(size):
    count = levels.MIN_GROUPED + 3
    symbols = draw(count, size, 4.0)
    data = levels.pack(symbols, size)
    shares = np.bincount(symbols) / count
    assert len(data) <= 1.01 * count / 8 * -(shares * np.log2(shares)).sum() + 100
    assert np.array_equal(levels.unpack(memoryview(data), count, size), symbols)
    for changed in (data[:-1], data + b"\0", data[:3000] + bytes([data[3000] ^ 1]) + data[3001:]):
        with pytest.raises(FrameError):
            levels.unpack(memoryview(changed), count, size)


# Multiples of a unit.


@for_each("kind", [np.int8, np.int16])
@for_each("integers", [[1], [0, 0, 1], [-127, 5, 127], [-3, -3], [-127, 126, 0]])
def test_multiples_are_unpacked_as_packed(kind, integers):
    section = levels.pack_multiples(np.array(integers, kind), 0.375)
    symbols, most, unit = levels.unpack_multiples(section)
    assert (
        (symbols.astype(int) - most).tolist() == integers
        and unit == 0.375
        and most == max(map(abs, integers))
    )
    assert levels.open_multiples(section).values.tolist() == [0.375 * i for i in integers]


def test_equal_integers_of_any_width_are_packed_as_the_same_bytes():
    for integers in ([1, 0, -1], [100, -127, 3]):
        assert levels.pack_multiples(np.array(integers, np.int8), 2.0) == levels.pack_multiples(
            np.array(integers, np.int16), 2.0
        )
    wide = np.array([-levels.MAX_MULTIPLE, 128, levels.MAX_MULTIPLE], np.int16)
    symbols, most, _ = levels.unpack_multiples(levels.pack_multiples(wide.copy(), 1.0))
    assert (symbols.astype(int) - most).tolist() == wide.tolist()


def test_zeros_are_packed_as_one_byte():
    zeros = levels.pack_multiples(np.zeros(1000, np.int8), 1.0)
    assert zeros == Section(1000, b"\0") and not levels.open_multiples(zeros).values.any()


@for_each(
    "most, unit",
    [
        (1, 0.0),
        (1, -1.0),
        (1, math.nan),
        (1, math.inf),
        (2, 3e38),
        (32768, 1.0),
        (2, 1.0),
        (0, 1.0),
        (2**40, 1.0),
    ],
)
def test_an_invalid_unit_or_largest_level_is_rejected(most, unit):
    data = (
        varint(most)
        + levels.UNIT.pack(unit)
        + levels.pack(np.array([1, 2, 1, 2], np.uint8), 3 if most < 2 else 5)
    )
    with pytest.raises(FrameError):
        levels.open_multiples(Section(4, data))


@for_each(
    "value, float32",
    [
        (1.0, 1.0),
        (0.1, np.nextafter(np.float32(0.1), np.float32(0))),
        (1e300, np.finfo(np.float32).max),
        (1e-300, 2.0**-149),
        (2.9 * 2.0**-149, 2 * 2.0**-149),
    ],
)
def test_round_down_returns_the_next_smaller_float32(value, float32):
    assert levels.round_down(value) == float(float32)


# Codecs that send levels.


QUANTIZERS = (
    "qsgd",
    "qsgd:levels=1",
    "qsgd:levels=1000,damped=true",
    "terngrad",
    "terngrad:clip=0",
    "natural",
    "bf16",
    "adaptive",
    "adaptive:levels=200,rounding=stochastic",
)


@for_each("spec", QUANTIZERS)
def test_no_frame_exceeds_the_declared_size(spec):
    c = codec(spec)
    for kind, x in vectors(401).items():
        assert len(c.encode(x)) <= longest_frame(c, layout_of(401)), kind


@for_each("spec", QUANTIZERS)
@for_each("scope", ["", "@layer"])
def test_selected_values_are_rounded_as_a_separate_vector(spec, scope):
    c, layout = codec(f"topk:density=1/10+{spec}{scope}"), layout_of(1001)
    for kind in ("normal", "denormal", "zero"):
        x = vectors(1001)[kind]
        update = c.open(c.encode(x, seed=4, layout=layout), 1001, layout)
        positions, y = update.positions, update.dense()
        assert not y[np.setdiff1d(np.arange(1001), positions)].any()
        for i, entry in enumerate(layout) if scope else [(0, None)]:
            at = (
                positions
                if entry is None
                else positions[(positions >= entry.span.start) & (positions < entry.span.stop)]
            )
            alone = codec(spec).decode(codec(spec).encode(x[at], seed=4 + i), numel=at.size)
            assert y[at].tolist() == alone.tolist(), kind


@for_each(
    "spec",
    ["qsgd", "qsgd:levels=1", "qsgd:levels=127", "qsgd:levels=1000"]
    + ["terngrad", "terngrad:clip=0", "adaptive"],
)
def test_a_frame_of_a_million_is_within_2_percent_of_the_entropy_of_its_levels(spec):
    c, x = codec(spec), normal(10**6)
    frame = c.encode(x)
    _, counts = np.unique(c.decode(frame, numel=10**6).numpy(), return_counts=True)
    probabilities = counts / 10**6
    entropy = -(probabilities * np.log2(probabilities)).sum()
    assert len(frame) <= 1.02 * entropy * 10**6 / 8 + 100
