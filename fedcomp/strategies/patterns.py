"""Votes of the seats of a code in each pattern of right and wrong partitions, and the tally with Byzantine voters.

The model is that of strategies/correctness.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .. import seeds

EXACT = 15  # partitions up to which all patterns are evaluated
SAMPLES, CELLS = 1 << 16, 1 << 23  # otherwise: patterns drawn, and patterns times seats at most
AT_ONCE = 1 << 21  # patterns times placements in one batch


@dataclass(frozen=True)
class Votes:
    """Honest votes of the seats: 1 for right, −1 for wrong, 0 for a coin, float32 [patterns, n]."""

    signs: np.ndarray
    right: np.ndarray  # of the partitions, in each pattern: int64 [patterns]
    sampled: bool

    def some(self, patterns: int) -> "Votes":
        """Return so many of the drawn patterns, or all if none were drawn."""
        return Votes(self.signs[:patterns], self.right[:patterns], True) if self.sampled else self

    def weights(self, q: float) -> np.ndarray:
        """Return the probability of each pattern, float64 [patterns]."""
        patterns, n = self.signs.shape
        return (
            np.full(patterns, 1 / patterns)
            if self.sampled
            else (q ** np.arange(n + 1) * (1 - q) ** np.arange(n, -1, -1))[self.right]
        )


def honest(G: np.ndarray, q: float, seed: int = 0) -> Votes:
    """Return the votes of a code G [n, n] in all patterns or, if these are too many, in patterns drawn from the seed at this q."""
    return _honest(
        np.ascontiguousarray(G, np.uint8).tobytes(),
        len(G),
        *((q, seed) if len(G) > EXACT else (0.5, 0)),
    )


@lru_cache(2)
def _honest(matrix: bytes, n: int, q: float, seed: int) -> Votes:
    G = np.frombuffer(matrix, np.uint8).reshape(n, n).astype(np.float32)
    if n <= EXACT:
        partitions = (np.arange(1 << n)[:, None] >> np.arange(n) & 1).astype(bool)
    else:
        partitions = (
            seeds.generator(seed, "correctness").random((min(SAMPLES, CELLS // n), n), np.float32)
            < q
        )
    return Votes(
        np.sign((2 * partitions.astype(np.float32) - 1) @ G.T), partitions.sum(1), n > EXACT
    )


def probabilities(
    votes: Votes, q: float, placements: Sequence[tuple[int, ...]], attack: str
) -> list[float]:
    """Return the probability that the tally is right with Byzantine voters in each of these sets of seats."""
    patterns, n = votes.signs.shape
    weights, chance = votes.weights(q), _chances(n)
    tossed = (votes.signs == 0).astype(np.float32)
    found, batch = [], max(1, AT_ONCE // patterns)
    for first in range(0, len(placements), batch):
        here = placements[first : first + batch]
        lying = np.zeros((n, len(here)), np.float32)
        for column, seats in enumerate(here):
            lying[list(seats), column] = 1
        honest = 1 - lying
        if attack == "inverted":
            sums = votes.signs @ (honest - lying)
            coins = np.broadcast_to(tossed.sum(1, keepdims=True), (patterns, len(here)))
        else:
            sums, coins = votes.signs @ honest - lying.sum(0), tossed @ honest
        if tossed.any() or n % 2 == 0:
            found.append(weights @ chance[(sums + n).astype(np.intp), coins.astype(np.intp)])
        else:
            found.append(weights @ (sums > 0))
    return np.concatenate(found).clip(0, 1).tolist()


@lru_cache(8)
def _chances(n: int) -> np.ndarray:
    """Entry [S + n, t]: the probability that S and t coins of ±1 are above 0, and half of that they are 0."""
    sums = np.arange(-n, n + 1)[:, None]
    found = np.zeros((2 * n + 1, n + 1))
    for coins in range(n + 1):
        totals = sums + 2 * np.arange(coins + 1) - coins
        found[:, coins] = ((totals > 0) + (totals == 0) / 2) @ binomial(coins, 0.5)
    return found


def binomial(count: int, p: float) -> np.ndarray:
    """P(k of `count`), k = 0..count."""
    chances = np.ones(1)
    for _ in range(count):
        chances = np.convolve(chances, (1 - p, p))
    return chances


def anywhere(votes: Votes, q: float, f: int, attack: str) -> tuple[float, float]:
    """The mean of `probabilities` over all placements, and its standard error.

    Of R seats that would vote right, the f Byzantine voters hold h with the hypergeometric probability.
    """
    patterns, n = votes.signs.shape
    coins = (votes.signs == 0).sum(1)
    sure = (votes.signs > 0).sum(1)
    after = np.zeros(n + 1)
    for right in range(n + 1):
        for h in range(max(0, f + right - n), min(f, right) + 1):
            twice = 2 * (right - h + (f - h) * (attack == "inverted")) - n
            share = math.comb(right, h) * math.comb(n - right, f - h) / math.comb(n, f)
            after[right] += share * ((twice > 0) + (twice == 0) / 2)
    chance = np.zeros((n + 1, n + 1))  # of so many that are sure to be right, and so many coins
    for tossed in range(n + 1):
        chance[: n + 1 - tossed, tossed] = np.convolve(after, binomial(tossed, 0.5)[::-1])[
            tossed : n + 1
        ]
    weights, each = votes.weights(q), chance[sure, coins]
    p = float(weights @ each)
    return p, float(each.std() / math.sqrt(patterns)) if votes.sampled else 0.0
