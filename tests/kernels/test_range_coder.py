import tracemalloc

import numpy as np
import pytest
from cases import for_each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_threads import torch_threads

from fedcomp.errors import FrameError
from fedcomp.kernels import range_coder

SIZES = (2, 3, 16, 256, 257, 4096)


def draw(size, count, kind, seed=0):
    random = np.random.default_rng(seed)
    symbols = {
        "even": lambda: random.integers(0, size, count),
        "skewed": lambda: np.minimum(random.geometric(0.95, count) - 1, size - 1),
        "bell": lambda: np.clip(random.normal(size / 2, size / 8, count), 0, size - 1),
        "rare": lambda: np.where(
            random.random(count) < 2e-4, random.integers(0, size, count), size // 2
        ),
        "one": lambda: np.full(count, size - 1),
    }[kind]()
    return symbols.astype(np.uint8 if size <= 256 else np.uint16)


KINDS = ("even", "skewed", "bell", "rare", "one")
sizes = st.sampled_from(SIZES) | st.integers(2, 4096)
drawn = st.tuples(sizes, st.integers(0, 300), st.sampled_from(KINDS), st.integers(0, 99))
cases = drawn.map(lambda case: (case[0], draw(*case)))


def entropy_bytes(symbols):
    counts = np.bincount(symbols)
    counts = counts[counts > 0]
    return float((counts * np.log2(symbols.size / counts)).sum()) / 8


@given(cases)
def test_symbols_are_decoded_as_encoded(case):
    size, symbols = case
    data = range_coder.encode(symbols, size)
    assert data == range_coder.encode(symbols.astype(np.uint16), size)
    read = range_coder.decode(memoryview(data), symbols.size, size)
    assert read.dtype == np.uint16 and np.array_equal(read, symbols)


@for_each("kind", KINDS)
@for_each(
    "size, count",
    [(3, range_coder.MIN_LANE_SYMBOLS - 1), (256, range_coder.MIN_LANE_SYMBOLS), (4096, 40_001)],
)
def test_symbols_of_one_and_of_several_states_are_decoded_as_encoded(size, count, kind):
    symbols = draw(size, count, kind)
    made = range_coder.encode(symbols, size)
    assert np.array_equal(range_coder.decode(made, count, size), symbols)


def test_the_encoded_bytes_are_as_documented():
    """Frequencies f = (12, 4), scale B = 4. From the state 2²¹, symbol 0 gives 2²¹ // 12 · 16 + 2²¹ mod 12. No word is written."""
    symbols, state = np.array([0, 0, 1, 0, 0, 1, 0, 0], np.uint8), 1 << 21
    for s in symbols[::-1]:
        f, first = (12, 0) if s == 0 else (4, 12)
        state = state // f * 16 + first + state % f
    # Rice code with parameter 1 of the gaps 8 and 1: bit length 4 is 4 more than 0, and 3 is 1 less than 4.
    lengths = "00001" + "1" + "0" + "1"
    low = "100" + "00" + "000"
    expected = (
        bytes.fromhex("04 0200 01 0100")
        + int(lengths + low, 2).to_bytes(2, "big")
        + state.to_bytes(7, "little")
    )
    assert range_coder.encode(symbols, 3) == expected
    assert range_coder.encode(symbols[:0], 3) == b""
    assert range_coder.encode(np.full(1000, 300, np.uint16), 500) == bytes.fromhex("00 2c01")


@for_each("kind", KINDS)
@for_each("size, count", [(2, 1000), (16, 12_000), (243, 200_000)])
def test_the_code_is_at_most_one_percent_and_a_table_above_the_entropy(size, count, kind):
    symbols = draw(size, count, kind)
    table_bytes = 100 + size
    assert len(range_coder.encode(symbols, size)) <= 1.01 * entropy_bytes(symbols) + table_bytes


def test_the_code_does_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(range_coder, "CHUNK", 20_000)
    symbols, made = draw(16, 90_001, "bell"), []
    for count in (1, 2):
        with torch_threads(count):
            made.append(range_coder.encode(symbols, 16))
            assert np.array_equal(range_coder.decode(made[-1], 90_001, 16), symbols)
    assert made[0] == made[1]
    for wrong in (made[0][:-4], made[0] + bytes(4), made[0][:40]):
        with pytest.raises(FrameError):
            range_coder.decode(wrong, 90_001, 16)


@given(
    st.lists(st.integers(0, 10**6), min_size=2, max_size=300).filter(
        lambda counts: np.count_nonzero(counts) > 1
    )
)
def test_frequencies_add_up_and_are_positive_for_symbols_that_occur(counts):
    counts = np.array(counts)
    total, present = int(counts.sum()), int(np.count_nonzero(counts))
    for bits in (range_coder._bits(total, present), present.bit_length() + 1):
        frequencies = range_coder._scale(counts, total, bits)
        assert frequencies.sum() == 1 << bits and ((frequencies > 0) == (counts > 0)).all()
        # More frequent symbols have larger frequencies, up to rounding.
        assert (np.diff(frequencies[np.argsort(counts, kind="stable")]) >= -1).all()


def test_symbols_out_of_range_raise_an_error():
    for symbols in (
        np.array([0, 3], np.uint8),
        np.array([5, 5], np.uint8),
        np.array([0, 65535], np.uint16),
    ):
        with pytest.raises(ValueError, match="not below the size 3"):
            range_coder.encode(symbols, 3)


def refused_or_canonical(data, count, size):
    try:
        symbols = range_coder.decode(data, count, size)
    except FrameError as error:
        assert str(error)
        return
    assert symbols.dtype == np.uint16 and symbols.size == count and symbols.max(initial=0) < size
    assert range_coder.encode(symbols, size) == data


@given(st.binary(max_size=60), st.integers(0, 400), sizes)
def test_any_bytes_are_refused_or_canonical(data, count, size):
    refused_or_canonical(data, count, size)


@settings(max_examples=100)
@given(cases, sizes, st.integers(0, 400), st.data())
def test_damaged_codes_are_refused_or_canonical(case, other, count, data):
    size, symbols = case
    code = range_coder.encode(symbols, size)
    refused_or_canonical(code, count, size)
    refused_or_canonical(code, symbols.size, other)
    if code:
        changed = bytearray(code)
        changed[data.draw(st.integers(0, len(code) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        refused_or_canonical(bytes(changed), symbols.size, size)
    for wrong in (code[:-1], code + b"\0", code + bytes(4), code + code[-4:]):
        if wrong != code:
            with pytest.raises(FrameError):
                range_coder.decode(wrong, symbols.size, size)


def test_a_table_that_no_encoder_makes_is_refused():
    """The symbols would be decoded correctly, but with frequencies that the encoder would not choose."""
    symbols, counts = draw(16, 500, "bell"), np.arange(1, 17)
    head, frequencies, bits = range_coder._head(counts)
    states, words = range_coder._encode_chunk(symbols, frequencies, bits)
    forged = head + range_coder._state_bytes(states) + words.tobytes()
    with pytest.raises(FrameError, match="do not match the entropy-coded values"):
        range_coder.decode(forged, 500, 16)


def test_a_claimed_size_is_not_allocated():
    code = range_coder.encode(draw(256, 100, "even"), 256)
    range_coder.decode(code, 100, 256)
    for first in range(256):
        tracemalloc.start()
        with pytest.raises(FrameError):
            range_coder.decode(
                bytes([first ^ code[0] or 1, 255, 255 - first]) + code[3:], 100, 4096
            )
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 400_000
