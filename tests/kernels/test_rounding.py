"""Stochastic rounding: the random words of a coordinate, and its mean over seeds."""

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import vectors
from torch_threads import torch_threads

from fedcomp.errors import FrameError
from fedcomp.kernels import philox, rounding

SEEDS = 400
KINDS = (
    "normal",
    "ties",
    "one spike",
    "denormal",
    "tiny",
    "huge",
    "all scales",
    "minus zero",
    "constant",
)


def draws(x: torch.Tensor, round) -> np.ndarray:
    """Return round(seed) for many seeds, float64 [seeds, n]."""
    return np.stack([round(seed).astype(np.float64) for seed in range(SEEDS)])


def assert_unbiased(drawn: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> None:
    """Assert that each coordinate's mean is within five standard errors of its value, and that the sum of errors is as expected."""
    off = drawn.mean(0) - mean
    assert (np.abs(off) <= 5 * np.sqrt(variance / SEEDS) + 2.0**-20 * np.abs(mean)).all()
    drawing = variance > 1e-9 * (variance.max() + 1e-300)
    z = off[drawing] / np.sqrt(variance[drawing] / SEEDS)
    assert abs(np.square(z).sum() - z.size) <= 6 * np.sqrt(2 * z.size)


def test_a_multiple_is_the_floor_of_the_quotient_plus_a_random_word():
    x = torch.tensor([0.0, -0.0, 0.3, -0.3, 1.0, -2.5, 6.9, 7.0])
    for seed in (0, 5, 2**64 - 1):
        u = philox.words(seed, 8) / 2.0**32
        expected = np.sign(x.numpy()) * np.floor(np.abs(x.double().numpy()) / 0.5 + u)
        assert rounding.to_multiples(x, 0.5, 7.0, seed).tolist() == expected.tolist()


@for_each("unit", [4915 / 2**14, 3 * 2.0**-149, 2.0**-140, 5 * 2.0**100])
def test_whole_multiples_are_unchanged(unit):
    whole = np.arange(-1000, 1001)
    x = torch.from_numpy((unit * whole).astype(np.float32))
    for seed in range(20):
        assert np.array_equal(rounding.to_multiples(x, unit, 1001 * unit, seed), whole)


def test_larger_values_are_cut_off():
    x = torch.tensor([1e30, -3.4e38, 126.5, 127.0])
    for seed in range(20):
        assert rounding.to_multiples(x, 1.0, 127.0, seed).tolist()[:2] == [127, -127]
        assert rounding.to_multiples(x, 1.0, 126.0, seed).tolist() == [126, -126, 126, 126]


@for_each(
    "unit, limit, kind",
    [(1.0, 127.0, np.int8), (1.0, 127.5, np.int16), (2.0**-149, 2.0**-149, np.int8)],
)
def test_results_have_the_narrowest_sufficient_integer_type(unit, limit, kind):
    assert rounding.to_multiples(torch.full((5,), 3e38), unit, limit, 1).dtype == kind


@for_each("kind", ["normal", "denormal", "all scales", "huge"])
def test_multiples_are_unbiased(kind):
    x = vectors(200)[kind]
    v, unit = x.double().numpy(), rounding.largest(x) / 3
    share = np.abs(v) / unit % 1
    assert_unbiased(
        unit * draws(x, lambda seed: rounding.to_multiples(x, unit, 3 * unit, seed)),
        v,
        unit**2 * share * (1 - share),
    )


@for_each("kind", ["normal", "denormal", "all scales", "huge"])
def test_powers_are_unbiased(kind):
    x = vectors(200)[kind]
    shift = rounding.max_shift(rounding.largest(x))
    codes = draws(x, lambda seed: rounding.to_powers(x, shift, seed))
    v = np.abs(x.double().numpy())
    low = 2.0 ** np.floor(np.log2(v, where=v > 0, out=np.full(v.size, -200.0)))
    assert_unbiased(
        np.ldexp(1.0, (codes - 127 - shift).astype(int)) * (codes > 0),
        v,
        (v - low).clip(0) * (2 * low - v).clip(0),
    )


@for_each("kind", ["normal", "denormal", "all scales", "huge"])
def test_levels_are_unbiased_within_their_range(kind):
    x = vectors(200)[kind]
    v = x.double().numpy()
    levels = np.unique(np.quantile(x.numpy(), [0, 0.1, 0.5, 0.51, 0.9, 1]).astype(np.float32))
    codes = draws(x, lambda seed: rounding.to_levels(x, levels, False, seed)).astype(int)
    cell = np.searchsorted(levels[1:-1], v, side="right")
    low, high = levels.astype(np.float64)[cell], levels.astype(np.float64)[cell + 1]
    assert_unbiased(levels.astype(np.float64)[codes], v, (v - low) * (high - v))


def test_values_are_rounded_to_the_nearest_level_and_cut_off_at_the_ends():
    levels = np.array([-1.0, 0.0, 0.5, 3.0], np.float32)
    x = torch.tensor([-9.0, -0.6, -0.5, -0.4, 0.24, 0.26, 1.7, 1.8, 3e38])
    assert rounding.to_levels(x, levels, True, 0).tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert rounding.to_levels(x[[0, 8]], levels, False, 0).tolist() == [0, 3]


@for_each(
    "largest, shift",
    [
        (0.0, 23),
        (2.0**-149, 23),
        (1.0, 23),
        (np.nextafter(2.0**105, 0, dtype=np.float32), 23),
        (2.0**105, 22),
        (3.4e38, 0),
    ],
)
def test_the_largest_value_does_not_overflow_after_its_shift(largest, shift):
    assert rounding.max_shift(float(largest)) == shift
    assert np.isfinite(np.float32(largest) * np.float32(2.0**shift))


def everything(x: torch.Tensor) -> list[np.ndarray]:
    largest = rounding.largest(x) or 1.0
    shift = rounding.max_shift(largest)
    levels = np.unique(np.append(0, np.quantile(x.float().numpy(), np.linspace(0, 1, 9)))).astype(
        np.float32
    )
    codes, wide = (
        rounding.to_powers(x, shift, 6),
        rounding.to_multiples(x, largest / 300, largest, 6),
    )
    signs = np.packbits((x < 0).numpy() & (codes != 0))
    return [
        rounding.to_multiples(x, largest / 7, largest, 2**64 - 1),
        rounding.to_multiples(x, largest / 7, largest / 2, 5),
        wide,
        codes,
        signs,
        rounding.from_powers(codes, signs, shift),
        rounding.to_levels(x, levels, True, 6),
        rounding.to_levels(x, levels, False, 6),
        *rounding.histogram(x),
    ]


def test_results_do_not_depend_on_threads_or_precision():
    x = torch.randn(3 * 2**20 + 5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    made = everything(x)
    with torch_threads(5 - min(torch.get_num_threads(), 4)):
        for a, b in zip(made, everything(x.float()), strict=True):
            assert np.array_equal(a, b)


@for_each("numel", [0, 5, 200_001])
def test_empty_and_strided_vectors_are_rounded(numel):
    grid = torch.randn(numel, 2, generator=torch.Generator().manual_seed(1))
    for a, b in (
        zip(everything(grid[:, 1]), everything(grid[:, 1].clone()), strict=True) if numel else []
    ):
        assert np.array_equal(a, b)
    assert (
        rounding.to_multiples(grid[:0, 1], 1.0, 1.0, 3).size
        == rounding.to_powers(grid[:0, 1], 23, 3).size
        == 0
    )


def test_negative_zeros_become_positive():
    for numel in (5, 200_001):
        codes, signs = np.zeros(numel, np.uint8), np.zeros((numel + 7) // 8, np.uint8)
        assert not rounding.from_powers(codes, signs, 23).any()
        signs[-1] |= 128
        with pytest.raises(FrameError, match="negative sign"):
            rounding.from_powers(codes, signs, 23)


@pytest.mark.parametrize("numel", [1, 400, 5000])
def test_a_histogram_has_narrow_bins_with_their_means(numel):
    for kind, x in vectors(numel).items():
        means, counts = rounding.histogram(x)
        v = np.sort(x.double().numpy())
        assert counts.sum() == numel and (np.diff(means) > 0).all(), kind
        runs = np.split(v, counts.cumsum()[:-1])
        assert [run.mean() for run in runs] == pytest.approx(
            means.tolist(), rel=1e-12, abs=1e-300
        ), kind
        assert all(
            run[-1] - run[0] <= 2.0**-7 * np.abs(run).max() + 2.0**-235 * np.abs(v).max()
            for run in runs
        ), kind
    # Each of 2000 close values has its own bin.
    assert rounding.histogram(100 + 0.01 * torch.arange(2000))[0].size == 2000
