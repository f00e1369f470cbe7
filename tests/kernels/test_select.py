import sys
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from cases import for_each
from forks import FORKS
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import kernels
from fedcomp.errors import NonFiniteError
from fedcomp.kernels import backend, select

PATHS = ("numpy", "numba", "torch")


@contextmanager
def path(name):
    """Every vector goes one way: numpy, numba, or torch as on an accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "LARGE", 1 if name == "numba" else sys.maxsize)
        if name == "torch":
            patch.setattr(select, "_on_cpu", lambda x: False)
        yield


def largest(values, k):
    """The oracle: sort by value, then by position; values above zero only."""
    values = np.asarray(values, np.float64)
    order = sorted(range(values.size), key=lambda i: (-values[i], i))
    return sorted(i for i in order[:k] if values[i] > 0)


def top_k(x, k, onto=None):
    return kernels.top_k([x], k, None if onto is None else [onto]).positions


def top_side(x, k, onto=None):
    return kernels.top_side([x], k, None if onto is None else [onto]).positions


def at_least(x, threshold, onto=None):
    return kernels.at_least([x], threshold, None if onto is None else [onto]).positions


def bits(x):
    return x.view(torch.int32).tolist()


few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-45, 1e-38, 3.4e38])
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.lists(st.one_of(few, numbers), max_size=200) | st.lists(few, max_size=200)
tensors = vectors.map(lambda values: torch.tensor(values, dtype=torch.float32))
counts = st.integers(0, 220)


@pytest.mark.parametrize("way", PATHS)
@given(tensors, counts)
def test_top_k_is_what_a_sort_gives(way, x, k):
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
def test_rows_are_selected_as_single_vectors_are(way, k):
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
    """Vectors that take every way through the search on large ones."""
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
@pytest.mark.parametrize("n", [100_001, 4_200_000])
def test_large_vectors_are_selected_as_small_ones_are(n):
    for name, x in patterns(n):
        for k in (n // 400,) if n > 1_000_000 else (0, 1, n // 1000, n // 20, 2 * n):
            with path("numpy"):
                expected = top_k(x, k)
            assert torch.equal(top_k(x, k), expected), (name, k)


@pytest.mark.parametrize("k", [1, 1000, 400_000])
def test_large_sides_are_selected_as_small_ones_are(k):
    for name, x in patterns(300_000):
        e = x.clone()
        with path("numpy"):
            positions = top_side(x, k)
        assert torch.equal(top_side(torch.zeros_like(x), k, e), positions), name
        assert torch.equal(e, x), name


def test_large_rows_are_selected_as_single_vectors_are():
    X = torch.randn(2, 120_000)
    positions, counts = kernels.top_k(X, 50)
    assert positions.tolist() == [*top_k(X[0], 50).tolist(), *top_k(X[1], 50).tolist()]
    assert counts.tolist() == [50, 50]
    assert kernels.top_side(X, 50).positions[50:].tolist() == top_side(X[1], 50).tolist()


@for_each("dtype", [torch.float16, torch.bfloat16, torch.float64])
@for_each("n", [7, 300_000])
def test_other_floats_are_selected_as_float32(dtype, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    k, e = 1 + n // 500, torch.ones(n)
    assert torch.equal(top_k(x, k), top_k(x.float(), k))
    assert torch.equal(top_k(x, k, e), top_k(1 + x.float(), k))
    assert torch.equal(e, 1 + x.float())
    assert torch.equal(top_side(x, k), top_side(x.float(), k))


@pytest.mark.parametrize("way", PATHS)
@given(tensors, counts, st.data())
def test_adding_selects_from_the_sum(way, x, k, data):
    e = torch.tensor(
        data.draw(st.lists(few, min_size=len(x), max_size=len(x))), dtype=torch.float32
    )
    total, before = e + x, e.clone()
    with path(way):
        if total.isfinite().all():
            assert top_k(x, k, e).tolist() == largest(total.abs(), k)
            assert bits(e) == bits(total)
        else:
            with pytest.raises(NonFiniteError):
                top_k(x, k, e)
            assert bits(e) == bits(before)


@for_each("n", [1, 7, 1000, 150_000, 2_500_000])
def test_views_and_strides_are_added_to_in_place(n):
    x, base = torch.randn(2 * n)[::2], torch.randn(2 * n + 1)
    strided, tail = base.clone()[1::2], base.clone()[n + 1 :]
    for e in (strided, tail):
        total = e + x
        assert torch.equal(top_k(x, n, e), top_k(total, n))
        assert torch.equal(e, total)


@for_each("n", [3, 120_000, 2_200_000])
@for_each("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_and_the_residual_untouched(bad, n):
    for at in (0, n // 2, n - 1) if n < 1_000_000 else (n // 2,):
        e, x = torch.randn(n), torch.randn(n)
        x[at] = x[n - 1] = bad
        before = e.clone()
        for call in (top_k, top_side, at_least):
            with pytest.raises(
                NonFiniteError, match=f"the update is .* at position {at};"
            ) as caught:
                call(x, 1 + n // 1000, e)
            assert caught.value.position == at
            assert torch.equal(e.view(torch.int32), before.view(torch.int32))
        for call in (top_k, top_side, at_least):
            with pytest.raises(NonFiniteError):
                call(x, 1)
        assert kernels.first_nonfinite(x) == at
        assert kernels.are_finite(torch.stack([e, x])) == [True, False]


@for_each("n", [2, 200_000])
def test_a_sum_that_overflows_is_refused(n):
    e, x = torch.full((n,), 3e38), torch.zeros(n)
    x[n - 1] = 3e38
    for call in (top_k, top_side):
        with pytest.raises(
            NonFiniteError, match=f"the residual with the update added is inf at position {n - 1};"
        ):
            call(x, 1, e)
    assert torch.equal(e, torch.full((n,), 3e38))


@for_each("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_finite_vector_has_no_first_nonfinite_position(dtype):
    assert kernels.first_nonfinite(torch.ones(5, dtype=dtype)) is None
    assert kernels.first_nonfinite(torch.empty(0, dtype=dtype)) is None
    assert kernels.are_finite(torch.ones(2, 5, dtype=dtype)) == [True, True]


def test_means_are_summed_in_order_and_none_is_zero():
    values = np.array([1e8, 1.0, -1e8, 3.0], np.float32)
    assert kernels.means(values, np.array([4])).tolist() == [(((1e8 + 1.0) - 1e8) + 3.0) / 4]
    assert kernels.means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([2, 0, 1])).tolist() == [
        2,
        0,
        5,
    ]


@pytest.mark.parametrize("n", [100_000, 1_000_000, 4_200_000])
def test_selection_takes_a_quarter_of_the_vectors_memory(n):
    e = torch.zeros(n)
    top_k(e, 1, e)  # loads the compiled loops
    for name, x in patterns(n):
        for k in (1, n // 100) if n <= 1_000_000 else (n // 400,):
            e.zero_()
            tracemalloc.start()
            top_k(x, k, e)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < n, (
                name,
                k,
            )  # of 4n bytes; numpy makes every large array here, and reports it


thresholds = st.sampled_from([1e-45, 1e-38, 0.3, 1.0, 2.0, 3.4e38])


@pytest.mark.parametrize("way", PATHS)
@given(tensors, thresholds)
def test_what_reaches_a_threshold(way, x, threshold):
    with path(way):
        positions = at_least(x, threshold)
        columns, found = kernels.at_least(torch.stack([x, -x]), threshold)
    expected = [i for i, v in enumerate(x.tolist()) if abs(v) >= float(np.float32(threshold))]
    assert positions.dtype == torch.int64 and positions.tolist() == expected
    assert columns.tolist() == 2 * expected
    assert found.tolist() == [len(expected)] * 2


@pytest.mark.parametrize("way", PATHS)
@given(tensors, thresholds, st.data())
def test_adding_finds_what_reaches_a_threshold_in_the_sum(way, x, threshold, data):
    e = torch.tensor(
        data.draw(st.lists(few, min_size=len(x), max_size=len(x))), dtype=torch.float32
    )
    total, before = e + x, e.clone()
    with path(way):
        if total.isfinite().all():
            assert torch.equal(at_least(x, threshold, e), at_least(total, threshold))
            assert bits(e) == bits(total)
        else:
            with pytest.raises(NonFiniteError):
                at_least(x, threshold, e)
            assert bits(e) == bits(before)


@pytest.mark.parametrize("n", [100_001, 4_200_000])
def test_large_vectors_reach_a_threshold_where_small_ones_do(n):
    e = torch.zeros(n)
    for name, x in patterns(n):
        for threshold in (1e-45, 0.5, 2.6) if n < 1_000_000 else (2.6,):
            found = at_least(x, threshold, e.zero_())
            assert torch.equal(found, (x.abs() >= threshold).nonzero().flatten()), (name, threshold)
            assert torch.equal(e, x), name


def test_a_threshold_takes_a_quarter_of_the_vectors_memory_beside_its_result():
    e, x = torch.zeros(1_000_000), torch.randn(1_000_000)
    at_least(e, 1.0, e)  # loads the compiled loops
    for threshold in (1e-45, 1.0, 3.0):
        e.zero_()
        tracemalloc.start()
        found = at_least(x, threshold, e)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000 + 8 * len(found), threshold


@pytest.mark.deploy
def test_numba_is_imported_with_the_first_large_vector():
    script = """if True:
        import sys, torch
        from fedcomp import kernels
        kernels.rice.pack(kernels.top_k([torch.ones(1000)], 100).positions.numpy(), 3)
        assert "numba" not in sys.modules
        kernels.top_k([torch.ones(100_000)], 1)
        assert "numba" in sys.modules
    """
    process = FORKS.Process(target=exec, args=(script, {}))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_without_numba_large_vectors_give_the_same(monkeypatch):
    x = torch.randn(150_000)
    expected = top_k(x, 300)
    monkeypatch.setattr(backend, "_numba_imports", lambda: False)
    assert torch.equal(top_k(x, 300), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@for_each("n", [7, 300_000])
def test_cuda_selects_what_the_cpu_does(n):
    for name, x in patterns(n):
        e = torch.zeros(n, device="cuda")
        k = 1 + n // 400
        assert torch.equal(top_k(x.cuda(), k, e).cpu(), top_k(x, k)), name
        assert torch.equal(e.cpu(), x), name
        assert torch.equal(top_side(x.cuda(), k).cpu(), top_side(x, k)), name
        assert kernels.are_finite((x / 0).cuda()[None]) == [False]
