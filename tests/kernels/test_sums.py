"""Norms are exact sums that are rounded once, in any order and by every implementation. Sums of columns have a fixed order."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import vectors
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_threads import torch_threads

from fedcomp.kernels import sums

SIZES = (0, 1, 7, 63, 64, 65, 401)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def normal(numel: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal(numel, np.float32))


def line(x: Tensor) -> float:
    return math.fsum(abs(v) for v in x.tolist())


def squares(x: Tensor) -> list[float]:
    """Return the squares in float64, which holds the square of a float32 exactly."""
    return (x.double() ** 2).tolist()


def is_root(root: float, total: Fraction) -> bool:
    """Return whether `root` is the float64 nearest to √total."""
    below, above = (
        (Fraction(root) + Fraction(math.nextafter(root, way))) / 2 for way in (0.0, math.inf)
    )
    return root == total == 0 or below**2 <= total <= above**2


def assert_exact(x: Tensor) -> None:
    for power in (1, 2):  # unrounded sums, since rounding could hide a lost bit
        assert sums._sums(x[None], power) == [
            sum(abs(Fraction(v)) ** power for v in x.tolist()) * 2 ** (sums.UNIT * power)
        ]
    assert sums.norm1(x) == line(x)
    assert sums.sum_squares(x) == math.fsum(squares(x))
    assert is_root(sums.norm2(x), sum(map(Fraction, squares(x)), Fraction()))


def test_norms_of_hard_vectors_are_exact():
    for numel in SIZES:
        for x in vectors(numel).values():
            assert_exact(x)


@for_each("value", [2.0**-149, 2.0**-126, 1.0, 2.0**127, float(np.finfo(np.float32).max)])
def test_norms_of_the_largest_and_smallest_values_are_exact(value):
    for numel in (1, 64, 1000):
        x = torch.full((numel,), value)
        assert_exact(x)
        assert_exact(torch.cat([x, torch.tensor([2.0**-149, -3 * 2.0**-149, 1.0])]))
    assert sums.norm2(torch.tensor([value])) == value


@for_each("apart", [10, 11, 12, 13, 22, 23, 24, 40])
def test_no_bit_is_lost_if_exponents_are_far_apart(apart):
    """All bits of the significands are 1."""
    for numel in (2, 31, 32, 64, 65):
        for few in (slice(0, 1), slice(1, None), slice(None, None, 2)):
            x = torch.full((numel,), float(2**24 - 1))
            x[few] *= -(2.0**-apart)
            assert_exact(x)


def test_a_root_near_the_middle_of_two_numbers_is_rounded_to_the_nearer_one():
    middle = (2**53 + 1 << 20) ** 2  # the square of a number in the middle between two float64
    for total, root in [(middle - 1, 2**53), (middle, 2**53), (middle + 1, 2**53 + 2)]:
        assert sums._root(total) / 2**sums.ROOT_BITS == root * 2.0**20


@given(st.lists(finite, max_size=80), st.integers(0, 5))
def test_norms_of_any_vectors_are_exact_in_any_order(values, shift):
    x = torch.tensor(values)
    assert_exact(x)
    assert sums.norm1(x.roll(shift)) == sums.norm1(x) == sums.norm1(-x.flip(0))
    assert sums.norm2(x.roll(shift)) == sums.norm2(x) == sums.norm2(-x.flip(0))


def test_small_numbers_are_not_lost_beside_large_ones():
    x = torch.full((2**12,), 2.0**-100)
    x[0] = 2.0**-40
    assert sums.norm1(x) == 2.0**-40 + 4095 * 2.0**-100 != 2.0**-40
    # Above the range of float32.
    assert sums.norm2(torch.tensor([3e38, 4e38 / 2, 0.0])) > 3.4028235e38


@pytest.mark.slow
def test_the_norm_of_a_large_vector_does_not_depend_on_the_number_of_threads():
    x = normal(2**21 + 77) ** 5  # two million elements are divided among threads
    x[::9] = 0
    exact, half, square = line(x), line(x[::2]), math.fsum(squares(x))
    for count in (1, 2, 3):
        with torch_threads(count):
            assert sums.norm1(x) == sums.norm1(x.clone().requires_grad_()) == exact
            assert sums.norm1(x[::2]) == half and sums.sum_squares(x) == square


@for_each("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_its_float32_values(dtype):
    x = vectors(401)["heavy tails"].clip(-6e4, 6e4).to(dtype)
    assert_exact(x.float())
    assert sums.norm1(x) == sums.norm1(x.float()) and sums.norm2(x) == sums.norm2(x.float())


@for_each("shape", [(0, 5), (3, 0), (1, 1), (5, 401)])
def test_norms_of_rows_equal_those_of_single_vectors(shape):
    stack = vectors(math.prod(shape))["all scales"].reshape(shape)
    for X in (stack, stack.T.contiguous().T):
        norms = sums.norm1_rows(X)
        assert norms.dtype == np.float64 and norms.tolist() == [sums.norm1(x) for x in X]


def test_norms_of_long_rows_in_several_pieces_are_exact(monkeypatch):
    X = vectors(2005)["all scales"].reshape(5, 401)
    whole = sums.norm1_rows(X)
    monkeypatch.setattr(sums, "PIECE", 35)
    assert np.array_equal(whole, sums.norm1_rows(X))


@for_each("power", [1, 2])
def test_arrays_and_tensors_are_summed_alike(power):
    v = torch.stack(list(vectors(401).values())).double().abs() ** power
    for a, b in zip(sums._exact_sums(v.numpy().copy()), sums._exact_sums(v), strict=True):
        assert np.array_equal(a, b.numpy())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a CPU with a CUDA device")
def test_a_cuda_device_gives_the_same_norms():
    x = normal(2**21 + 77) ** 5
    assert sums.norm1(x.cuda()) == sums.norm1(x) and sums.norm2(x.cuda()) == sums.norm2(x)


# Sums of columns by sign.


def plain_sides(x: np.ndarray, columns: int) -> tuple[list[list[float]], list[list[int]]]:
    sides = [
        [[v for v in column if (v < 0) == below] for column in x.reshape(-1, columns).T.tolist()]
        for below in (False, True)
    ]
    return [[math.fsum(side) for side in row] for row in sides], [
        [len(side) for side in row] for row in sides
    ]


@for_each("rows, columns", [(1, 1), (64, 1), (401, 1), (2, 200), (7, 3), (700, 3), (70, 1030)])
def test_sums_and_counts_of_columns_by_sign_match_a_plain_loop(rows, columns):
    for name, x in (
        vectors(rows * columns).items()
        if rows * columns < 9999
        else [("normal", normal(rows * columns))]
    ):
        totals, counts = sums.column_sides(x, columns)
        exact, numbers = plain_sides(x.numpy(), columns)
        assert totals.shape == counts.shape == (2, columns) and totals.dtype == np.float64
        assert np.allclose(totals, exact, rtol=1e-12, atol=0) and counts.tolist() == numbers, name


@pytest.mark.parametrize("columns", [2, 3, 64, 100, 1000, 90_000])
def test_columns_are_summed_row_by_row(columns):
    x = normal(columns * (2_300_000 // columns)) ** 5
    totals, _ = sums.column_sides(x, columns)
    grid, high = x.double().numpy().reshape(-1, columns), max(64, 2**16 // columns)
    for side, found in zip((grid.clip(0), grid.clip(max=0)), totals, strict=True):
        stretches = [side[at : at + high].cumsum(0)[-1] for at in range(0, len(side), high)]
        assert np.array_equal(found, np.cumsum(stretches, 0)[-1])


def test_zeros_of_either_sign_are_not_negative():
    totals, counts = sums.column_sides(torch.tensor([0.0, -0.0, -1.0, 0.0]), 2)
    assert totals.tolist() == [[0, 0], [-1, 0]] and counts.tolist() == [[1, 2], [1, 0]]
    assert not np.signbit(totals[0]).any() and not np.signbit(totals[1, 1])
