"""How often a coded vote is right, and what codes are worth against liars who choose their seats.

Sohn et al. 2020 (strategies/codes.py) bound this; here it is computed.

Model: in a coordinate, each partition's sign is right with probability q, independently. An honest seat votes the majority of its
partitions; the coins of ties are fair and independent. A liar votes the opposite of what it should (`inverted`), or, knowing the truth,
always against it (`wrong`). A tie of the tally is right with probability 1/2. Liars sit anywhere (`random`, in the mean over all
placements), in the seats with most partitions (`heaviest`), or where they do most harm (`worst`).

All 2^n patterns of right and wrong partitions are gone through up to n = 15; beyond, up to 65,536 patterns are drawn from the seed, and
the result has a standard error. The worst placement is the worst of all where these are few enough to try, else the one at which a
search by single moves ends (from the heaviest seats and from none): the harm shown is real, and may not be the greatest.
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

TRIED = 1 << 25  # placements times patterns that are all tried
MOVED, LEAST = (
    1 << 24,
    256,
)  # likewise in one step of a search, and the fewest patterns that one looks at
SEARCHED = (
    31  # seats up to which a warning searches for the worst, and does not take the heaviest for it
)
ATTACKS, PLACEMENTS = ("inverted", "wrong"), ("heaviest", "random", "worst")
HALVINGS = 12  # of the interval in which an estimate lies

Harm = Callable[[Sequence[tuple[int, ...]]], tuple[float, tuple[int, ...]]]


@dataclass(frozen=True)
class Correctness:
    """The probability that a coordinate of the coded vote is right."""

    probability: float
    error: float = 0.0  # standard; 0 where nothing was sampled
    liars: tuple[int, ...] | None = None  # the seats they hold; None = anywhere


def correctness(
    matrix: ArrayLike,
    q: float,
    liars: int = 0,
    placement: str | Sequence[int] = "worst",
    attack: str = "inverted",
    seed: int = 0,
) -> Correctness:
    """Of a code G [n, n] at per-partition correctness q, with so many liars, placed by name or at the seats given.

    Raises ConfigError for what is no code, a q outside 0..1, more liars than seats, seats that are not there, and unknown names.
    """
    G = _code(matrix)
    n = len(G)
    if not 0 <= q <= 1 or not 0 <= liars <= n or liars != int(liars):
        raise ConfigError(
            f"no level of a code of {n} seats: q = {q:g}, {liars} liars; give 0 ≤ q ≤ 1, and 0 to {n} liars"
        )
    if attack not in ATTACKS or (isinstance(placement, str) and placement not in PLACEMENTS):
        raise ConfigError(
            f"attack '{attack}' by liars '{placement}': attacks are {', '.join(ATTACKS)}, placements {', '.join(PLACEMENTS)}"
        )
    if placement == "random":
        if np.array_equal(G, np.eye(n)):
            return Correctness(uncoded(n, q, liars, attack))
        return Correctness(*patterns.anywhere(patterns.honest(G, q, seed), q, liars, attack))
    if not isinstance(placement, str):
        seats = tuple(sorted(set(placement)))
        if len(seats) != liars or not set(seats) <= set(range(n)):
            raise ConfigError(
                f"{liars} liars do not hold the seats {list(seats)} of {n}; give as many different ones, 0 to {n - 1}"
            )
        return _at(G, q, seats, attack, seed)
    if placement == "heaviest" or liars in (0, n):
        return _at(G, q, _heaviest(G, liars), attack, seed)
    return _at(
        G, q, _worst(G, q, liars, attack, seed), attack, seed + 1
    )  # in patterns that were not searched


def uncoded(n: int, q: float, liars: int = 0, attack: str = "inverted") -> float:
    """`correctness` of no code, exactly, for any n: all seats are alike."""
    honest = patterns.binomial(n - liars, q)
    right = np.convolve(honest, patterns.binomial(liars, 1 - q if attack == "inverted" else 0.0))
    twice = 2 * np.arange(n + 1) - n
    return float(right @ ((twice > 0) + (twice == 0) / 2))


def estimate_correctness(
    margins: ArrayLike,
    matrix: ArrayLike | None = None,
    liars: int = 0,
    members: Sequence[int] | None = None,
    seed: int = 0,
) -> float | None:
    """q from how often each margin occurred: int [m + 1] of m votes, as kernels/votes.py `margin_counts` gives it.

    Under the model above, with liars who invert and sit anywhere, the mean square of the margin tells q: for a plain vote

        E d² = m + (2q − 1)²·((m − 2f)² − m)

    and for a code (`matrix` [n, n], and how many `members` each seat has, one unless given) a sum over its patterns that grows with q.
    Where coordinates differ in their q, (2q − 1)² is estimated in its mean over them. The result is within 1/2..1: margins do not tell
    more wrong than right. None where they do not tell q: no coordinates, one voter, or liars with whom (m − 2f)² is m. Raises
    ConfigError for margins that are no counts, what is no code, and other members than votes.
    """
    table = np.asarray(margins, np.float64)
    if table.ndim != 1 or not len(table) or not (np.isfinite(table).all() and (table >= 0).all()):
        raise ConfigError(
            "margins are how often each from 0 to the number of votes occurred; give a vector of numbers of at least 0"
        )
    m = len(table) - 1
    if not 0 <= liars <= m:
        raise ConfigError(f"margins of {m} votes with {liars} liars; give 0 to {m}")
    told = (m - 2 * liars) ** 2 - m
    if not table.sum() or m < 2 or told == 0:
        return None
    square = float(table @ np.arange(m + 1) ** 2 / table.sum())
    honest = (
        m + (square - m) * m * (m - 1) / told
    )  # if nobody lied: f signs turned at random shrink the rest by told/m(m−1) in the mean
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
    """A sentence where a code is worse than none at this level, its liars (`inverted`) in the worst seats; None where it is not.

    q counts in whole percents; what was found out is kept, since it may take seconds. Of more than SEARCHED seats the heaviest stand for
    the worst. The deterministic code is never worse: it gives the majority of all n partitions, no code that of some which are turned.
    Liars who are always wrong take far more from no code (benchmarks/codes.py). Raises like `allocation_matrix`.
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
        f"with {byzantine} liars in the {where} of {n} seats, code=bernoulli with redundancy={given:.3g} is right in {p:.1%} of the "
        f"coordinates, no code in {none:.1%} (single votes in {q:.0%}): give redundancy={enough}, which is not worse{better}"
    )


def _code(matrix: ArrayLike) -> np.ndarray:
    """G, uint8 [n, n]. Raises ConfigError for what is none."""
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


def _at(G: np.ndarray, q: float, liars: tuple[int, ...], attack: str, seed: int) -> Correctness:
    votes = patterns.honest(G, q, seed)
    (p,) = patterns.probabilities(votes, q, [liars], attack)
    return Correctness(
        p, math.sqrt(p * (1 - p) / len(votes.signs)) if votes.sampled else 0.0, liars
    )


# Where liars sit.


def _heaviest(G: np.ndarray, liars: int) -> tuple[int, ...]:
    """The seats with most partitions; of equals the last."""
    order = np.argsort(G.sum(1, dtype=np.int64), kind="stable")
    return tuple(sorted(order[len(G) - liars :].tolist()))


def _worst(G: np.ndarray, q: float, liars: int, attack: str, seed: int) -> tuple[int, ...]:
    votes, n = patterns.honest(G, q, seed), len(G)
    if math.comb(n, liars) * len(votes.signs) <= TRIED:
        return _harm(votes, q, attack)(list(combinations(range(n), liars)))[1]
    harm = _harm(votes.some(max(LEAST, MOVED // (liars * (n - liars)))), q, attack)
    ends = [_moved(harm, n, _grown(harm, n, liars)), _moved(harm, n, _heaviest(G, liars))]
    return _harm(votes, q, attack)(ends)[1]


def _harm(votes: patterns.Votes, q: float, attack: str) -> Harm:
    """Of some placements, the one where the vote is right least often, and how often that is."""
    return lambda placements: min(
        zip(patterns.probabilities(votes, q, placements, attack), placements, strict=True)
    )


def _grown(harm: Harm, n: int, liars: int) -> tuple[int, ...]:
    """Seats taken one after the other, each where it does most harm."""
    held: tuple[int, ...] = ()
    for _ in range(liars):
        _, held = harm([tuple(sorted({*held, seat})) for seat in range(n) if seat not in held])
    return held


def _moved(harm: Harm, n: int, held: tuple[int, ...]) -> tuple[int, ...]:
    """Seats from which no liar moves to another to do more harm."""
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
