import math
import tracemalloc

import numpy as np
import pytest
from cases import for_each
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp.errors import FrameError
from fedcomp.kernels import positions, rice

NUMELS = (1, 2, 7, 40, 401, 3000, 20_000)


def draw(numel, count, kind, seed=0):
    """Return positions that are spread evenly, in layers of different density, in a run, or along waves."""
    random = np.random.default_rng(seed)
    count = min(count, numel)
    if kind == "run":
        start = random.integers(0, numel - count + 1)
        return np.arange(start, start + count)
    weights = {
        "even": lambda: np.ones(numel),
        "layers": lambda: np.exp(random.normal(0, 3, numel // 37 + 1)).repeat(37)[:numel],
        "waves": lambda: np.exp(3 * np.sin(np.arange(numel) / 30)),
    }[kind]()
    # The positions of the largest keys are a weighted sample without replacement.
    keys = np.log(random.random(numel)) / weights
    return np.sort(np.argpartition(-keys, count - 1)[:count] if count else np.empty(0, np.int64))


KINDS = ("even", "layers", "waves", "run")
shares = st.sampled_from((0, 1 / 400, 1 / 40, 1 / 4, 1 / 2, 2 / 3, 0.97, 1))
seeds = st.integers(0, 99)


@st.composite
def vectors(draw_from):
    numel = draw_from(st.sampled_from(NUMELS))
    counts = [
        math.ceil(draw_from(shares) * numel) + draw_from(st.integers(-1, 1))
        for _ in range(draw_from(st.integers(1, 4)))
    ]
    rows = [
        draw(numel, max(1, count), draw_from(st.sampled_from(KINDS)), draw_from(seeds))
        for count in counts
    ]
    return numel, rows


def shortest_single(row, numel):
    return (rice.bits(row, rice.best_parameter(row, numel)) + 7) // 8


@settings(max_examples=50, deadline=None)
@given(vectors())
def test_positions_are_unpacked_as_packed_and_not_longer_than_with_one_parameter(case):
    numel, rows = case
    counts = np.array([row.size for row in rows])
    forms, codes = positions.pack_rows(np.concatenate(rows), counts, numel)
    read = positions.unpack_rows(
        [memoryview(code) for code in codes], counts.tolist(), forms, numel
    )
    for row, form, code, again in zip(rows, forms, codes, read, strict=True):
        assert again.dtype == np.int64 and again.tolist() == row.tolist()
        assert positions.pack(row, numel) == (form, code)
        assert positions.unpack(code, row.size, form, numel).tolist() == row.tolist()
        assert 0 <= form < 64 and len(code) <= shortest_single(row, numel)


@settings(max_examples=50, deadline=None)
@given(vectors())
def test_compiled_loops_give_the_same_codes_as_numpy(case):
    numel, rows = case
    given = np.concatenate(rows), np.array([row.size for row in rows]), numel
    packed = []
    for many in (math.inf, 0):  # numpy, compiled
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(rice, "MANY", many)
            packed.append(positions.pack_rows(*given))
    assert packed[0] == packed[1]


@for_each("numel, count", [(25_000_000, 30_000), (1_000_000, 4095), (1_000_000, 4096)])
def test_many_positions_are_unpacked_as_packed(numel, count):
    edges = np.array([0, 0.5, 0.51, 0.9, 1]) * numel
    where = np.random.default_rng(0).integers(
        edges[:-1, None].astype(int), edges[1:, None].astype(int), (4, count // 4)
    )
    row = np.unique(where)
    form, code = positions.pack(row, numel)
    assert form == positions.BLOCKS
    assert np.array_equal(positions.unpack(code, row.size, form, numel), row)


def test_the_packed_bits_are_as_documented():
    """Gaps of 1 in the first 32 positions and of 65 in the next 32. s = 3 makes two blocks. b* = 5, so offsets of w = 3 bits begin at 0."""
    row = np.append(np.arange(32), 31 + 65 * np.arange(1, 33))
    assert rice.parameter(64, 2200) == 5
    head, offsets = "000" + "01" + "011", "000" + "101"
    unary, low = "1" * 32 + "001" * 32, "00000" * 32  # 0 >> 0; 64 >> 5
    bits = head + offsets + unary + low
    expected = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    assert positions.pack(row, 2200) == (positions.BLOCKS, expected)


def test_each_form_of_positions_has_its_documented_bytes():
    assert positions.pack(np.array([3, 4, 10, 100]), 200) == (
        4,
        rice.pack(np.array([3, 4, 10, 100]), 4),
    )
    assert positions.pack(np.arange(9), 9) == (positions.COMPLEMENT, b"")
    assert positions.pack(np.delete(np.arange(90), [10, 80]), 90) == (
        positions.COMPLEMENT + 4,
        rice.pack(np.array([10, 80]), 4),
    )
    # A bitmap without its trailing zeros.
    assert positions.pack(np.arange(40), 90) == (0, b"\xff" * 5)
    layers = draw(9000, 700, "layers")
    assert positions.pack(layers, 9000)[0] == positions.BLOCKS
    form, code = positions.pack(np.delete(np.arange(9000), layers), 9000)
    assert form == positions.COMPLEMENT_BLOCKED and code == positions.pack(layers, 9000)[1]


@for_each("count", [20, 79, 393, 3000])
def test_uniform_positions_take_the_bytes_of_one_parameter(count):
    row = draw(20_000, count, "even")
    form, code = positions.pack(row, 20_000)
    assert len(code) >= shortest_single(row, 20_000) - 2 and (
        form < positions.BLOCKS or len(code) < shortest_single(row, 20_000)
    )


def uniform_bound(numel, count):
    return (
        (math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1))
        / math.log(2)
        / 8
    )


@for_each("count", [300, 2000, 12_000])
def test_layers_of_different_density_take_fewer_bytes_than_uniform_positions(count):
    numel, random = 400_000, np.random.default_rng(0)
    scale = np.array([0.5, 2.0, 1.0, 0.25]).repeat(numel // 4)
    magnitudes = np.abs(random.standard_normal(numel)) * scale
    row = np.sort(np.argpartition(-magnitudes, count)[:count])
    within = sum(
        uniform_bound(numel // 4, int(part))
        for part in np.bincount(row // (numel // 4), minlength=4)
    )
    assert (
        within
        < len(positions.pack(row, numel)[1])
        < min(0.95 * uniform_bound(numel, count), 1.06 * within + 20)
    )


def refused_or_positions(data, count, form, numel):
    try:
        row = positions.unpack(data, count, form, numel)
    except FrameError as error:
        assert str(error)
        return
    assert row.dtype == np.int64 and row.size == count
    assert row.tolist() == sorted(set(row.tolist()) & set(range(numel)))


@settings(max_examples=80)
@given(st.binary(max_size=80), st.integers(0, 401), st.integers(0, 63), st.integers(1, 400))
def test_any_bytes_are_refused_or_positions(data, count, form, numel):
    refused_or_positions(data, count, form, numel)


@settings(max_examples=60, deadline=None)
@given(vectors(), st.data())
def test_damaged_codes_are_refused_or_positions(case, data):
    numel, rows = case
    form, code = positions.pack(rows[0], numel)
    count = rows[0].size
    if code:
        flipped, last = (
            bytearray(code),
            min(len(code), data.draw(st.sampled_from([4, 10**9]))) - 1,
        )
        flipped[data.draw(st.integers(0, last))] ^= 1 << data.draw(st.integers(0, 7))
        refused_or_positions(bytes(flipped), count, form, numel)
    refused_or_positions(code, data.draw(st.integers(0, numel)), form, numel)
    refused_or_positions(code, count, data.draw(st.integers(0, 63)), numel)
    refused_or_positions(code, count, form, data.draw(st.integers(count, 2 * numel)))
    for wrong in (code[:-1], code + b"\0", code + b"\x80"):
        if wrong != code:
            with pytest.raises(FrameError):
                positions.unpack(wrong, count, form, numel)


def test_a_code_with_any_parameter_is_unpacked():
    layers, even = draw(9000, 700, "layers"), draw(9000, 100, "even")
    for row in (layers, even):
        for b in range(12):
            assert np.array_equal(positions.unpack(rice.pack(row, b), row.size, b, 9000), row)


@settings(deadline=None)
@given(vectors(), st.data())
def test_rows_are_unpacked_together_like_single_rows(case, data):
    numel, rows = case
    counts = np.array([row.size for row in rows])
    forms, codes = positions.pack_rows(np.concatenate(rows), counts, numel)
    damaged = data.draw(st.integers(0, len(rows) - 1))
    code = bytearray(codes[damaged] + b"\0" * data.draw(st.integers(0, 1)))
    if code:
        code[data.draw(st.integers(0, len(code) - 1))] ^= data.draw(
            st.sampled_from([0, 1, 16, 128])
        )
    codes[damaged] = bytes(code)
    forms[damaged] = data.draw(st.sampled_from([forms[damaged], 0, 41, 63]))
    for read, *one in zip(
        positions.unpack_rows(codes, counts.tolist(), forms, numel),
        codes,
        counts.tolist(),
        forms,
        strict=True,
    ):
        try:
            assert np.array_equal(positions.unpack(*one, numel), read)
        except FrameError:
            assert isinstance(read, FrameError)


@pytest.mark.parametrize("form", [0, 40, 41, 42, 62, 63])
@pytest.mark.parametrize(
    "count, size", [(1000, 100), (600, 0), (1, 2**20), (400, 2**20), (999, 2**20)]
)
def test_hostile_claims_are_refused_before_anything_is_allocated(form, count, size):
    data, numel = b"\x0b" + bytes(size), 1000
    tracemalloc.start()
    with pytest.raises(FrameError):
        positions.unpack(data, count, form, numel)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400_000


def test_positions_that_would_overflow_are_refused():
    rest = (1 << 40) - 1
    bits = "1" * 20 + f"{rest:040b}" * 20
    with pytest.raises(FrameError):
        positions.unpack(int(bits.ljust(824, "0"), 2).to_bytes(103, "big"), 20, 40, 1000)
