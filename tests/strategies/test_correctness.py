"""How often votes are right: as counted by hand, as published, and as simulated votes turn out."""

from fractions import Fraction
from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from cases import for_each

from fedcomp.errors import ConfigError, SpecError
from fedcomp.kernels import votes as kernel
from fedcomp.strategies import allocation_matrix
from fedcomp.strategies import correctness as module
from fedcomp.strategies.correctness import correctness, estimate_correctness, uncoded, warning

CODES = [
    np.eye(4, dtype=np.uint8),
    np.array([[1, 1, 0], [1, 1, 0], [1, 1, 1]]),
    np.array([[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0, 1], [0, 0, 1, 0]]),
    allocation_matrix("deterministic", 5, 1),
    allocation_matrix("bernoulli", 5, redundancy=2, seed=3),
]


def by_hand(G: np.ndarray, q: Fraction, seats: tuple[int, ...], attack: str) -> Fraction:
    """Every pattern of partitions and every fall of the coins, in fractions."""
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
def test_small_codes_are_as_counted_by_hand(which, attack):
    G, q = CODES[which], Fraction(7, 10)
    n = len(G)
    for f in range(3):
        chances = {seats: by_hand(G, q, seats, attack) for seats in combinations(range(n), f)}
        for seats, chance in chances.items():
            found = correctness(G, 0.7, f, seats, attack)
            assert (
                found.probability == pytest.approx(float(chance))
                and found.error == 0
                and found.seats == seats
            )
        mean = float(sum(chances.values()) / len(chances))
        assert correctness(G, 0.7, f, "random", attack).probability == pytest.approx(mean)
        worst = correctness(G, 0.7, f, "worst", attack)
        assert (
            worst.probability
            == pytest.approx(float(min(chances.values())))
            == pytest.approx(float(chances[worst.seats]))
        )


def test_the_heaviest_seats():
    G = np.array([[1, 1, 1], [1, 0, 0], [0, 1, 1]])
    assert correctness(G, 0.6, 1, "heaviest").seats == (0,) and correctness(
        G, 0.6, 2, "heaviest"
    ).seats == (0, 2)


@for_each(
    "q, none, anywhere, heaviest, deterministic, wrong",
    [
        (0.55, 0.53, 0.55, 0.51, 0.65, 0.04),
        (0.70, 0.64, 0.72, 0.59, 0.95, 0.20),
        (0.85, 0.79, 0.89, 0.79, 1.00, 0.60),
    ],
)
def test_the_table_of_15_voters_of_whom_6_are_byzantine(
    q, none, anywhere, heaviest, deterministic, wrong
):
    assert uncoded(15, q, 6) == pytest.approx(none, abs=0.006)
    assert uncoded(15, q, 6, "wrong") == pytest.approx(
        wrong, abs=0.006
    )  # of the ballots, Byzantine ones included, which are passed on
    G = allocation_matrix("deterministic", 15, 6)
    for placement, attack in product(("heaviest", "random"), ("inverted", "wrong")):
        assert correctness(G, q, 6, placement, attack).probability == pytest.approx(
            deterministic, abs=0.006
        )
    drawn = [allocation_matrix("bernoulli", 15, 6, 3, seed) for seed in range(6)]
    found = [
        [correctness(H, q, 6, placement).probability for placement in ("random", "heaviest")]
        for H in drawn
    ]
    assert np.mean(found, axis=0) == pytest.approx(
        [anywhere, heaviest], abs=0.03
    )  # matrices of one redundancy differ


@for_each("n, f", [(1, 0), (4, 1), (15, 6), (201, 30)])
def test_no_code_for_any_number_of_voters(n, f):
    for attack, q_byzantine in (("inverted", 0.4), ("wrong", 0.0)):
        expected = sum(
            comb(n - f, r)
            * 0.6**r
            * 0.4 ** (n - f - r)
            * comb(f, k)
            * q_byzantine**k
            * (1 - q_byzantine) ** (f - k)
            * (1 if 2 * (r + k) > n else 0.5 if 2 * (r + k) == n else 0)
            for r in range(n - f + 1)
            for k in range(f + 1)
        )
        assert uncoded(n, 0.6, f, attack) == pytest.approx(expected)
        assert correctness(np.eye(n), 0.6, f, "random", attack).probability == pytest.approx(
            expected
        )


def test_beyond_what_can_be_gone_through_patterns_are_drawn_and_the_error_is_stated():
    right = uncoded(17, 0.6)
    for placement in ("random", "heaviest", (0, 8, 16)):
        found = correctness(allocation_matrix("deterministic", 17, 3), 0.6, 3, placement, "wrong")
        assert 0 < found.error < 0.003 and abs(found.probability - right) < 4 * found.error
    found = correctness(np.eye(17), 0.6, 3, (0, 1, 2))
    assert abs(found.probability - uncoded(17, 0.6, 3)) < 4 * found.error


@pytest.mark.parametrize("seed", range(4))
def test_a_search_for_the_worst_seats_ends_at_least_at_the_heaviest(seed, monkeypatch):
    G = allocation_matrix("bernoulli", 9, redundancy=2.5, seed=seed)
    exact = correctness(G, 0.7, 3).probability
    monkeypatch.setattr(module, "TRIED", 0)
    found = correctness(G, 0.7, 3)
    assert (
        exact - 1e-12
        <= found.probability
        <= min(exact + 0.01, correctness(G, 0.7, 3, "heaviest").probability + 1e-12)
    )
    assert len(found.seats) == 3


@for_each(
    "matrix",
    [
        np.full((3, 3), 2),
        -np.eye(3),
        0.5 * np.eye(3),
        np.eye(3)[None],
        np.empty((0, 0)),
        "x",
        [[1, 0], [1]],
    ],
)
def test_what_is_no_code_is_refused(matrix):
    with pytest.raises(ConfigError, match="no code; give"):
        correctness(matrix, 0.6)
    with pytest.raises(ConfigError, match="no code; give"):
        estimate_correctness([0, 3, 0, 5], matrix)


@for_each("margins", [[float("nan"), 1, 2], [1, float("inf"), 2], [1, -1, 2], [[1, 2], [3, 4]], []])
def test_what_are_no_margins_is_refused(margins):
    with pytest.raises(ConfigError, match="margins are counts"):
        estimate_correctness(margins)


@for_each(
    "given",
    [
        ([[1, 0]], 0.5),
        (np.eye(3), 1.1),
        (np.eye(3), 0.7, 4),
        (np.eye(3), 0.7, 1, "anywhere"),
        (np.eye(3), 0.7, 1, "worst", "lazy"),
        (np.eye(3), 0.7, 1, (3,)),
        (np.eye(3), 0.7, 2, (1, 1)),
        (np.eye(3), float("nan")),
        (np.eye(3), 0.7, 1.5),
    ],
)
def test_what_has_no_correctness_is_refused(given):
    with pytest.raises(ConfigError):
        correctness(*given)


# What margins tell.


def cast(
    G: np.ndarray, q: float | np.ndarray, f: int, numel: int, members: list[int] | None = None
) -> np.ndarray:
    """How often each margin occurs in simulated votes, with f drawn among the members for each coordinate."""
    rng, n = np.random.default_rng(11), len(G)
    seats = np.repeat(np.arange(n), 1 if members is None else members)
    signs = np.where(rng.random((n, numel)) < q, 1, -1) * rng.choice([-1, 1], numel)
    votes = np.sign(G.astype(np.float32) @ signs)
    votes = np.where(votes == 0, rng.choice([-1, 1], votes.shape), votes)[seats]
    votes[rng.random(votes.shape).argsort(0) < f] *= -1
    return kernel.margin_counts(kernel.pack(votes), numel)


@for_each("q", [0.5, 0.55, 0.7, 0.95, 1.0])
@for_each("voters, f", [(2, 0), (9, 0), (15, 2), (40, 5)])
def test_plain_votes_tell_how_often_single_ones_are_right(voters, f, q):
    found = estimate_correctness(cast(np.eye(voters), q, f, 20_000), f=f)
    assert abs((2 * found - 1) ** 2 - (2 * q - 1) ** 2) < 0.04


def test_where_coordinates_differ_it_is_the_mean_square_that_is_told():
    q = np.random.default_rng(1).uniform(0.5, 1, 50_000)
    assert estimate_correctness(cast(np.eye(9), q, 0, 50_000)) == pytest.approx(
        0.5 + np.sqrt(((2 * q - 1) ** 2).mean()) / 2, abs=0.01
    )


@for_each(
    "code, n, members, f, levels",
    [
        ("deterministic", 9, None, 0, (0.55, 0.7, 0.9)),
        ("deterministic", 9, [1, 1, 1, 1, 2, 2, 2, 2, 2], 2, (0.55, 0.7, 0.9)),
        ("bernoulli", 13, None, 2, (0.55, 0.7, 0.9)),
        ("bernoulli", 17, None, 0, (0.7,)),
    ],
)
def test_coded_votes_tell_how_often_partitions_are_right(code, n, members, f, levels):
    G = allocation_matrix(code, n, 2)
    for q in levels:
        table = cast(G, q, f, 30_000, members)
        assert estimate_correctness(table, G, f, members) == pytest.approx(q, abs=0.02)


def test_margins_that_tell_nothing():
    assert estimate_correctness([0, 0, 0, 0]) is None  # no coordinates
    assert estimate_correctness([0, 10]) is None  # one voter
    assert (
        estimate_correctness([5, 0, 0, 0, 5], f=1) is None
    )  # 4 voters, of whom one turns: (4 − 2)² = 4
    with pytest.raises(ConfigError, match="0 to 3"):
        estimate_correctness([0, 3, 0, 5], f=4)
    with pytest.raises(ConfigError, match="3 votes, the seats have 5 members"):
        estimate_correctness([0, 5, 0, 5], np.eye(5))


# Where coding hurts.


def test_a_warning_names_a_redundancy_that_is_not_worse():
    said = warning("bernoulli", 9, 2, 0.7, 2)
    assert (
        "with 2 Byzantine voters in the worst of 9 seats" in said
        and "redundancy=2 is right in 77.0% of the coordinates, no code in 77.2%" in said
    )
    assert "give redundancy=3," in said and "code=deterministic is right in 90.1%" in said
    worst = correctness(allocation_matrix("bernoulli", 9, 2, 2), 0.7, 2)
    assert (
        worst.probability
        < uncoded(9, 0.7, 2)
        <= correctness(allocation_matrix("bernoulli", 9, 2, 3), 0.7, 2).probability
    )
    assert warning("bernoulli", 9, 2, 0.7, 3) is None


def test_no_warning_without_harm():
    assert warning("uncoded", 9, 2, 0.7) is None and warning("deterministic", 9, 2, 0.7) is None
    assert warning("bernoulli", 9, 0, 0.7, 9) is None and warning("bernoulli", 9, 2, 0.5, 2) is None
    assert warning("bernoulli", 9, 2, 0.7, 9) is None  # everybody counts everything
    with pytest.raises(SpecError):
        warning("none", 9, 2, 0.7)


@for_each("n, b", [(5, 1), (9, 2), (9, 4), (15, 6)])
def test_the_deterministic_code_is_never_worse_than_none(n, b):
    G = allocation_matrix("deterministic", n, b)
    for q, attack in product((0.51, 0.7, 0.99), ("inverted", "wrong")):
        found = correctness(G, q, b, "heaviest", attack).probability
        assert found == pytest.approx(uncoded(n, q)) and found >= uncoded(n, q, b, attack)
