"""The codec `sketch`: the size of frames, decoding, the sum of frames, and integer cells."""

import itertools
import math

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import layout_of, normal, reseal, same_bits, vectors

from fedcomp import codec
from fedcomp.codecs import add_all, frame, longest_frame
from fedcomp.codecs.frame import MODEL, Section, seal, varint
from fedcomp.codecs.sketch import MAX_EXPONENT, MIN_EXPONENT, SketchUpdate, sum_sketches
from fedcomp.errors import FrameError, SpecError
from fedcomp.kernels import count_sketch

CELLS = ("fp32", "bf16", "int8")
HEAD = frame.SECTIONS + frame.SEED.size
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}


def whole(numel: int, seed: int = 0) -> torch.Tensor:
    """Return a vector of −1, 0 and 1, whose cells are small integers."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-1, 2, numel).astype(np.float32))


def opened(spec: str, data: bytes, numel: int) -> SketchUpdate:
    return codec(spec).open(data, numel)


def form(data: bytes, numel: int) -> int:
    """Return the byte of a frame that contains the form of the cells."""
    cells = opened("sketch", data, numel)
    return data[HEAD + len(b"".join(map(varint, (numel, *cells.cells.shape, cells.count))))]


def made(numel: int, rows: int, columns: int, rest: bytes, seed: int = 3, k: int = 1) -> bytes:
    return seal(
        codec("sketch").id,
        MODEL,
        numel,
        [Section(numel, varint(rows) + varint(columns) + varint(k) + rest)],
        seed,
    )


def integers(cells: np.ndarray, exponent: int) -> bytes:
    """Return the bytes after rows, columns and k: the form of the cells, the exponent and the cells."""
    kinds = {"int8": 2, "int16": 3, "int32": 4}
    return bytes([kinds[cells.dtype.name]]) + np.array(exponent, "<i2").tobytes() + cells.tobytes()


# Size and decoding.


@for_each("cells", CELLS)
@for_each("ratio", [0.5, 4, 10, 100])
def test_a_frame_has_the_requested_size(ratio, cells):
    for numel, rows in itertools.product((7850, 70_001), (1, 5)):
        c = codec(f"sketch:rows={rows},ratio={ratio},cells={cells}")
        size, asked = len(c.encode(normal(numel))), 4 * numel / ratio
        assert asked - rows * BYTES[cells] < size <= asked + 32
        assert (
            size - HEAD <= c.longest_section(numel)
            and longest_frame(c, layout_of(numel)) - size <= 4
        )


def test_a_sketch_has_the_given_columns_and_at_least_one():
    frame = codec("sketch:rows=3,columns=70").encode(normal(401))
    assert opened("sketch", frame, 401).cells.shape == (3, 70)
    assert opened("sketch", codec("sketch:ratio=1000").encode(normal(401)), 401).cells.shape == (
        5,
        1,
    )


@for_each("cells", ["fp32", "bf16"])
def test_cells_are_computed_by_the_kernel(cells):
    x = normal(5001)
    found = opened("sketch", codec(f"sketch:columns=100,cells={cells}").encode(x, seed=9), 5001)
    exact = count_sketch.sketch(x, 5, 100, 9)
    rounded = torch.from_numpy(exact).to(torch.bfloat16).float().numpy()
    assert np.array_equal(found.cells, exact if cells == "fp32" else rounded) and found.seed == 9


def test_decoding_returns_the_largest_estimates():
    x, n = normal(7850), 7850
    c = codec("sketch:density=1/10")
    frame = c.encode(x, seed=4)
    estimates = count_sketch.estimates(opened("sketch", frame, n).cells, n, 4)
    largest = np.sort(np.argsort(-np.abs(estimates), kind="stable")[:785])
    update = c.open(frame, n)
    assert update.nonzeros == c.count(n) == 785 and np.array_equal(update.positions, largest)
    expected = np.zeros(n, np.float32)
    expected[largest] = estimates[largest]
    assert same_bits(c.decode(frame, numel=n), expected) and same_bits(
        codec("sketch:density=1").decode(frame, numel=n), expected
    )
    assert same_bits(c.decode(codec("sketch:density=1").encode(x, seed=4), numel=n), estimates)


@for_each("cells", CELLS)
def test_heavy_hitters_are_recovered(cells):
    x = 0.01 * normal(50_000)
    heavy = np.random.default_rng(1).permutation(50_000)[:8]
    x[heavy] = torch.from_numpy(np.random.default_rng(2).choice([-1.0, 1.0], 8).astype(np.float32))
    c = codec(f"sketch:ratio=10,density=8/50000,cells={cells}")
    update = c.open(c.encode(x, seed=1), 50_000)
    assert set(update.positions) == set(heavy)
    assert np.abs(update.block(0, 50_000)[heavy] - x.numpy()[heavy]).max() < 0.3


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(1, 20), (3, 20), (5, 5)])
def test_all_estimates_are_unbiased_with_the_declared_variance(rows, columns):
    n, seeds = 60, 200
    c, x = codec(f"sketch:rows={rows},columns={columns},density=1"), normal(n) ** 3
    lost = np.stack(
        [(c.decode(c.encode(x, seed=seed), numel=n) - x).double().numpy() for seed in range(seeds)]
    )
    errors = lost.std(0) / math.sqrt(seeds)
    assert (np.abs(lost.mean(0)) < 4 * errors).all()
    assert abs(np.square(lost.mean(0) / errors).sum() - n) < 6 * math.sqrt(2 * n)
    square = float(x.double().square().sum())
    mean, deviation = np.square(lost).sum(1).mean(), np.square(lost).sum(1).std() / math.sqrt(seeds)
    assert mean - 4 * deviation <= c.variance(n) * square
    assert (
        rows > 1 or abs(mean - c.variance(n) * square) < 4 * deviation
    )  # with one row the declared variance is exact, not a bound


def test_biased_sketches_declare_no_variance():
    for spec in ("sketch", "sketch:cells=bf16,density=1", "sketch:cells=int8,density=1"):
        assert codec(spec).variance(1000) is codec(spec).contraction(1000) is None
    assert (
        codec("sketch:density=1").variance(0) is None and codec("sketch:density=1").variance(1) == 0
    )


# Cells of integers.


def test_integer_cells_are_rounded_stochastically():
    small = torch.full((30_000,), 0.3)
    small[0] = 100
    for x in (normal(30_000), small):
        found = opened("sketch", codec("sketch:ratio=1,cells=int8").encode(x, seed=6), 30_000)
        exact = count_sketch.sketch(x, *found.cells.shape, 6).astype(np.float64)
        unit = 2.0 ** math.ceil(math.log2(np.abs(exact).max() / 127))
        off = (found.cells - exact) / unit
        assert (
            np.array_equal(found.cells / unit, np.rint(found.cells / unit))
            and np.abs(found.cells / unit).max() <= 127
        )
        assert np.abs(off).max() < 1 and abs(off.mean()) < 5 * 0.5 / math.sqrt(off.size)
        assert abs((off * np.sign(exact)).mean()) < 5 * 0.5 / math.sqrt(off.size)


def test_clients_round_differently():
    """All clients have the same seed. If they also rounded with the same random numbers, their errors would add up."""
    n, errors = 30_000, []
    for client in (1, 2):
        x = normal(n, seed=client)
        found = opened("sketch", codec("sketch:ratio=1,cells=int8").encode(x, seed=6), n)
        errors.append((found.cells - count_sketch.sketch(x, *found.cells.shape, 6)).ravel())
    assert abs(np.corrcoef(errors)[0, 1]) < 5 / math.sqrt(errors[0].size)


@for_each("kind", ["huge", "denormal", "tiny", "zero", "one spike", "all scales"])
@for_each("cells", CELLS)
def test_extreme_values_of_float32_decode_to_finite_values(kind, cells):
    for numel in (1, 8, 401):
        for spec in (f"sketch:cells={cells},density=1", f"sketch:cells={cells}@layer"):
            x, layout = vectors(numel)[kind], layout_of(numel)
            y = codec(spec).decode(codec(spec).encode(x, layout=layout), numel=numel, layout=layout)
            assert y.isfinite().all() and bool(y.any()) <= bool(x.any())


@for_each("cells", CELLS)
def test_the_largest_value_is_not_rounded_up_to_infinity(cells):
    c = codec(f"sketch:cells={cells}")
    for value in (3.4e38, -3.4028234e38):
        assert c.decode(c.encode(torch.tensor([value])), numel=1).item() == pytest.approx(
            value, rel=1 / 63
        )


# Sums of frames.


@for_each("cells", CELLS)
def test_a_merged_frame_is_the_frame_of_the_sum(cells):
    """The sum of integers is exact and does not depend on the order."""
    c, n = codec(f"sketch:rows=3,columns=100,cells={cells}"), 500
    xs = [whole(n, seed) for seed in range(40)]
    frames = [c.encode(x, seed=8) for x in xs]
    merged = c.merge(frames)
    assert np.array_equal(
        opened("sketch", merged, n).cells, count_sketch.sketch(sum(xs), 3, 100, 8)
    )
    assert (
        c.merge([c.merge(frames[:7]), c.merge([c.merge(frames[7:9]), *frames[9:]])])
        == c.merge(frames[::-1])
        == merged
    )
    assert c.merge(frames[:1]) == frames[0]
    assert same_bits(
        c.decode(merged, numel=n),
        codec("sketch").decode(codec("sketch:rows=3,columns=100").encode(sum(xs), seed=8), numel=n),
    )


@for_each("cells", ["fp32", "bf16"])
def test_sums_of_floats_are_rounded_to_float32(cells):
    c, n = codec(f"sketch:rows=3,columns=100,cells={cells}"), 5000
    frames = [c.encode(normal(n, seed=seed), seed=8) for seed in range(10)]
    exact = sum(opened("sketch", data, n).cells.astype(np.float64) for data in frames)
    merged = opened("sketch", c.merge(frames), n).cells
    assert np.abs(merged - exact).max() < 1e-6 * np.abs(exact).max()


def test_integers_get_wider_as_they_are_added():
    x, n = torch.tensor([100.0]), 1
    c = codec("sketch:rows=1,columns=1,cells=int8")
    data = c.encode(x, seed=8)
    for count, kind, length in [(1, 2, 1), (2, 3, 2), (327, 3, 2), (328, 4, 4), (5000, 4, 4)]:
        merged = c.merge([data] * count)
        assert form(merged, n) == kind and len(merged) == len(data) - 1 + length
        assert c.decode(merged, numel=n).item() == 100 * count


def test_integers_with_different_units_are_added_in_the_smallest_unit():
    c, x = codec("sketch:rows=3,columns=50,cells=int8"), whole(100)
    scales = [1.0, 2.0**-10, 2.0**-15, 1.0]
    frames = [c.encode(scale * x, seed=1) for scale in scales]
    exact = count_sketch.sketch(x, 3, 50, 1).astype(np.float64) * sum(scales)
    assert np.array_equal(opened("sketch", c.merge(frames), 100).cells, exact.astype(np.float32))
    assert c.merge([c.merge(frames[:2]), c.merge(frames[2:])]) == c.merge(frames)


def test_the_unit_grows_if_the_sum_exceeds_32_bits():
    c, x = codec("sketch:rows=3,columns=50,cells=int8"), whole(100)
    frames = [c.encode(scale * x, seed=1) for scale in (1e30, 1.0, 1e-30)]
    merged, first = (opened("sketch", data, 100).cells for data in (c.merge(frames), frames[0]))
    assert np.abs(merged - first).max() <= 2.0**-28 * np.abs(first).max()
    assert opened("sketch", c.merge([frames[2], c.encode(0 * x, seed=1)]), 100).cells.any()


def test_units_and_sums_that_exceed_float32_are_refused():
    ones, c = np.ones((3, 4), np.int8), codec("sketch")
    for exponent in (MIN_EXPONENT, -149, 0, MAX_EXPONENT):
        data = made(9, 3, 4, integers(ones, exponent))
        assert np.array_equal(
            opened("sketch", data, 9).cells, np.full((3, 4), 2.0**exponent, np.float32)
        )
        assert c.merge([data]) == data
    for cells, exponent in [
        (ones, MAX_EXPONENT + 1),
        (ones, MIN_EXPONENT - 1),
        (2 * ones, MAX_EXPONENT),
        (np.full((3, 4), 2**31 - 1, np.int32), 98),
        (np.full((3, 4), -(2**15), np.int16), 113),
    ]:
        data = made(9, 3, 4, integers(cells, exponent))
        for refuse in (
            lambda data=data: c.open(data, 9),
            lambda data=data: c.merge([data]),
            lambda data=data: c.merge([data, data]),
        ):
            with pytest.raises(
                FrameError, match="^damaged frame: .*(unit of a sketch is out of range|not finite)"
            ):
                refuse()
    largest = made(9, 3, 4, integers(64 * ones, 121))  # twice this exceeds float32
    assert c.open(largest, 9).cells.max() == 2.0**127
    with pytest.raises(FrameError, match="not finite"):
        c.merge([largest, largest])
    assert not c.open(c.merge([largest, made(9, 3, 4, integers(-64 * ones, 121))]), 9).cells.any()


def test_frames_with_different_seeds_sizes_or_kinds_are_not_merged():
    x = normal(401)
    one = codec("sketch:columns=30").encode(x, seed=1)
    for other in (
        codec("sketch:columns=30").encode(x, seed=2),
        codec("sketch:columns=31").encode(x, seed=1),
        codec("sketch:columns=50,rows=3").encode(x, seed=1),
        codec("sketch:columns=30,cells=int8").encode(x, seed=1),
        codec("sketch:columns=30,density=2%").encode(x, seed=1),
    ):
        with pytest.raises(
            FrameError,
            match="different seeds|scopes or seeds|different sizes, densities or cell types",
        ):
            codec("sketch").merge([one, other])
    assert codec("sketch").merge([one, codec("sketch:columns=30,cells=bf16").encode(x, seed=1)])


def test_sketches_are_added_before_they_are_decoded():
    """In each client's sketch, its own large coordinates hide the shared ones. In the sum, the shared coordinates are the largest."""
    n, clients, c = 5000, 60, codec("sketch:ratio=1,density=10/5000")
    shared = np.arange(0, n, n // 10)
    frames, total = [], torch.zeros(n)
    for client in range(clients):
        x = torch.zeros(n)
        x[np.random.default_rng(client).permutation(n)[:20]] = 5.0
        x[shared] = 1.0
        frames.append(c.encode(x, seed=3))
    updates = [c.open(data, n) for data in frames]
    add_all(updates, [1 / clients] * clients, total)
    assert (
        np.array_equal(total.numpy().nonzero()[0], shared) and (total[shared] - 1).abs().max() < 0.5
    )
    assert not set(shared) <= set(
        np.argsort(-np.abs(sum(update.block(0, n) for update in updates)))[:10]
    )


def test_sketches_with_different_seeds_are_added_separately():
    n, c = 401, codec("sketch:density=1")
    frames = [c.encode(normal(n, seed=i), seed=i % 2) for i in range(4)]
    updates = [c.open(data, n) for data in frames]
    weights, total, expected = [0.5, 1.0, -2.0, 0.25], torch.ones(n), torch.ones(n)
    assert [total.seed for total in sum_sketches(updates, weights)] == [0, 1]
    for seed in (0, 1):
        cells = sum(np.float32(weights[i]) * updates[i].cells for i in range(4) if i % 2 == seed)
        expected += torch.from_numpy(count_sketch.estimates(cells, n, seed))
    add_all(updates, weights, total)
    assert torch.allclose(total, expected)


def test_layerwise_sketches_are_added_tensor_by_tensor():
    c, layout = codec("sketch:rows=3,columns=40,density=1@layer"), layout_of(401)
    xs, total = [whole(401, i) for i in range(3)], torch.zeros(401)
    frames = [c.encode(x, seed=2**64 - 1, layout=layout) for x in xs]
    add_all([c.open(data, 401, layout) for data in frames], [1.0] * 3, total)
    assert torch.equal(
        total, c.decode(c.encode(sum(xs), seed=2**64 - 1, layout=layout), numel=401, layout=layout)
    )
    assert torch.equal(total, c.decode(c.merge(frames), numel=401, layout=layout))


# Errors.


@for_each(
    "spec, sentence",
    [
        ("sketch:rows=4", "rows is 4; give an odd number from 1 to 15"),
        ("sketch:rows=0", "rows is 0; give an odd number"),
        ("sketch:rows=17", "rows is 17; give an odd number"),
        ("sketch:columns=-1", "columns is -1; give a number of cells"),
        (
            "sketch:columns=4294967296",
            "columns is 4294967296; give a number of cells",
        ),
        ("sketch:ratio=0", "ratio is 0; give a number above 0"),
        ("sketch:ratio=nan", "ratio "),
        ("sketch:ratio=inf", "ratio "),
        (
            "sketch:columns=50,ratio=5",
            "codec 'sketch' has both 'columns' and 'ratio'; give one of them",
        ),
        (
            "sketch:density=0",
            "density must be in (0, 1]",
        ),
        ("sketch:density=3/2", "density must be in (0, 1]"),
        (
            "sketch:cells=int4",
            "cells cannot be 'int4'; did you mean 'int8'?",
        ),
    ],
)
def test_invalid_options_are_refused(spec, sentence):
    with pytest.raises(SpecError) as caught:
        codec(spec)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_invalid_headers_of_a_sketch_are_refused():
    cells = np.zeros(12, "<f4").tobytes()
    assert codec("sketch").open(made(9, 3, 4, b"\0" + cells), 9)
    for rows, columns, rest in [
        (2, 6, b"\0" + cells),
        (0, 4, b"\0"),
        (17, 1, b"\0" + bytes(68)),
        (3, 0, b"\0"),
        (3, 4, b"\5" + cells),
        (3, 4, b""),
        (3, 4, b"\0" + cells[1:]),
        (3, 4, b"\0" + cells + b"\0"),
        (3, 4, b"\1" + cells),
        (3, 4, b"\2\0"),
        (1, 2**32, b"\0"),
        (3, 2**62, b"\0" + cells),
        (3, 4, b"\0" + cells[4:] + np.array(np.nan, "<f4").tobytes()),
        (3, 4, b"\1" + 12 * b"\x80\x7f"),
    ]:
        for read in (
            lambda data: codec("sketch").open(data, 9),
            lambda data: codec("sketch").merge([data]),
        ):
            with pytest.raises(FrameError):
                read(made(9, rows, columns, rest))
    for k in (0, 10):
        with pytest.raises(
            FrameError, match=f"{k} of .* coordinates of a sketch are to be decoded"
        ):
            codec("sketch").open(made(9, 3, 4, b"\0" + cells, k=k), 9)
    with pytest.raises(FrameError, match="1 rows of 137 cells is impossible for 9 coordinates"):
        codec("sketch").open(made(9, 1, 137, b"\0" + bytes(4 * 137)), 9)
    assert len(codec("sketch:columns=100000").encode(normal(9))) == len(
        made(9, 5, 136, bytes(1 + 4 * 5 * 136))
    )
    fewer = bytearray(made(9, 3, 4, b"\0" + cells))
    fewer[HEAD] = 8
    with pytest.raises(FrameError, match="8 coordinates are encoded; expected 9"):
        codec("sketch").open(reseal(bytes(fewer), 9), 9)


def test_a_tiny_ratio_gives_the_largest_width():
    assert codec("sketch:ratio=1e-320").width(100) == 8 * 100 + 64
