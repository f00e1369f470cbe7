"""Count Sketch: buckets and signs, sums and medians."""

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import same_bits

from fedcomp.kernels import count_sketch, philox
from fedcomp.kernels.count_sketch import HALVED, STREAM, UNIT

MASK = 2**32 - 1


def by_hand(seed: int, i: int, row: int, columns: int) -> tuple[int, int]:
    """Return the bucket and the sign of a coordinate, computed with Python integers from the paper on Philox."""
    c, key = [i // 4 & MASK, i // 4 >> 32, STREAM + row, 0], [seed & MASK, seed >> 32]
    for _ in range(10):
        x, y = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [y >> 32 ^ c[1] ^ key[0], y & MASK, x >> 32 ^ c[3] ^ key[1], x & MASK]
        key = [key[0] + 0x9E3779B9 & MASK, key[1] + 0xBB67AE85 & MASK]
    return c[i % 4] * columns >> 32, -1 if c[i % 4] & 1 else 1


def slow(x: np.ndarray, rows: int, columns: int, seed: int) -> np.ndarray:
    cells = np.zeros((rows, columns))
    for r in range(rows):
        for i, value in enumerate(x.tolist()):
            bucket, sign = by_hand(seed, i, r, columns)
            cells[r, bucket] += sign * value
    return cells


def whole(numel: int, seed: int = 0) -> torch.Tensor:
    """Return small integers, whose sums are exact in float32 in any order."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-9, 10, numel).astype(np.float32))


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(numel, np.float32))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (5, 100), (15, 2)])
def test_a_sketch_is_that_of_the_paper(rows, columns):
    for seed, numel in [(0, 1), (2**64 - 1, 3), (17 | 23 << 32, 403)]:
        x = whole(numel)
        cells = count_sketch.sketch(x, rows, columns, seed)
        assert cells.dtype == np.float32 and np.array_equal(
            cells, slow(x.numpy(), rows, columns, seed)
        )
        told = [
            [
                sign * cells[r, bucket]
                for r in range(rows)
                for bucket, sign in [by_hand(seed, i, r, columns)]
            ]
            for i in range(numel)
        ]
        assert np.array_equal(count_sketch.estimates(cells, numel, seed), np.median(told, axis=1))


def test_buckets_and_signs_are_those_of_the_sketch():
    at = np.array([2**40 + 3, 0, 5, 5, 2**34 + 1, 402])
    for r, (buckets, negative) in enumerate(count_sketch.buckets_and_signs(at, 5, 1000, 99)):
        assert buckets.dtype == np.int64 and negative.dtype == np.bool_
        assert list(zip(buckets.tolist(), (1 - 2 * negative).tolist(), strict=True)) == [
            by_hand(99, int(i), r, 1000) for i in at
        ]


@for_each("columns", [2, 64, 1000])
def test_buckets_are_uniform_and_signs_are_balanced(columns):
    n = 200_000
    for buckets, negative in count_sketch.buckets_and_signs(np.arange(n), 5, columns, 7):
        counts = np.bincount(buckets, minlength=columns)
        signed = np.bincount(buckets, 1 - 2 * negative, columns)
        chi2 = (np.square(counts - n / columns) / (n / columns)).sum()
        signed2 = (np.square(signed) / counts).sum()
        assert counts.size == columns
        assert abs(chi2 - (columns - 1)) < 5 * np.sqrt(2 * columns)
        assert abs(signed2 - columns) < 5 * np.sqrt(2 * columns)


def test_coordinates_rows_and_seeds_are_independent():
    """Checks products of two and of four signs, since a sign must be independent of any three others."""
    n, deviation = 100_000, 100_000**-0.5
    (b0, s0), (b1, s1) = [
        (b, 1 - 2 * s) for b, s in count_sketch.buckets_and_signs(np.arange(n), 2, 50, 1)
    ]
    ((b2, s2),) = [
        (b, 1 - 2 * s) for b, s in count_sketch.buckets_and_signs(np.arange(n), 1, 50, 2)
    ]
    for b, s in [
        (b1, s1),
        (b2, s2),
        *((np.roll(b0, lag), np.roll(s0, lag)) for lag in (1, 2, 3, 4, 64, 1024)),
    ]:
        assert abs((s0 * s).mean()) < 5 * deviation
        assert abs((b0 == b).mean() - 1 / 50) < 5 * deviation * np.sqrt(1 / 50)
        assert abs((s0 * s)[b0 == b].mean()) < 5 * deviation * np.sqrt(50)
    for lags in [(1, 2, 3), (4, 8, 12), (1, 4, 5)]:
        assert (
            abs((s0 * np.prod([np.roll(s0, lag) for lag in lags], axis=0)).mean()) < 5 * deviation
        )


def test_a_sketch_is_linear():
    x, y = whole(5001), whole(5001, 1)
    a, b = (count_sketch.sketch(v, 5, 100, 3) for v in (x, y))
    assert np.array_equal(count_sketch.sketch(2 * x - 3 * y, 5, 100, 3), 2 * a - 3 * b)
    x, y = normal(5001), normal(5001, 1)
    a, b = (count_sketch.sketch(v, 5, 100, 3) for v in (x, y))
    assert np.abs(count_sketch.sketch(x + y, 5, 100, 3) - (a + b)).max() < 1e-4


def test_bits_do_not_depend_on_the_number_of_threads(monkeypatch):
    x = normal(HALVED + 5)
    found = []
    for threads in (1, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        cells = count_sketch.sketch(x, 3, 999, 2)
        found.append((cells.ravel(), count_sketch.estimates(cells, x.numel(), 2)))
    assert all(map(same_bits, *found))


def test_estimates_at_positions_equal_those_of_all_coordinates():
    n = 3 * UNIT + 100
    cells = count_sketch.sketch(normal(n), 5, 300, 8)
    whole = count_sketch.estimates(cells, n, 8)
    at = np.random.default_rng(0).permutation(n)
    assert same_bits(count_sketch.estimates_at(cells, at, 8), whole[at])


def test_a_sparse_vector_is_sketched_by_its_positions():
    x = whole(5001) * (torch.arange(5001) % 7 == 0)
    at = x.numpy().nonzero()[0][::-1].copy()
    assert np.array_equal(
        count_sketch.sketch_at(at, x.numpy()[at], 5, 100, 4), count_sketch.sketch(x, 5, 100, 4)
    )
    empty = count_sketch.sketch_at(at[:0], x.numpy()[:0], 3, 10, 4)
    assert empty.shape == (3, 10) and not empty.any()


@for_each("numel", [401, HALVED + 5])
def test_other_precisions_and_strides_give_the_same_sketch(numel):
    grid = normal(3 * numel).view(numel, 3)
    for x in (
        grid[:, 1],
        grid[:, 1].clone().requires_grad_(),
        grid[:, 0].to(torch.float16),
        grid[:, 2].to(torch.bfloat16),
    ):
        before = x.detach().clone()
        assert same_bits(
            count_sketch.sketch(x, 1, 50, 6),
            count_sketch.sketch(before.float().contiguous(), 1, 50, 6),
        )
        assert torch.equal(x, before)


def test_cells_that_exceed_float32_are_cut_off():
    x = torch.full((50,), 3.4e38)
    cells = count_sketch.sketch(x, 5, 1, 0)
    largest = np.finfo(np.float32).max
    assert (
        np.array_equal(cells, slow(x.numpy(), 5, 1, 0).clip(-largest, largest).astype(np.float32))
        and np.abs(cells).max() == largest
    )
    assert same_bits(count_sketch.sketch_at(np.arange(50), x.numpy(), 5, 1, 0), cells)


def test_heavy_hitters_have_the_largest_estimates():
    x = normal(20_000)
    heavy = np.random.default_rng(1).permutation(20_000)[:20]
    x[heavy] = 60 * torch.from_numpy(
        np.random.default_rng(2).choice([-1.0, 1.0], 20).astype(np.float32)
    )
    found = count_sketch.estimates(count_sketch.sketch(x, 5, 2000, 5), 20_000, 5)
    assert set(np.argsort(-np.abs(found))[:20]) == set(heavy)
    assert np.abs(found[heavy] - x.numpy()[heavy]).max() < 5 * np.sqrt(20_000 / 2000)


def test_words_at_positions_are_those_of_the_stream():
    drawn = philox.words(2**63 + 9, 4001, stream=5)
    at = np.random.default_rng(0).integers(0, 4001, 999)
    assert np.array_equal(philox.words_at(2**63 + 9, at, 5), drawn[at])
    assert np.array_equal(philox.words_at(1, np.array([2**34 + 2])), philox.words(1, 1, 2**34 + 2))
