"""Codes of an election: which voter counts which partitions, so that Byzantine voters who would win a plain vote lose this one.

Sohn, Han, Choi, Moon: Election coding for distributed learning: protecting signSGD against Byzantine attacks. NeurIPS 2020.

n partitions of the data, n seats, allocation G ∈ {0,1}^(n×n). Seat i takes the majority of the signs of the partitions j with G_ij = 1
(local election) and votes for it; the votes are tallied (global election).

`deterministic`, odd n, b < n/2, s = (n−1)/2 − b:

    rows 0..s−1            partition i alone
    rows s+j, j = 0..s−1   all but {j, (j+1) mod s}; for s = 1 all but {0, n−1}
    the other 2b+1 rows    all partitions

For any signs, the seats that vote as the majority of all partitions are at least 2b+1 more than the others: the last rows always do, and
of a couple i, s+i one does, since row s+i can only err where partition i is of the majority. A Byzantine vote takes two off this margin,
an absent seat one, so the result is the one without them while 2f + a ≤ 2b. No local election has a tie.
Redundancy (n+2b+1)/2 − s/n: mean number of partitions that a seat computes.

`bernoulli`: G_ij ~ Bernoulli(redundancy/n), drawn again while a row or a column is empty; if REDRAWS draws all have one, each empty row,
then each empty column, of the last gets one entry. Redrawing raises the mean redundancy, for redundancy=2 and n = 15 to about 2.4.
Cheaper, and right more often than no code where Byzantine voters sit anywhere. There is no bound: with Byzantine voters in the heaviest
seats it may be worse than no code (benchmarks/codes.py).

`uncoded`: G = I, a plain vote.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import seeds
from ..errors import ConfigError, SpecError, nearest

CODES = ("bernoulli", "deterministic", "uncoded")
REDRAWS = 200


def allocation_matrix(
    code: str, n: int, byzantine: int = 0, redundancy: float | None = None, seed: int = 0
) -> np.ndarray:
    """G, uint8 [n, n]: G[i, j] = 1 where seat i counts partition j.

    `byzantine` is b, the Byzantine voters to survive; it shapes the deterministic code alone. `redundancy`, above 0 and at most n, and
    `seed` belong to `bernoulli`, whose redundancy is √(n·ln n) by default. Raises SpecError for another code, ConfigError for numbers
    out of range.
    """
    if code not in CODES:
        raise SpecError(f"unknown code '{code}' of an election; {nearest(code, CODES)}")
    if n < 1:
        raise ConfigError(f"a code has at least 1 voter, not {n}")
    if not 0 <= byzantine < n / 2:
        raise ConfigError(
            f"byzantine={byzantine} of {n} voters is out of range; 0 to {(n - 1) // 2} Byzantine voters can be outvoted"
        )
    if redundancy is not None and code != "bernoulli":
        raise ConfigError(
            f"redundancy={redundancy:g} has no meaning for the code '{code}'; leave it out, or use code=bernoulli"
        )
    if code == "uncoded":
        return np.eye(n, dtype=np.uint8)
    if code == "deterministic":
        return _deterministic(n, byzantine)
    return _bernoulli(n, default_redundancy(n) if redundancy is None else redundancy, seed)


def mean_redundancy(matrix: np.ndarray) -> float:
    """Return the mean number of partitions that a seat of an allocation computes."""
    return float(matrix.sum() / len(matrix))


def default_redundancy(n: int) -> float:
    """Return the default redundancy of the Bernoulli code: n·p, with p of the order √(ln n / n)."""
    return max(1.0, math.sqrt(n * math.log(n)))


@dataclass(frozen=True)
class Seats:
    """The clients in each seat of a round, and the data sets in each partition."""

    members: tuple[tuple[int, ...], ...]  # clients of seat i, ascending; each votes for itself
    groups: tuple[tuple[int, ...], ...]  # data sets of partition j, ascending
    margin: int  # votes by which the honest win at the least

    def of(self, client: int) -> int:
        """Return the seat of a client. Raises KeyError."""
        for seat, members in enumerate(self.members):
            if client in members:
                return seat
        raise KeyError(client)

    def may_close(self, byzantine_allowed: int, absent: int) -> bool:
        """Return whether a round may close with f Byzantine and a absent clients, wherever they sit: 2f + a < margin."""
        return 2 * byzantine_allowed + absent < self.margin


def assign_seats(
    clients: Sequence[int],
    n: int,
    byzantine: int,
    seed: int,
    round: int,
    data_sets: Sequence[int] | None = None,
) -> Seats:
    """Seat a cohort of m ≥ n clients at a code of n, and put the data sets (by default, those of the clients) in its n partitions.

    Every seat is held by g = ⌊m/n⌋ clients, who all compute the seat's partitions and each vote; all m votes are tallied. The rest of the
    cohort joins the seats that hold all partitions (from the last row up), then the couples i, s+i of the deterministic code, and an odd
    one joins a full row again. So honest votes win by

        margin ≥ g·(2b+1) + the clients who joined full rows

    and f Byzantine and a absent clients *anywhere* change nothing while 2f + a < margin. ⌊m/n⌋ elections of n whose results are put to the
    vote would bear about half as many, (b+1)/2 a group and not b + ½, since b+1 in one of them decide its result. The load is that of the
    code of n, less than of a code of m that bears as many. The bound holds for the deterministic code; for others `margin` is the same
    number and guarantees nothing.

    A partition of several data sets has ONE sign: of a gradient over their union, or of the majority of their signs. A seat that added up
    its data sets would weigh partitions differently, which breaks the code.

    The result depends on (seed, round), the sorted ids and n alone. Raises ConfigError for fewer clients or data sets than n.
    """
    clients, data = sorted(set(clients)), sorted(set(clients if data_sets is None else data_sets))
    for what, held in (("clients", clients), ("data sets", data)):
        if len(held) < n:
            raise ConfigError(
                f"an election of n = {n} has no use for {len(held)} {what}; choose a smaller n, or ask for at least {n}"
            )
    drawn = seeds.generator(seed, "seats", round).permutation(np.array(clients, np.int64)).tolist()
    g, left = divmod(len(drawn), n)
    joined = _joined(n, byzantine, left)
    members: list[list[int]] = [drawn[seat * g : (seat + 1) * g] for seat in range(n)]
    for seat, client in zip(joined, drawn[n * g :], strict=True):
        members[seat].append(client)
    shuffle = seeds.generator(seed, "partitions", round).permutation
    order = shuffle(np.array(data, np.int64)).tolist()
    full = n - 2 * byzantine - 1  # the first row of all partitions
    return Seats(
        tuple(tuple(sorted(held)) for held in members),
        tuple(tuple(sorted(order[j::n])) for j in range(n)),
        g * (2 * byzantine + 1) + sum(seat >= full for seat in joined),
    )


def _joined(n: int, byzantine: int, left: int) -> list[int]:
    """Return the seats that get one more client."""
    full = list(range(n - 1, n - 2 * byzantine - 2, -1))
    if left <= len(full):
        return full[:left]
    couples, odd = divmod(left - len(full), 2)
    s = (n - 1) // 2 - byzantine
    return [*full, *(seat for i in range(couples) for seat in (i, s + i)), *full[:odd]]


def _deterministic(n: int, byzantine: int) -> np.ndarray:
    if n % 2 == 0:
        raise ConfigError(
            f"the deterministic code needs an odd number of voters, not {n}; choose {n - 1} or {n + 1}, or code=bernoulli"
        )
    s = (n - 1) // 2 - byzantine
    matrix = np.ones((n, n), np.uint8)
    matrix[:s] = np.eye(n, dtype=np.uint8)[:s]
    for j in range(s):
        matrix[s + j, [j, n - 1 if s == 1 else (j + 1) % s]] = 0
    return matrix


def _bernoulli(n: int, redundancy: float, seed: int) -> np.ndarray:
    if not 0 < redundancy <= n:
        raise ConfigError(
            f"redundancy={redundancy:g} is out of range; a voter counts more than 0 and at most {n} partitions"
        )
    rng = seeds.generator(seed, "allocation")
    for _ in range(REDRAWS):
        matrix = (rng.random((n, n)) < redundancy / n).astype(np.uint8)
        if matrix.any(0).all() and matrix.any(1).all():
            return matrix
    for row in np.flatnonzero(~matrix.any(1)):
        matrix[row, rng.integers(n)] = 1
    for column in np.flatnonzero(~matrix.any(0)):
        matrix[rng.integers(n), column] = 1
    return matrix
