"""Coordinates drawn without replacement."""

import math

import numpy as np
import pytest

from fedcomp.kernels import philox


def drawn(numel: int, count: int, seed: int) -> np.ndarray:
    return philox.sample(numel, count, seed, stream=7)


def test_a_sample_has_the_given_number_of_different_coordinates_in_order():
    for numel in (0, 1, 2, 5, 40, 1001):
        for count in {
            0,
            1,
            numel // 17,
            numel // 3,
            numel // 2,
            (numel + 1) // 2,
            numel - 1,
            numel,
        } & set(range(numel + 1)):
            found = drawn(numel, count, 3)
            assert found.dtype == np.int64 and found.size == count == np.unique(found).size
            assert (np.diff(found) > 0).all() and (not count or 0 <= found[0] <= found[-1] < numel)


def test_a_sample_is_the_first_different_coordinates_of_the_sequence():
    for numel, count in [(1, 1), (7, 3), (40, 2), (1001, 400), (100_000, 900)]:
        words = philox.words(9, 4 * numel, stream=7).tolist()
        sequence = dict.fromkeys(
            (low | high << 32) % numel for low, high in zip(words[::2], words[1::2])
        )
        assert drawn(numel, count, 9).tolist() == sorted(list(sequence)[:count])


def test_a_large_sample_is_the_complement_of_a_small_one():
    assert sorted([*drawn(100, 30, 1).tolist(), *drawn(100, 70, 1).tolist()]) == list(range(100))


@pytest.mark.parametrize(("numel", "count"), [(4, 1), (5, 2), (5, 4), (6, 3)])
def test_all_samples_are_equally_likely(numel, count):
    seeds, choices = 800, math.comb(numel, count)
    _, seen = np.unique(
        [drawn(numel, count, seed) for seed in range(seeds)], axis=0, return_counts=True
    )
    expected = seeds / choices
    squares = ((seen - expected) ** 2 / expected).sum() + (choices - seen.size) * expected
    assert squares < choices - 1 + 5 * (2 * (choices - 1)) ** 0.5  # χ², five deviations


def test_coordinates_of_a_large_vector_are_spread_evenly():
    found = drawn(2**25 + 11, 200_000, 2**64 - 1)
    seen = np.bincount(found >> 19, minlength=65)[:64]
    assert ((seen - 3125) ** 2 / 3125).sum() < 63 + 5 * 126**0.5
    assert abs(np.mean(found & 1) - 0.5) < 5 * 0.5 / 200_000**0.5
