"""Samples of many generators at once are those that numpy draws of each."""

import numpy as np
from cases import for_each

from fedcomp import seeds
from fedcomp.kernels import samples

KEYS = [(3, who) for who in range(300)]


def check(n: np.ndarray, k: int, fewest_fair: float) -> None:
    assert samples.serves(n, k).all()
    drawn, fair = samples.draw(seeds.words(7, "batches", KEYS, 2 * k - 1), n, k)
    assert drawn.shape == (len(KEYS), k) and fewest_fair <= fair.mean() <= 1
    for key, size, sample, same in zip(KEYS, n, drawn, fair, strict=True):
        if same:
            assert (
                sample.tolist()
                == seeds.generator(7, "batches", *key).choice(size, k, replace=False).tolist()
            )


@for_each("k", [1, 2, 3, 7, 20, 100])
def test_they_are_numpys_whatever_there_is_to_draw_from(k):
    sizes = np.random.default_rng(k).integers(k, 3 * k + 2, len(KEYS))
    sizes[:3] = k, k, k + 1  # all of them, and all but one
    check(sizes, k, 1)
    check(np.full(len(KEYS), 10_000), k, 1)
    check(np.full(len(KEYS), 50 * k + 10_000), k, 0.99)


@for_each("k", [1, 2, 9])
def test_a_word_that_would_favour_some_is_told(k):
    """Below 3·2³⁰, a quarter of all words are refused."""
    n = np.full(len(KEYS), 3 << 30)
    check(n, k, 0)
    _, fair = samples.draw(seeds.words(7, "batches", KEYS, 2 * k - 1), n, k)
    assert abs(fair.mean() - (3 / 4) ** k) < 0.15


def test_where_numpy_draws_in_another_way_it_is_told():
    assert samples.serves(np.array([300, 10_000, 10_050, 2**32 - 1]), 201).all()
    assert not samples.serves(np.array([10_001, 10_049, 2**32]), 201).any()
