import math
import tracemalloc

import numpy as np
import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.errors import FrameError
from fedcomp.kernels import rice, rice_loops, split_runs


def as_positions(values):
    return np.array(sorted(values), np.int64)


def uniform(numel, count, seed=0):
    return np.sort(np.random.default_rng(seed).choice(numel, count, replace=False)).astype(np.int64)


cases = st.integers(1, 3000).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=60).map(as_positions))
)
rice_parameters = st.integers(0, 12) | st.integers(0, rice.WIDEST)


@given(cases, rice_parameters)
def test_positions_are_unpacked_as_packed(case, b):
    numel, positions = case
    data = rice.pack(positions, b)
    assert len(data) == (rice.bits(positions, b) + 7) // 8
    assert rice.unpack(memoryview(data), positions.size, b, numel).tolist() == positions.tolist()


@given(st.lists(st.tuples(cases, rice_parameters), max_size=8))
def test_rows_are_packed_like_single_vectors(rows):
    positions = np.concatenate([p for (_, p), _ in rows] or [np.empty(0, np.int64)])
    counts = np.array([p.size for (_, p), _ in rows], np.int64)
    b = np.array([b for _, b in rows], np.int64)
    assert rice.pack_rows(positions, counts, b.repeat(counts)) == [
        rice.pack(p, b) for (_, p), b in rows
    ]
    assert rice.best_parameters(positions, counts, 3000).tolist() == [
        rice.best_parameter(p, 3000) for (_, p), _ in rows
    ]


@given(st.lists(cases, min_size=1, max_size=4), st.data())
def test_each_position_may_have_its_own_parameter_after_other_fields(rows, data):
    rows = [positions for _, positions in rows]
    counts = np.array([row.size for row in rows])
    each = [
        data.draw(
            st.lists(st.integers(0, 9) | rice_parameters, min_size=row.size, max_size=row.size)
        )
        for row in rows
    ]
    fields = data.draw(
        st.lists(st.tuples(st.integers(0, len(rows) - 1), st.integers(0, 40)), max_size=6).map(
            sorted
        )
    )
    fields = [(row, width, data.draw(st.integers(0, 2**width - 1))) for row, width in fields]
    streams = []
    for i, (row, own) in enumerate(zip(rows, each, strict=True)):
        rest = [g - 1 for g in np.diff(row, prepend=-1).tolist()]
        lead = "".join(f"{value:0{width}b}" for at, width, value in fields if at == i and width)
        unary = "".join("0" * (r >> b) + "1" for r, b in zip(rest, own))
        streams.append(
            lead + unary + "".join(f"{r & 2**b - 1:0{b}b}" for r, b in zip(rest, own) if b)
        )
    expected = [
        int("0" + bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
        for bits in streams
    ]
    lead = rice.Fields(*np.array(fields, np.int64).reshape(-1, 3).T)
    flat = np.array(sum(each, []), np.int64)
    assert rice.pack_rows(np.concatenate(rows), counts, flat, lead) == expected
    if counts.all():
        sizes = 8 * np.array([len(code) for code in expected])
        starts = sizes.cumsum() - sizes
        leads = np.bincount(lead.rows, lead.widths, len(rows)).astype(np.int64)
        read, good = rice.unpack_rows(
            rice.padded(expected),
            starts + leads,
            starts + sizes,
            counts,
            flat,
            np.ones_like(flat),
            3000,
        )
        assert good.all() and read.tolist() == np.concatenate(rows).tolist()
        at = np.concatenate(
            [
                starts[i] + np.append(0, lead.widths[lead.rows == i].cumsum())[:-1]
                for i in range(len(rows))
            ]
        )
        assert (
            rice.read_bits(rice.padded(expected), lead.widths, at).tolist() == lead.values.tolist()
        )


def test_the_packed_bits_are_as_documented():
    positions = np.array([3, 4, 10, 100])  # gaps − 1: 3, 0, 5, 89
    stream = "1" + "1" + "01" + "0" * 22 + "1" + "11" + "00" + "01" + "01" + "00000"
    assert (
        rice.pack(positions, 2) == int(stream, 2).to_bytes(5, "big") == bytes.fromhex("d0000038a0")
    )
    assert rice.pack(positions[:0], 2) == b""


@for_each("density, b", [(25, 4), (100, 6), (400, 8), (1000, 9)])
def test_the_parameter_follows_the_formula(density, b):
    p, golden = 1 / density, (math.sqrt(5) + 1) / 2
    assert (
        rice.parameter(10_000, 10_000 * density)
        == b
        == 1 + math.floor(math.log2(math.log(golden - 1) / math.log(1 - p)))
    )


def test_the_parameter_is_never_negative():
    assert [rice.parameter(count, 1000) for count in (0, 619, 1000)] == [0, 0, 0]
    assert rice.parameter(1, 2**62) == rice.WIDEST


@given(cases)
def test_the_best_parameter_has_the_shortest_code_nearby(case):
    numel, positions = case
    b, near = rice.best_parameter(positions, numel), rice.parameter(positions.size, numel)
    tried = range(max(0, near - 2), near + 3)
    assert b == min(tried, key=lambda b: (rice.bits(positions, b), b))


@for_each("density", [100, 400])
def test_uniform_positions_take_at_most_one_percent_above_their_entropy(density):
    n, p = 1_000_000, 1 / density
    positions = uniform(n, n // density)
    entropy = n * (-p * math.log2(p) - (1 - p) * math.log2(1 - p))
    data = rice.pack(positions, rice.best_parameter(positions, n))
    assert 8 * len(data) < 1.01 * entropy


def test_many_positions_are_unpacked_as_packed():
    positions = uniform(25_000_000, 30_000)
    data = rice.pack(positions, 9)
    assert np.array_equal(rice.unpack(data, positions.size, 9, 25_000_000), positions)


def refused_or_canonical(data, count, b, numel):
    try:
        positions = rice.unpack(data, count, b, numel)
    except FrameError:
        return
    assert positions.dtype == np.int64 and positions.size == count
    assert positions.tolist() == sorted(set(positions.tolist()) & set(range(numel)))
    assert rice.pack(positions, b) == data


@given(st.binary(max_size=40), st.integers(-1, 60), st.integers(-1, 45), st.integers(0, 400))
def test_any_bytes_are_refused_or_canonical(data, count, b, numel):
    refused_or_canonical(data, count, b, numel)


@given(cases, st.integers(0, 12), st.data())
def test_damaged_codes_are_refused_or_canonical(case, b, data):
    numel, positions = case
    code, count = rice.pack(positions, b), positions.size
    if code:
        flipped = bytearray(code)
        flipped[data.draw(st.integers(0, len(code) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        refused_or_canonical(bytes(flipped), count, b, numel)
    refused_or_canonical(code, data.draw(st.integers(0, 2 * count + 1)), b, numel)
    refused_or_canonical(code, count, data.draw(rice_parameters), numel)
    refused_or_canonical(b"\0" + code, count, b, numel)
    for wrong in (code[:-1], code + b"\0", code + b"\x80"):
        if wrong != code:
            with pytest.raises(FrameError):
                rice.unpack(wrong, count, b, numel)
    if count:
        with pytest.raises(FrameError):
            rice.unpack(code, count, b, int(positions[-1]))


@for_each("count, b, numel, size", [
    (2**62, 0, 1000, 100), (1001, 0, 1000, 126), (-1, 0, 1000, 0), (1, 41, 1000, 100), (1, -1, 1000, 1), (1000, 40, 1000, 0),
    (1, 0, 1000, 2**24), (1, 40, 2**40, 2**24), (1000, 12, 1000, 2**24),
])  # fmt: skip
def test_hostile_claims_are_refused_before_anything_is_allocated(count, b, numel, size):
    data = bytes(size)
    tracemalloc.start()
    with pytest.raises(FrameError):
        rice.unpack(data, count, b, numel)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_positions_that_would_overflow_are_refused():
    rest = (1 << 40) - 1
    stream = "1" * 100 + f"{rest:040b}" * 100
    data = int(stream.ljust(4104, "0"), 2).to_bytes(513, "big")
    with pytest.raises(FrameError):
        rice.unpack(data, 100, 40, 1000)


@given(st.data())
def test_rows_are_unpacked_together_like_single_rows(data):
    numel = data.draw(st.integers(1, 400))
    rows = data.draw(
        st.lists(
            st.sets(st.integers(0, numel - 1), min_size=1, max_size=30), min_size=1, max_size=5
        )
    )
    codes, counts, parameters = [], [], []
    for row in rows:
        b = data.draw(st.integers(0, 6))
        code = bytearray(rice.pack(np.array(sorted(row), np.int64), b))
        damage = data.draw(
            st.sampled_from(["none", "none", "flip", "cut", "extend", "count", "parameter"])
        )
        if damage == "flip":
            code[data.draw(st.integers(0, len(code) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        codes.append(bytes(code[:-1] if damage == "cut" else code + b"\0" * (damage == "extend")))
        counts.append(len(row) + (damage == "count"))
        parameters.append(b + 30 * (damage == "parameter"))
    counts, ends = np.array(counts), 8 * np.cumsum([len(code) for code in codes])
    starts = np.append(0, ends[:-1])
    read, good = rice.unpack_rows(
        rice.padded(codes), starts, ends, counts, np.array(parameters), counts, numel
    )
    for positions, ok, code, count, b in zip(
        split_runs(read, counts), good, codes, counts.tolist(), parameters, strict=True
    ):
        try:
            assert np.array_equal(rice.unpack(code, count, b, numel), positions) and ok
        except FrameError:
            assert not ok


@given(st.data())
def test_compiled_loops_unpack_any_bytes_like_numpy(data):
    numel, blocks, codes = data.draw(st.integers(1, 400)), [], []
    for _ in range(data.draw(st.integers(1, 4))):
        lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
        own = [(length, data.draw(rice_parameters)) for length in lengths]
        if data.draw(st.booleans()):
            row = np.cumsum(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=40))) - 1
            own = [(row.size, data.draw(st.integers(0, 4)))]
            codes.append(rice.pack(row, own[0][1]))
        else:
            codes.append(data.draw(st.binary(min_size=1, max_size=60)))
        blocks.append(own)
    lengths, parameters = np.array([block for own in blocks for block in own]).T
    counts = np.array([sum(length for length, _ in own) for own in blocks])
    ends = 8 * np.cumsum([len(code) for code in codes])
    starts = np.append(0, ends[:-1]) + data.draw(st.integers(0, 7))
    code = rice.padded(codes), starts, ends, counts, parameters, lengths, numel
    expected, valid = rice.unpack_rows(*code)
    read, good = np.empty(counts.sum(), np.int64), np.empty(counts.size, np.bool_)
    rice_loops.unpack(*code, read, good)
    assert good.tolist() == valid.tolist()
    rows = zip(split_runs(read, counts), split_runs(expected, counts), good, strict=True)
    assert all(np.array_equal(row, other) for row, other, fine in rows if fine)


@for_each("b", [0, 3, 40])
def test_any_bytes_are_refused_or_unpacked_to_ascending_positions_below_numel(b):
    random, refused = np.random.default_rng(b), 0
    for fill in (b"\0", b"\xff", None):
        data = fill * 6000 if fill else random.bytes(6000)
        for count in (1000, 40_000):
            try:
                positions = rice.unpack(data, count, b, 47_000)
            except FrameError:
                refused += 1
            else:
                assert (np.diff(positions, prepend=-1) > 0).all() and positions[-1] < 47_000
    assert refused
