"""How often a coded vote is right, and whether a code helps against Byzantine voters.

Sohn et al. 2020 (strategies/codes.py) give bounds; here the probability is computed.

Model: in a coordinate, the sign of each partition is right with probability q, independently. An honest seat votes with the majority of its
partitions; the coins of ties are fair and independent. A Byzantine voter votes the opposite of what it should (`inverted`), or knows the
right sign and always votes against it (`wrong`). A tie of the tally is right with probability 1/2. Byzantine voters sit anywhere (`random`,
the mean over all placements), in the seats with most partitions (`heaviest`), or where they do most harm (`worst`).

Up to n = 15 all 2^n patterns of right and wrong partitions are evaluated. Beyond, up to 65,536 patterns are drawn from the seed, and the
result has a standard error. The worst placement is found by trying all, if they are few enough, else by a search that moves one voter at
a time, from the heaviest seats and from none: the harm is real, and may not be the greatest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import ConfigError
from . import patterns
from .codes import allocation_matrix, default_redundancy

TRIED = 1 << 25  # placements times patterns up to which all placements are tried
MOVED = 1 << 24  # placements times patterns in one step of a search
LEAST = 256  # patterns that a step of a search evaluates at least
SEARCHED = 31  # seats up to which a warning searches for the worst placement; else the heaviest
ATTACKS, PLACEMENTS = ("inverted", "wrong"), ("heaviest", "random", "worst")
HALVINGS = 12  # of the interval of an estimate

Harm = Callable[[Sequence[tuple[int, ...]]], tuple[float, tuple[int, ...]]]


@dataclass(frozen=True)
class Correctness:
    """The probability that a coordinate of the coded vote is right."""

    probability: float
    error: float = 0.0  # standard error; 0 if nothing was sampled
    seats: tuple[int, ...] | None = None  # of the Byzantine voters; None: anywhere


def correctness(
    matrix: ArrayLike,
    q: float,
    f: int = 0,
    placement: str | Sequence[int] = "worst",
    attack: str = "inverted",
    seed: int = 0,
) -> Correctness:
    """Return the correctness of a code G [n, n], given that of the partitions, with `f` Byzantine voters, placed by name or at given seats.

    Raises ConfigError for a matrix that is no code, a q outside 0..1, too many or unknown seats, and unknown names.
    """
    G = _code(matrix)
    n = len(G)
    if not 0 <= q <= 1 or not 0 <= f <= n or f != int(f):
        raise ConfigError(
            f"no level of a code of {n} seats: q = {q:g}, f = {f}; give 0 ≤ q ≤ 1, and 0 ≤ f ≤ {n}"
        )
    if attack not in ATTACKS or (isinstance(placement, str) and placement not in PLACEMENTS):
        raise ConfigError(
            f"attack '{attack}', placement '{placement}': attacks are {', '.join(ATTACKS)}, placements {', '.join(PLACEMENTS)}"
        )
    if placement == "random":
        if np.array_equal(G, np.eye(n)):
            return Correctness(uncoded(n, q, f, attack))
        return Correctness(*patterns.anywhere(patterns.honest(G, q, seed), q, f, attack))
    if not isinstance(placement, str):
        seats = tuple(sorted(set(placement)))
        if len(seats) != f or not set(seats) <= set(range(n)):
            raise ConfigError(
                f"{f} Byzantine voters do not hold the seats {list(seats)} of {n}; give {f} different ones, 0 to {n - 1}"
            )
        return _at(G, q, seats, attack, seed)
    if placement == "heaviest" or f in (0, n):
        return _at(G, q, _heaviest(G, f), attack, seed)
    return _at(
        G, q, _worst(G, q, f, attack, seed), attack, seed + 1
    )  # in patterns that were not searched


def uncoded(n: int, q: float, f: int = 0, attack: str = "inverted") -> float:
    """Return the exact correctness of a plain vote, for any n."""
    honest = patterns.binomial(n - f, q)
    right = np.convolve(honest, patterns.binomial(f, 1 - q if attack == "inverted" else 0.0))
    twice = 2 * np.arange(n + 1) - n
    return float(right @ ((twice > 0) + (twice == 0) / 2))


def estimate_correctness(
    margins: ArrayLike,
    matrix: ArrayLike | None = None,
    f: int = 0,
    members: Sequence[int] | None = None,
    seed: int = 0,
) -> float | None:
    """Return an estimate of q from how often each margin of m votes occurred: int [m + 1], from `margin_counts` of kernels/votes.py.

    Under the model above, with f Byzantine voters who invert and sit anywhere, q follows from the mean square of the margin. For a
    plain vote it is

        E d² = m + (2q − 1)²·((m − 2f)² − m)

    and for a code (`matrix` [n, n], with `members` voters in each seat, one by default) it is a sum over the patterns that grows with q.
    Where coordinates differ in q, (2q − 1)² is estimated in its mean. The result is within 1/2..1, since margins have no sign. None if q
    does not follow: no coordinates, one voter, or (m − 2f)² = m. Raises ConfigError for margins that are no counts, a matrix that is no
    code, and a number of members other than m.
    """
    table = np.asarray(margins, np.float64)
    if table.ndim != 1 or not len(table) or not (np.isfinite(table).all() and (table >= 0).all()):
        raise ConfigError(
            "margins are counts, one for each margin from 0 to the number of votes; give a vector of numbers of at least 0"
        )
    m = len(table) - 1
    if not 0 <= f <= m:
        raise ConfigError(f"margins of {m} votes with f = {f}; give 0 to {m}")
    told = (m - 2 * f) ** 2 - m
    if not table.sum() or m < 2 or told == 0:
        return None
    square = float(table @ np.arange(m + 1) ** 2 / table.sum())
    honest = (
        m + (square - m) * m * (m - 1) / told
    )  # without the f inverted votes, which shrink the rest by told/m(m−1) in the mean
    if matrix is None:
        return (1 + math.sqrt(min(max((honest - m) / (m * (m - 1)), 0.0), 1.0))) / 2
    G = _code(matrix)
    held = np.ones(len(G), np.float32) if members is None else np.asarray(members, np.float32)
    if held.sum() != m:
        raise ConfigError(
            f"the margins are of {m} votes, the seats have {int(held.sum())} members; give the members of every seat"
        )
    low, high = 0.5, 1.0
    for _ in range(HALVINGS):
        q = (low + high) / 2
        votes = patterns.honest(G, q, seed)
        squares = (votes.signs @ held) ** 2 + (votes.signs == 0) @ held**2
        low, high = (q, high) if votes.weights(q) @ squares < honest else (low, q)
    return (low + high) / 2


def warning(
    code: str, n: int, byzantine: int, q: float, redundancy: float | None = None, seed: int = 0
) -> str | None:
    """Return a warning where a code is worse than a plain vote, with Byzantine voters (`inverted`) in the worst seats, else None.

    q is rounded to whole percents; results are cached, since one may take seconds. Of more than SEARCHED seats the heaviest are taken for
    the worst. The deterministic code is never worse: it gives the majority of all n partitions. Byzantine voters that know the right sign
    harm a plain vote far more (benchmarks/codes.py). Raises like `allocation_matrix`.
    """
    allocation_matrix(code, n, byzantine, redundancy, seed)
    return (
        _warning(n, byzantine, round(q, 2), redundancy, seed)
        if code == "bernoulli" and byzantine and q > 0.5
        else None
    )


@lru_cache(64)
def _warning(n: int, byzantine: int, q: float, redundancy: float | None, seed: int) -> str | None:
    none = uncoded(n, q, byzantine)
    where = "worst" if n <= SEARCHED else "heaviest"

    def worst(redundancy: float | None) -> tuple[float, float]:
        G = allocation_matrix("bernoulli", n, byzantine, redundancy, seed)
        found = correctness(G, q, byzantine, where, seed=seed)
        return found.probability, 2 * found.error

    p, error = worst(redundancy)
    if p >= none - error:
        return None
    given = default_redundancy(n) if redundancy is None else redundancy
    first = math.floor(given) + 1
    enough = next(
        (
            r
            for r in range(first, n, max(1, n // SEARCHED))
            if (found := worst(r))[0] - found[1] >= none
        ),
        n,
    )
    better = f"; code=deterministic is right in {uncoded(n, q):.1%}" if n % 2 else ""
    return (
        f"with {byzantine} Byzantine voters in the {where} of {n} seats, code=bernoulli with redundancy={given:.3g} is right in "
        f"{p:.1%} of the coordinates, no code in {none:.1%} (single votes in {q:.0%}): give redundancy={enough}, which is not worse{better}"
    )


def _code(matrix: ArrayLike) -> np.ndarray:
    """Return G, uint8 [n, n]. Raises ConfigError for a matrix that is no code."""
    try:
        G = np.asarray(matrix)
    except ValueError as error:
        raise ConfigError(
            "rows of different lengths are no code; give [n, n] of 0 and 1, as allocation_matrix does"
        ) from error
    if G.ndim != 2 or G.shape[0] != G.shape[1] or not len(G) or not np.isin(G, (0, 1)).all():
        raise ConfigError(
            f"a matrix {list(G.shape)} is no code; give [n, n] of 0 and 1, as allocation_matrix does"
        )
    return np.ascontiguousarray(G, np.uint8)


def _at(G: np.ndarray, q: float, seats: tuple[int, ...], attack: str, seed: int) -> Correctness:
    votes = patterns.honest(G, q, seed)
    (p,) = patterns.probabilities(votes, q, [seats], attack)
    return Correctness(
        p, math.sqrt(p * (1 - p) / len(votes.signs)) if votes.sampled else 0.0, seats
    )


# Placements.


def _heaviest(G: np.ndarray, f: int) -> tuple[int, ...]:
    """Return the seats with most partitions; of equals the last."""
    order = np.argsort(G.sum(1, dtype=np.int64), kind="stable")
    return tuple(sorted(order[len(G) - f :].tolist()))


def _worst(G: np.ndarray, q: float, f: int, attack: str, seed: int) -> tuple[int, ...]:
    votes, n = patterns.honest(G, q, seed), len(G)
    if math.comb(n, f) * len(votes.signs) <= TRIED:
        return _harm(votes, q, attack)(list(combinations(range(n), f)))[1]
    harm = _harm(votes.some(max(LEAST, MOVED // (f * (n - f)))), q, attack)
    ends = [_moved(harm, n, _grown(harm, n, f)), _moved(harm, n, _heaviest(G, f))]
    return _harm(votes, q, attack)(ends)[1]


def _harm(votes: patterns.Votes, q: float, attack: str) -> Harm:
    """Return a function that picks, of some placements, the one where the vote is right least often, with its probability."""
    return lambda placements: min(
        zip(patterns.probabilities(votes, q, placements, attack), placements, strict=True)
    )


def _grown(harm: Harm, n: int, f: int) -> tuple[int, ...]:
    """Return seats chosen one after the other, each where it does most harm."""
    held: tuple[int, ...] = ()
    for _ in range(f):
        _, held = harm([tuple(sorted({*held, seat})) for seat in range(n) if seat not in held])
    return held


def _moved(harm: Harm, n: int, held: tuple[int, ...]) -> tuple[int, ...]:
    """Return seats that no single move makes more harmful."""
    least, held = harm([held])
    while True:
        moves = [
            tuple(sorted({*held, to} - {seat}))
            for seat in held
            for to in range(n)
            if to not in held
        ]
        p, best = harm(moves) if moves else (least, held)
        if p >= least:
            return held
        least, held = p, best
