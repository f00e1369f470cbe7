"""Probability that a coded majority vote (strategy `election`) is correct, by code, attack, and placement of the Byzantine voters.

    python benchmarks/codes.py [--voters 15] [--byzantine 6] [--redundancy 3] [--matrices 30]

A vote is about the sign of one coordinate. In each data partition, the sign is correct with probability q, independently of other
partitions. An honest voter votes like the majority of its partitions; a fair coin decides ties. A Byzantine voter inverts its vote (attack
`inverted`) or always votes for the wrong sign (`wrong`). A tie between the votes is correct with probability 1/2. Byzantine voters have
random rows of the allocation matrix (placement `random`, averaged over all placements) or the rows with the most partitions (`heaviest`).

The probabilities are exact for up to 15 voters, and have a standard error of 0.2 % for more voters. For the Bernoulli code, the table shows
the mean and the standard deviation over random matrices.
"""

import argparse
import math

import numpy as np

from fedcomp.strategies import allocation_matrix

LEVELS = (0.55, 0.70, 0.85)
ATTACKS, PLACEMENTS = ("inverted", "wrong"), ("random", "heaviest")
# Largest number of voters n for which all 2^n patterns of correct and wrong partitions are evaluated.
MAX_EXACT_VOTERS = 15
SAMPLES = 1 << 16  # number of random patterns if there are more voters than MAX_EXACT_VOTERS


def uncoded(n: int, q: float, f: int, attack: str) -> float:
    wrong = binomial(f, 1 - q if attack == "inverted" else 0.0)
    return float(np.convolve(binomial(n - f, q), wrong) @ won(np.arange(n + 1), n))


def coded(G: np.ndarray, q: float, f: int, placement: str, attack: str) -> float:
    """Return the probability that the result of a coded vote is correct. `G`, of shape [n, n], is the allocation matrix of the code."""
    n = len(G)
    signs, weights = patterns(n, q)
    votes = np.sign((2 * signs.astype(np.float32) - 1) @ G.T.astype(np.float32))
    if placement == "heaviest":
        heaviest = np.argsort(G.sum(1, dtype=np.int64), kind="stable")[n - f :]
        chance = fixed_rows(votes, heaviest, attack)
    else:
        chance = any_rows(votes, f, attack)
    return float(weights @ chance)


def patterns(n: int, q: float) -> tuple[np.ndarray, np.ndarray]:
    """Return patterns of n correct or wrong partitions, bool [patterns, n], and their probabilities: all patterns, or a random sample."""
    if n > MAX_EXACT_VOTERS:
        return np.random.default_rng(0).random((SAMPLES, n)) < q, np.full(SAMPLES, 1 / SAMPLES)
    signs = (np.arange(1 << n)[:, None] >> np.arange(n) & 1).astype(bool)
    right = signs.sum(1)
    return signs, q**right * (1 - q) ** (n - right)


def fixed_rows(votes: np.ndarray, byzantine: np.ndarray, attack: str) -> np.ndarray:
    """Return the probability that the majority of votes is correct, for each pattern of correct partitions.

    `byzantine` lists the rows of the Byzantine voters. `votes` [patterns, n] has the honest vote of each row: 1 is correct, -1 is wrong,
    and 0 is decided by a coin.
    """
    n = votes.shape[1]
    votes = votes.copy()
    votes[:, byzantine] = -votes[:, byzantine] if attack == "inverted" else -1
    sure, coins = (votes > 0).sum(1), (votes == 0).sum(1)
    return chances(won(np.arange(n + 1), n))[sure, coins]


def any_rows(votes: np.ndarray, f: int, attack: str) -> np.ndarray:
    """Return the probability that the majority of votes is correct, averaged over all placements of f Byzantine voters.

    The argument `votes` is the same as in `fixed_rows`.
    """
    n = votes.shape[1]
    # Probability that the majority is correct under the attack, by the number of rows whose honest vote is correct.
    after = np.zeros(n + 1)
    for right in range(n + 1):
        for held in range(max(0, f + right - n), min(f, right) + 1):
            probability = math.comb(right, held) * math.comb(n - right, f - held) / math.comb(n, f)
            inverted = f - held if attack == "inverted" else 0
            after[right] += probability * won(right - held + inverted, n)
    return chances(after)[(votes > 0).sum(1), (votes == 0).sum(1)]


def chances(after: np.ndarray) -> np.ndarray:
    """Return the probability that the majority is correct, by number of correct votes (rows) and number of votes that a coin decides
    (columns).

    `after` has this probability by number of correct votes after the coins are tossed.
    """
    n = len(after) - 1
    found = np.zeros((n + 1, n + 1))
    for coins in range(n + 1):
        found[: n + 1 - coins, coins] = np.convolve(after, binomial(coins, 0.5)[::-1])[
            coins : n + 1
        ]
    return found


def won(right: np.ndarray | int, n: int) -> np.ndarray:
    """Return the probability that the result of n votes is correct if `right` of them are correct: 1 for a majority, 1/2 for a tie, else
    0.
    """
    return (np.sign(2 * np.asarray(right) - n) + 1) / 2


def binomial(count: int, p: float) -> np.ndarray:
    """Return the probabilities of 0 to `count` successes in `count` trials that each succeed with probability p."""
    found = np.ones(1)
    for _ in range(count):
        found = np.convolve(found, (1 - p, p))
    return found


def line(name: str, cells: list[str]) -> None:
    print(f"{name:46}" + "".join(f"{cell:>16}" for cell in cells))


def mean_and_deviation(
    matrices: list[np.ndarray], q: float, f: int, placement: str, attack: str
) -> str:
    found = [coded(G, q, f, placement, attack) for G in matrices]
    return f"{np.mean(found):.3f} ± {np.std(found):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--voters", type=int, default=15)
    parser.add_argument("--byzantine", type=int, default=6)
    parser.add_argument(
        "--redundancy",
        type=float,
        default=3.0,
        help="mean number of voters per partition in the Bernoulli code",
    )
    parser.add_argument("--matrices", type=int, default=30, help="number of Bernoulli matrices")
    options = parser.parse_args()
    n, f, redundancy = options.voters, options.byzantine, options.redundancy
    bernoulli = [
        allocation_matrix("bernoulli", n, f, redundancy, seed) for seed in range(options.matrices)
    ]
    print(
        f"probability of a correct vote, {n} voters, {f} Byzantine; Bernoulli matrices: {options.matrices}, "
        f"redundancy {redundancy:g}, actual mean redundancy {np.mean([G.sum() / n for G in bernoulli]):.2f}\n"
    )
    line("probability of a correct sign in a partition", [f"{q:.2f}" for q in LEVELS])
    for attack in ATTACKS:
        line(f"uncoded, {attack}", [f"{uncoded(n, q, f, attack):.3f}" for q in LEVELS])
        for placement in PLACEMENTS:
            cells = [mean_and_deviation(bernoulli, q, f, placement, attack) for q in LEVELS]
            line(f"bernoulli, {attack}, {placement}", cells)
        if n % 2:
            G = allocation_matrix("deterministic", n, f)
            cells = [f"{coded(G, q, f, 'heaviest', attack):.3f}" for q in LEVELS]
            line(f"deterministic, {attack}, heaviest", cells)


if __name__ == "__main__":
    main()
