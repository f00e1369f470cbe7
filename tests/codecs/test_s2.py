"""The codec `s2`: the sum of frames is exact, or the decoded update reports how many values are estimates."""

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import reseal, same_bits, vectors
from test_hostile_frames import peak, read

from fedcomp import FrameError, codec
from fedcomp.codecs import at_density
from fedcomp.codecs.frame import SECTIONS, varint
from fedcomp.codecs.s2 import MAX_BITS, S2, _pack_cells, _size, _unpack_cells
from fedcomp.errors import SpecError
from fedcomp.kernels import peeling

NUMEL = 100_000


def sparse(numel: int, at: np.ndarray, seed: int) -> torch.Tensor:
    x = torch.zeros(numel)
    x[at] = torch.from_numpy(
        np.random.default_rng(seed).standard_normal(at.size).astype(np.float32)
    )
    return x


def clients(union: int, numel: int, seed: int, many: int = 8) -> tuple[list[torch.Tensor], int]:
    """Return sparse vectors with overlapping supports, and the size of the union of these supports."""
    draw = np.random.default_rng(seed)
    places = draw.choice(numel, union, replace=False)
    xs = [
        sparse(numel, draw.choice(places, union // 3, replace=False), 100 * seed + i)
        for i in range(many)
    ]
    return xs, int((torch.stack(xs) != 0).any(0).sum())


def exact_sum(xs: list[torch.Tensor]) -> np.ndarray:
    """Return the sum as float32, computed in float64, which holds these values exactly."""
    return torch.stack(xs).double().sum(0).float().numpy()


# Single frames.


def test_large_values_are_decoded_exactly():
    x = vectors(1001)["heavy tails"].clone()
    x[::3] = 0
    largest = float(x.abs().max())
    y = codec("s2").decode(codec("s2").encode(x, seed=2), numel=1001)
    kept = x.abs() >= largest * 2.0**-24
    assert same_bits(y[kept], x[kept]) and float((y - x).abs().max()) <= largest * 2.0**-48


@for_each("values, bits", [("int24", 23), ("int16", 15)])
def test_values_are_rounded_relative_to_the_largest_value(values, bits):
    for name in ("normal", "heavy tails", "huge", "denormal"):
        x = vectors(401)[name]
        y = codec(f"s2:values={values}").decode(codec(f"s2:values={values}").encode(x), numel=401)
        assert float((y.double() - x.double()).abs().max()) <= float(x.abs().max()) * 2.0**-bits, (
            name
        )


def test_zeros_are_not_sent():
    x = sparse(NUMEL, np.arange(0, 5000, 50), 1)
    frame = codec("s2").encode(x)
    assert codec("s2").open(frame, NUMEL).positions.tolist() == list(range(0, 5000, 50))
    assert len(codec("s2").encode(torch.zeros(NUMEL))) == SECTIONS + 8 + len(varint(NUMEL)) + 1


@for_each("keys, most", [(1000, 1.6), (10_000, 1.25), (10**6, 1.25)])
def test_a_table_has_at_most_the_expected_number_of_cells_per_key(keys, most):
    assert 3 * S2().width(keys) <= most * keys + 3


def test_a_frame_has_the_bytes_of_its_cells_and_positions():
    x = sparse(10**6, np.random.default_rng(0).choice(10**6, 10_000, replace=False), 1)
    x[x != 0] = x[x != 0].clamp(0.5, 1)
    for values, bits in (("fp32", 30), ("int24", 27), ("int16", 19)):
        assert (
            len(codec(f"s2:values={values}").encode(x)) <= 10_000 * (1.25 * bits / 8 + 1.02) + 100
        )


# Sums.


@pytest.mark.parametrize(("union", "cells_a_key", "seeds"), [(1000, 1.6, 8), (10_000, 1.25, 1)])
def test_the_sum_of_eight_clients_is_exact(union, cells_a_key, seeds):
    exact = 0
    for seed in range(seeds):
        xs, keys = clients(union, 4 * union, seed)
        c = codec(f"s2:rows=3,columns={int(cells_a_key * keys / 3)}")
        update = c.open(c.merge([c.encode(x, seed=seed) for x in xs]), 4 * union)
        assert update.nonzeros == keys
        right = np.array_equal(update.block(0, update.numel), exact_sum(xs))
        assert right or update.missed
        exact += right
    assert exact == seeds


def test_the_order_of_additions_does_not_matter():
    xs, _ = clients(300, NUMEL, 5)
    c = codec("s2:columns=300")
    frames = [c.encode(1000.0 ** (i % 3) * x, seed=1) for i, x in enumerate(xs)]
    whole = c.merge(frames)
    assert (
        c.merge(frames[::-1])
        == whole
        == c.merge([c.merge(frames[:3]), c.merge(frames[3:7]), frames[7]])
    )
    assert c.merge([whole, c.encode(torch.zeros(NUMEL), seed=1)]) == whole


def test_frames_that_cancel_decode_to_zero():
    x = sparse(NUMEL, np.arange(100), 2)
    c = codec("s2:columns=100")
    y = c.decode(c.merge([c.encode(x, seed=1), c.encode(-x, seed=1)]), numel=NUMEL)
    assert not y.any()


def test_values_of_very_different_sizes_add_up_to_rounding():
    c = codec("s2:columns=300")
    large, small = (
        1e30 * sparse(NUMEL, np.arange(0, 300, 2), 1),
        1e-30 * sparse(NUMEL, np.arange(0, 300, 3), 2),
    )
    for frames in ([large, small], [small, large, small]):
        y = c.decode(c.merge([c.encode(x, seed=1) for x in frames]), numel=NUMEL)
        assert float((y - large).abs().max()) <= 1e30 * 2.0**-40


def test_tables_of_different_shapes_are_not_added():
    x = sparse(NUMEL, np.arange(50), 1)
    with pytest.raises(
        FrameError,
        match="tables of different sizes cannot be merged; give all clients the same 'columns'",
    ):
        codec("s2").merge([codec(f"s2:columns={columns}").encode(x) for columns in (100, 101)])


@pytest.mark.slow
def test_the_encoder_takes_more_columns_if_it_cannot_decode_a_frame():
    """The test searches for a seed with which coordinates 3 and 8 have the same cells."""
    c = S2()
    for seed in range(20_000):
        columns = c.width(2)
        where = peeling.key_cells(np.array([3, 8]), 3, columns, seed)
        if (where.cells[0] == where.cells[1]).all() and len(
            {*(where.negative[0] ^ where.negative[1]).tolist()}
        ) == 1:
            break
    x = torch.zeros(20)
    x[[3, 8]] = torch.tensor([0.25, 3.0])
    update = c.open(c.encode(x, seed=seed), 20)
    assert update.values.tolist() == [0.25, 3.0] and update.missed == 0
    assert (
        codec(f"s2:columns={columns}")
        .open(codec(f"s2:columns={columns}").encode(x, seed=seed), 20)
        .missed
        == 2
    )
    assert len(c.encode(x, seed=seed)) > len(c.encode(x, seed=seed + 1))


@pytest.mark.parametrize("columns", [1, 20, 100, 130])
def test_too_few_columns_are_reported_and_the_error_is_at_most_the_vector(columns):
    x, c = vectors(401)["normal"], codec(f"s2:columns={columns}")
    for seed in range(5):
        update = c.open(c.encode(x, seed=seed), 401)
        lost = float((update.dense() - x).norm())
        assert update.missed > 0 and lost <= (1 + 1e-6) * float(x.norm())
    assert c.contraction(401) == 0 and codec("s2").contraction(401) == 1


# Products with a codec that selects coordinates.


def test_a_product_sends_what_its_first_half_selects():
    x = vectors(NUMEL)["normal"]
    for first in ("topk:density=1%", "stc:density=1%", "threshold:tau=3", "randomk:by=magnitude"):
        c = codec(f"{first}+s2")
        (at, _), values = c.first.choose([x], [9])
        update = c.open(c.encode(x, seed=9), NUMEL)
        assert np.array_equal(update.positions, at.numpy()) and same_bits(update.values, values)
        assert codec(str(c)) == c and c.linear and c.shares_seed
    assert same_bits(
        codec("s2").decode(c.encode(x, seed=9), numel=NUMEL),
        c.decode(c.encode(x, seed=9), numel=NUMEL),
    )


def test_frames_of_a_product_can_be_added_for_any_vectors():
    """All tables have room for `union` times the largest number of sent coordinates, so they have the same shape."""
    xs = [
        vectors(NUMEL)["normal"],
        sparse(NUMEL, np.arange(7), 1),
        torch.zeros(NUMEL),
        vectors(NUMEL)["heavy tails"],
    ]
    c = codec("topk:density=1%+s2:union=3")
    update = c.open(c.merge([c.encode(x, seed=4) for x in xs]), NUMEL)
    assert update.missed == 0
    assert np.array_equal(
        update.block(0, NUMEL), exact_sum([c.decode(c.encode(x, seed=4), numel=NUMEL) for x in xs])
    )
    assert c.second.width(3000) * 3 <= 1.5 * 3000


def test_the_density_of_a_product_can_be_changed():
    c = codec("topk:density=1%+s2:union=8@layer")
    assert c.density == 0.01 and at_density(c, 0.5) == codec("topk:density=1/2+s2:union=8@layer")
    assert codec("topk:density=1%+s2").contraction(1000) == pytest.approx(0.01)


@for_each(
    "text, says",
    [
        ("s2+fp16", "'s2' does not; give topk"),
        ("identity+s2", "'identity' does not; give topk:density=1%.s2"),
        ("randomk+s2", "frames can be added; leave .s2 out"),
        ("s2:rows=2", "give 3 to 7"),
        ("s2:columns=-1", "give a number of cells"),
        ("s2:union=0.5", "union is 0.5; give at least 1"),
        ("s2:columns=9,union=2", "give one of them"),
        ("topk+fp16+s2", "give at most two"),
    ],
)
def test_an_invalid_spec_is_refused_in_one_sentence_with_the_fix(text, says):
    with pytest.raises(SpecError, match=says):
        codec(text)


# Frames that no encoder makes.


def test_cells_of_any_width_are_unpacked_as_packed():
    for bits in range(1, MAX_BITS + 2):
        table = np.random.default_rng(bits).integers(-(1 << bits - 1), 1 << bits - 1, 13)
        data = _pack_cells(table, bits)
        assert len(data) == _size(13, bits) == (13 * (bits // 8) + -(-13 * (bits % 8) // 8))
        assert np.array_equal(_unpack_cells(memoryview(data), 13, bits), table), bits


def changed(offset: int, new: bytes, cut: int = 0) -> bytes:
    """Return a frame of 20 nonzeros among 50 with other bytes in its body, and with a correct checksum."""
    frame = codec("s2").encode(sparse(50, np.arange(0, 40, 2), 1), seed=3)
    start = SECTIONS + 8 + 1 + offset  # after the seed and the number of coordinates
    return reseal(frame[:start] + new + frame[start + max(len(new), cut) :], 50)


@for_each(
    "offset, new",
    [
        (0, b"\x00"),
        (0, b"\x15"),
        (0, b"\x33"),  # number of nonzeros
        (1, b"\x28"),
        (1, b"\x40"),
        (1, b"\xff"),
        (2, b"\x00"),
        (2, b"\x02"),
        (2, b"\x08"),  # form, rows
        (3, b"\x00"),
        (3, b"\x1f"),
        (4, b"\xff\x7f"),
        (4, b"\x00\x80"),
        (6, b"\x00"),
        (6, b"\x40"),
        (6, b"\xff"),  # columns, e, bits
    ],
)
def test_invalid_sections_are_refused(offset, new):
    assert read("s2", changed(0, b"\x14"), 50)
    assert not read("s2", changed(offset, new), 50)
    with pytest.raises(FrameError):
        codec("s2").merge([changed(offset, new), changed(0, b"\x14")])


def test_random_cells_are_decoded():
    noise = np.random.default_rng(1).bytes(60)
    assert read("s2", changed(7, noise), 50)
    # A unit of 2¹²⁷; values are cut off at the largest float32.
    assert read("s2", changed(4, b"\x7f\x00"), 50)


def test_a_table_that_is_too_large_for_the_model_is_not_allocated():
    x = sparse(50, np.arange(0, 40, 2), 1)
    wide = codec("s2:columns=100000000").encode(x)  # more columns than 50 coordinates can need
    assert len(wide) < 8 * 3 * (8 * 50 + 64) and codec("s2").open(wide, 50).missed == 0
    claimed = varint(20) + bytes([0, 3]) + varint(10**9) + bytes([0, 0, 8])
    frame = changed(0, claimed)
    assert peak(lambda: read("s2", frame, 50)) < 200_000 and not read("s2", frame, 50)


def test_a_merged_sum_that_overflows_is_refused():
    x = 3.4e38 * torch.sin(torch.arange(40) + 1.0)
    c = codec("s2")
    assert c.merge([c.encode(x)]) == c.encode(x)
    with pytest.raises(FrameError, match="not finite"):
        c.merge([c.encode(x)] * 2)


def test_a_huge_union_is_limited_to_all_coordinates():
    x = torch.arange(1, 101, dtype=torch.float32)
    assert codec("topk:density=10%+s2:union=1e308").encode(x) == codec(
        "topk:density=10%+s2:union=10"
    ).encode(x)
