import numpy as np
import pytest
import torch
from cases import for_each

from fedcomp.kernels import add_all_at, all_finite


def add_at(into, positions, values, weight):
    add_all_at(into, [positions], [values], [weight])


def sample(n, count, seed=0):
    draw = np.random.default_rng(seed)
    positions = np.sort(draw.choice(n, count, replace=False)).astype(np.int64)
    return (
        torch.from_numpy(draw.standard_normal(n, np.float32)),
        positions,
        draw.standard_normal(count, np.float32),
    )


@pytest.mark.parametrize("count", [700, 1500])
@pytest.mark.parametrize("weight", [1.0, -1.0, 0.1, 1 / 3])
def test_the_product_is_rounded_before_the_sum(weight, count):
    into, positions, values = sample(5000, count)
    expected = into.numpy().copy()
    for position, value in zip(positions, values):
        expected[position] = np.float32(expected[position] + np.float32(np.float32(weight) * value))
    add_at(into, positions, values, weight)
    assert into.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -np.nan])
def test_a_single_number_that_is_not_finite_is_found(bad):
    values = np.full(701, np.finfo(np.float32).max, np.float32)
    assert all_finite(values) and all_finite(values[:0]) and all_finite(-values)
    values[700] = bad
    assert not all_finite(values) and not all_finite(
        np.frombuffer(b"-" + values.tobytes(), np.float32, offset=1)
    )


def test_values_are_added_in_place_to_a_slice_of_a_vector():
    base, positions, values = sample(100, 10)
    before = base.clone()
    add_at(base[50:70], np.array([0, 19]), np.array([1, 2], np.float32), 2.0)
    assert (base - before).nonzero().flatten().tolist() == [50, 69]


def test_empty_updates_add_nothing():
    into = torch.ones(3)
    add_at(into, np.empty(0, np.int64), np.empty(0, np.float32), 5.0)
    add_at(torch.empty(0), np.empty(0, np.int64), np.empty(0, np.float32), 5.0)
    assert into.tolist() == [1, 1, 1]


@pytest.mark.parametrize("positions", [[0, 3], [-1, 1], [2**40]])
def test_positions_out_of_range_are_refused_and_nothing_is_added(positions):
    into = torch.ones(3)
    with pytest.raises(IndexError, match="vector of 3"):
        add_at(into, np.array(positions), np.ones(len(positions), np.float32), 1.0)
    assert into.tolist() == [1, 1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_adds_the_same_as_the_cpu():
    into, positions, values = sample(5000, 700)
    on_cuda = into.cuda()
    add_at(into, positions, values, 1 / 3)
    add_at(on_cuda, positions, values, 1 / 3)
    assert torch.equal(on_cuda.cpu(), into)


@pytest.mark.parametrize(
    "counts", [(), (0, 0), (7, 7, 7), (0, 3, 70, 1), (5, 5, 0), (70, 500, 3), (1200, 0, 3)]
)
def test_many_updates_are_added_like_one_after_the_other(counts):
    """The results are bit-identical, also if several updates have the same position."""
    into, updates, weights = torch.randn(1300), [], [1 / (3 + i) for i in range(len(counts))]
    for i, count in enumerate(counts):
        _, positions, values = sample(1300, count, i)
        updates.append((positions, values))
    expected = into.clone()
    for (positions, values), weight in zip(updates, weights, strict=True):
        add_at(expected, positions, values, weight)
    add_all_at(
        into, [positions for positions, _ in updates], [values for _, values in updates], weights
    )
    assert into.numpy().tobytes() == expected.numpy().tobytes()


@for_each("positions", [[0, 3], [-1, 1], [2**40]])
def test_no_update_is_added_if_one_is_out_of_range(positions):
    into = torch.ones(3)
    with pytest.raises(IndexError, match="vector of 3"):
        add_all_at(
            into,
            [np.array([0]), np.array(positions)],
            [np.ones(1, np.float32), np.ones(len(positions), np.float32)],
            [1.0, 1.0],
        )
    assert into.tolist() == [1, 1, 1]
