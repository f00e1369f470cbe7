import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import kernels
from fedcomp.kernels import select

PATHS = ("numpy", "torch")


@contextmanager
def path(name):
    """Use one implementation for all vectors: numpy, or torch as on an accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "torch":
            patch.setattr(select, "_on_cpu", lambda x: False)
        yield


def largest(values, k):
    """Return the expected selection by a sort by value, then by position. Only values above zero are selected."""
    values = np.asarray(values, np.float64)
    order = sorted(range(values.size), key=lambda i: (-values[i], i))
    return sorted(i for i in order[:k] if values[i] > 0)


def top_k(x, k):
    return kernels.top_k([x], k).positions


def top_side(x, k):
    return kernels.top_side([x], k).positions


def at_least(x, threshold):
    return kernels.at_least([x], threshold).positions


few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-45, 1e-38, 3.4e38])
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.lists(st.one_of(few, numbers), max_size=200) | st.lists(few, max_size=200)
tensors = vectors.map(lambda values: torch.tensor(values, dtype=torch.float32))
counts = st.integers(0, 220)


@pytest.mark.parametrize("way", PATHS)
@given(tensors, counts)
def test_top_k_equals_the_selection_by_a_sort(way, x, k):
    with path(way):
        positions = top_k(x, k)
    assert positions.dtype == torch.int64
    assert positions.tolist() == largest(x.abs(), k)


@pytest.mark.parametrize("way", PATHS)
@given(tensors, counts)
def test_top_side_is_the_side_with_the_larger_mean(way, x, k):
    up, down = largest(x, k), largest(-x, k)
    mean_up, mean_down = (
        sum(abs(x[i].item()) for i in side) / max(1, len(side)) for side in (up, down)
    )
    with path(way):
        positions = top_side(x, k)
    assert positions.tolist() == (up if mean_up >= mean_down else down)


@for_each("way", PATHS)
@for_each("k", [0, 1, 3, 10])
def test_rows_are_selected_like_single_vectors(way, k):
    X = torch.randn(6, 14, generator=torch.Generator().manual_seed(1))[:, ::2]
    X[1], X[2], X[3], X[4] = 0, 1, -1, X[4].sign()
    with path(way):
        for select_rows in (kernels.top_k, kernels.top_side):
            for rows in (X, list(X)):
                chosen = select_rows(rows, k)
                alone = [select_rows([x], k).positions for x in X]
                assert chosen.positions.tolist() == torch.cat(alone).tolist()
                assert chosen.counts.tolist() == list(map(len, alone))
                assert kernels.values_at(rows, chosen).tolist() == [
                    x[i].item() for x, at in zip(X, alone, strict=True) for i in at
                ]


def test_no_rows_select_nothing():
    for choose in (kernels.top_k, kernels.top_side):
        chosen = choose(torch.empty(0, 5), 2)
        assert chosen.positions.numel() == chosen.counts.size == 0
    assert kernels.are_finite(torch.empty(0, 5)) == []


def patterns(n):
    """Return vectors that together use every branch of the search for large vectors."""
    draw = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=draw)
    yield "normal", x
    yield "two layers", torch.where(torch.arange(n) < n // 8, 100 * x, x)
    yield "all equal", torch.full((n,), -0.5)
    yield "few values", torch.randint(-3, 4, (n,), generator=draw).float()
    yield "zeros", torch.zeros(n)
    yield "one spike", torch.zeros(n).index_fill_(0, torch.tensor(n - 1), 1e-45)
    yield "mostly zero", torch.where(x > 3, x, 0)
    yield "denormal", x * 1e-40
    yield "ascending", torch.arange(n).float()
    yield "the sample misses all", torch.where(torch.arange(n) // 32 % 32 == 0, 1e-3 * x, x)
    yield "the sample sees all", torch.where(torch.arange(n) // 32 % 32 == 0, 1e3 * x, x)


@pytest.mark.slow
@pytest.mark.parametrize("n", [100_001, 2_200_000])
def test_large_vectors_are_selected_like_small_vectors(n):
    for name, x in patterns(n):
        for k in (n // 400,) if n > 1_000_000 else (0, 1, n // 1000, n // 20, 2 * n):
            with path("torch"):
                expected = top_k(x, k)
            assert torch.equal(top_k(x, k), expected), (name, k)


@pytest.mark.parametrize("k", [1, 1000, 400_000])
def test_sides_of_large_vectors_are_selected_like_those_of_small_vectors(k):
    for name, x in patterns(300_000):
        with path("torch"):
            positions = top_side(x, k)
        assert torch.equal(top_side(x, k), positions), name


@for_each("k", [0, 1, 30, 2000])
def test_many_rows_are_selected_like_single_vectors(k):
    X = torch.stack([x for _, x in patterns(3000)] * 4)
    for select_rows in (kernels.top_k, kernels.top_side):
        with path("torch"):
            expected = select_rows(X, k)
            values = kernels.values_at(X, expected)
        for rows in (X, list(X)):
            chosen = select_rows(rows, k)
            assert torch.equal(chosen.positions, expected.positions)
            assert chosen.counts.tolist() == expected.counts.tolist()
            assert torch.equal(kernels.values_at(rows, chosen), values)


@for_each("n", [3000, 200_000])
@for_each("bad", [math.nan, math.inf, -math.inf])
def test_only_finite_sums_are_added(n, bad):
    rows, onto = torch.ones(40, n), [torch.full((n,), 2.0) for _ in range(40)]
    rows[7, n - 1], onto[9][0], rows[9, 0] = bad, 3e38, 3e38
    sums, finite = kernels.add_finite(onto, rows)
    assert [i for i, fine in enumerate(finite) if not fine] == [7, 9]
    for i, total in enumerate(onto):
        assert total[1] == (3.0 if finite[i] else 2.0)
        assert not finite[i] or torch.equal(sums[i], total)
    assert kernels.are_finite(rows) == [i != 7 for i in range(40)]


def test_large_rows_are_selected_like_single_vectors():
    X = torch.randn(2, 120_000)
    positions, counts = kernels.top_k(X, 50)
    assert positions.tolist() == [*top_k(X[0], 50).tolist(), *top_k(X[1], 50).tolist()]
    assert counts.tolist() == [50, 50]
    assert kernels.top_side(X, 50).positions[50:].tolist() == top_side(X[1], 50).tolist()


@for_each("dtype", [torch.float16, torch.bfloat16, torch.float64])
@for_each("n", [7, 300_000])
def test_other_floats_are_selected_as_float32(dtype, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    k = 1 + n // 500
    assert torch.equal(top_k(x, k), top_k(x.float(), k))
    assert torch.equal(top_side(x, k), top_side(x.float(), k))


@for_each("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_vectors_that_are_not_finite_are_found(bad):
    for n in (3, 120_000):
        for at in (0, n // 2, n - 1):
            e, x = torch.randn(n), torch.randn(n)
            x[at] = bad
            assert kernels.are_finite(torch.stack([e, x])) == [True, False]


@for_each("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_finite_vectors_are_recognized(dtype):
    assert kernels.are_finite(torch.ones(2, 5, dtype=dtype)) == [True, True]


def test_means_are_summed_in_order_and_the_mean_of_no_values_is_zero():
    values = np.array([1e8, 1.0, -1e8, 3.0], np.float32)
    assert kernels.means(values, np.array([4])).tolist() == [(((1e8 + 1.0) - 1e8) + 3.0) / 4]
    assert kernels.means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([2, 0, 1])).tolist() == [
        2,
        0,
        5,
    ]


thresholds = st.sampled_from([1e-45, 1e-38, 0.3, 1.0, 2.0, 3.4e38])


@pytest.mark.parametrize("way", PATHS)
@given(tensors, thresholds)
def test_at_least_selects_values_that_reach_a_threshold(way, x, threshold):
    with path(way):
        positions = at_least(x, threshold)
        columns, found = kernels.at_least(torch.stack([x, -x]), threshold)
    expected = [i for i, v in enumerate(x.tolist()) if abs(v) >= float(np.float32(threshold))]
    assert positions.dtype == torch.int64 and positions.tolist() == expected
    assert columns.tolist() == 2 * expected
    assert found.tolist() == [len(expected)] * 2


@pytest.mark.parametrize("n", [100_001, 2_200_000])
def test_at_least_selects_from_large_vectors_like_from_small_ones(n):
    for name, x in patterns(n):
        for threshold in (1e-45, 0.5, 2.6) if n < 1_000_000 else (2.6,):
            found = at_least(x, threshold)
            assert torch.equal(found, (x.abs() >= threshold).nonzero().flatten()), (name, threshold)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@for_each("n", [7, 300_000])
def test_cuda_selects_the_same_as_the_cpu(n):
    for name, x in patterns(n):
        k = 1 + n // 400
        assert torch.equal(top_k(x.cuda(), k).cpu(), top_k(x, k)), name
        assert torch.equal(top_side(x.cuda(), k).cpu(), top_side(x, k)), name
        assert kernels.are_finite((x / 0).cuda()[None]) == [False]
