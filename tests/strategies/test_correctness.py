"""The probability that coded votes are correct, as benchmarks/codes.py computes it, against exact enumeration and published values."""

from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from cases import for_each

from benchmarks.codes import coded, fixed_rows, patterns, uncoded
from fedcomp.strategies import allocation_matrix

CODES = [
    np.eye(4, dtype=np.uint8),
    np.array([[1, 1, 0], [1, 1, 0], [1, 1, 1]]),
    np.array([[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0, 1], [0, 0, 1, 0]]),
    allocation_matrix("deterministic", 5, 1),
    allocation_matrix("bernoulli", 5, redundancy=2, seed=3),
]


def by_hand(G: np.ndarray, q: Fraction, seats: tuple[int, ...], attack: str) -> Fraction:
    """Return the probability exactly, by enumerating all signs of the partitions and all random signs of ties."""
    n, total = len(G), Fraction()
    for partitions in product((1, -1), repeat=n):
        chance = Fraction(1)
        for sign in partitions:
            chance *= q if sign > 0 else 1 - q
        sums = [sum(int(g) * sign for g, sign in zip(row, partitions)) for row in G]
        tied = [i for i, s in enumerate(sums) if s == 0]
        for fall in product((1, -1), repeat=len(tied)):
            votes = [1 if s > 0 else -1 for s in sums]
            for i, coin in zip(tied, fall):
                votes[i] = coin
            for i in seats:
                votes[i] = -votes[i] if attack == "inverted" else -1
            total += (
                chance
                / 2 ** len(tied)
                * (Fraction(1, 2) if sum(votes) == 0 else int(sum(votes) > 0))
            )
    return total


@for_each("attack", ["inverted", "wrong"])
@for_each("which", range(len(CODES)))
def test_probabilities_for_small_codes_equal_exact_enumeration(which, attack):
    G, q = CODES[which], Fraction(7, 10)
    n = len(G)
    signs, weights = patterns(n, 0.7)
    votes = np.sign((2 * signs - 1.0) @ G.T)
    for f in range(3):
        chances = {seats: by_hand(G, q, seats, attack) for seats in combinations(range(n), f)}
        for seats, chance in chances.items():
            found = weights @ fixed_rows(votes, np.array(seats, int), attack)
            assert found == pytest.approx(float(chance))
        mean = float(sum(chances.values()) / len(chances))
        assert coded(G, 0.7, f, "random", attack) == pytest.approx(mean)


@for_each(
    "q, none, anywhere, heaviest, deterministic, wrong",
    [
        (0.55, 0.53, 0.55, 0.51, 0.65, 0.04),
        (0.70, 0.64, 0.72, 0.59, 0.95, 0.20),
        (0.85, 0.79, 0.89, 0.79, 1.00, 0.60),
    ],
)
def test_the_published_table_for_15_voters_with_6_byzantine_ones(
    q, none, anywhere, heaviest, deterministic, wrong
):
    assert uncoded(15, q, 6, "inverted") == pytest.approx(none, abs=0.006)
    assert uncoded(15, q, 6, "wrong") == pytest.approx(wrong, abs=0.006)
    G = allocation_matrix("deterministic", 15, 6)
    for placement, attack in product(("heaviest", "random"), ("inverted", "wrong")):
        assert coded(G, q, 6, placement, attack) == pytest.approx(deterministic, abs=0.006)
    drawn = [allocation_matrix("bernoulli", 15, 6, 3, seed) for seed in range(6)]
    found = [[coded(H, q, 6, at, "inverted") for at in ("random", "heaviest")] for H in drawn]
    assert np.mean(found, axis=0) == pytest.approx(
        [anywhere, heaviest], abs=0.03
    )  # drawn matrices with the same redundancy differ
