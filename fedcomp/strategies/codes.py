"""Election codes: which seats of an election vote on which partitions of the data.

Sohn, Han, Choi, Moon: Election coding for distributed learning: protecting signSGD against Byzantine attacks. NeurIPS 2020.

The data are divided into n partitions. Training gives each partition a sign in every coordinate (election.py). An election has n seats,
each with one or more clients as voters. A code is an allocation matrix G ∈ {0,1}^(n×n): in every coordinate, the voters of seat i vote for
the majority of the signs of the partitions j with G_ij = 1. A vote is correct if it equals the majority of the signs of all partitions.

The code `deterministic` needs an odd n and tolerates b < n/2 Byzantine seats. With s = (n−1)/2 − b, the rows of G contain:

    row j, for j < s          only partition j
    row s + j, for j < s      all partitions except j and (j+1) mod s; if s = 1, all except 0 and n−1
    the last 2b+1 rows        all partitions

If all voters are honest, the last 2b+1 seats vote correctly, and at least one of the seats j and s + j votes correctly for each j. The
correct votes therefore outnumber the wrong votes by at least 2b+1. A Byzantine seat reduces this lead by two, because it turns a correct
vote into a wrong one. An absent seat reduces the lead by one. With f Byzantine and `a` absent seats, the result is correct if 2f + a ≤ 2b.
Every row has an odd number of partitions, so honest votes have no ties. The redundancy (mean number of partitions per seat) is
(n+2b+1)/2 − s/n.

The code `bernoulli` draws each G_ij from Bernoulli(redundancy/n), and draws G again if it has an empty row or column. If all of REDRAWS
draws have one, the code sets one random entry to 1 in each empty row and column of the last G. Matrices without empty rows and columns have
a larger mean redundancy than the option `redundancy` says: for example, 2.4 instead of 2 for n = 15. The code has a lower redundancy than
`deterministic`, but no guarantee. If Byzantine voters are in random seats, its result is correct more often than the result of `uncoded`.
If Byzantine voters are in the seats with the most partitions, it may be correct less often (benchmarks/codes.py).

The code `uncoded` is an ordinary majority vote: G = I, so each seat has one partition.

A *ballot* consists of the signs of a partition, or of the signs of a client's update. It has one bit per coordinate (kernels/votes.py).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import kernels, seeds
from ..codecs import Update
from ..codecs.update import Bits
from ..errors import ConfigError, ProtocolError, SpecError, nearest
from ..kernels import votes
from .base import DataPartition

CODES = ("bernoulli", "deterministic", "uncoded")
REDRAWS = 200  # maximum number of matrices that the code `bernoulli` draws
ROW = "row"  # name of the announcement with a voter's CodeRow
BALLOTS, TALLY = "ballots", "tally"  # names of phases of an election


def allocation_matrix(
    code: str, n: int, byzantine: int = 0, redundancy: float | None = None, seed: int = 0
) -> np.ndarray:
    """Return the allocation matrix G of an election with n seats, uint8 [n, n]: G[i, j] = 1 if seat i has partition j.

    `code`: "deterministic", "bernoulli" or "uncoded". `byzantine`: number of Byzantine seats that "deterministic" tolerates. `redundancy`
    and `seed` are only for "bernoulli": each entry is 1 with probability redundancy/n, where redundancy is at most n, by default √(n·ln n).
    The mean number of partitions per seat is larger, because no row or column is empty. Raises SpecError for an unknown code, and
    ConfigError for a number that is out of range.
    """
    if code not in CODES:
        raise SpecError(f"unknown election code '{code}'; {nearest(code, CODES)}")
    if n < 1:
        raise ConfigError(f"an election code needs at least 1 seat, not {n}")
    if not 0 <= byzantine < n / 2:
        raise ConfigError(
            f"byzantine={byzantine} is out of range: a code for {n} seats can tolerate 0 to {(n - 1) // 2} Byzantine seats"
        )
    if redundancy is not None and code != "bernoulli":
        raise ConfigError(
            f"redundancy={redundancy:g} has no effect with code={code}; leave 'redundancy' out, or use code=bernoulli"
        )
    if code == "uncoded":
        return np.eye(n, dtype=np.uint8)
    if code == "deterministic":
        return _deterministic(n, byzantine)
    return _bernoulli(n, default_redundancy(n) if redundancy is None else redundancy, seed)


def mean_redundancy(matrix: np.ndarray) -> float:
    """Return the mean number of partitions per seat."""
    return float(matrix.sum() / len(matrix))


def default_redundancy(n: int) -> float:
    """Return the default redundancy of the code `bernoulli` with n seats: √(n·ln n), at least 1."""
    return max(1.0, math.sqrt(n * math.log(n)))


@dataclass(frozen=True)
class Seats:
    """The voters of each seat, and the clients whose data form each partition."""

    voters: tuple[tuple[int, ...], ...]  # for each seat, the ids of its voters, ascending
    partitions: tuple[tuple[int, ...], ...]  # for each partition, the ids of its clients, ascending
    margin: int  # smallest lead of the correct votes over the wrong votes if all voters are present and honest

    def seat_of(self, client: int) -> int:
        """Return the seat of a voter. Raises KeyError if the client is not a voter."""
        for seat, voters in enumerate(self.voters):
            if client in voters:
                return seat
        raise KeyError(client)

    def tolerates(self, byzantine: int, absent: int) -> bool:
        """Return whether the result is certainly correct with these numbers of Byzantine and absent voters, whichever seats they have.

        With a code other than `deterministic`, the result may be wrong even if this method returns True.
        """
        return 2 * byzantine + absent < self.margin


def assign_seats(
    clients: Sequence[int],
    n: int,
    byzantine: int,
    seed: int,
    round: int,
    owners: Sequence[int] | None = None,
) -> Seats:
    """Assign the m ≥ n `clients` of a cohort to the n seats of an election, and the data (or ballots) of `owners` to its n partitions.

    `owners`: client ids, by default the cohort. First, each seat gets g = ⌊m/n⌋ voters. The m − gn extra clients are then assigned in this
    order: one to each of the 2b+1 seats with all partitions, where b = `byzantine`; then one pair of clients to the seats j and s + j for
    each j = 0, 1, …; and a last client without a partner to a seat with all partitions. Then

        margin = g·(2b+1) + the number of extra clients in seats with all partitions.

    The assignment depends only on the seed, the round, n, `byzantine`, and the sets of client ids. Raises ConfigError for fewer than n
    clients or owners.
    """
    clients, owners = sorted(set(clients)), sorted(set(clients if owners is None else owners))
    for what, ids in (("clients", clients), ("clients with data", owners)):
        if len(ids) < n:
            raise ConfigError(
                f"an election with {n} seats needs at least {n} {what}, not {len(ids)}; choose fewer seats"
            )
    drawn = seeds.generator(seed, "seats", round).permutation(np.array(clients, np.int64)).tolist()
    g, n_extra = divmod(len(drawn), n)
    extra = _extra_seats(n, byzantine, n_extra)
    voters: list[list[int]] = [drawn[seat * g : (seat + 1) * g] for seat in range(n)]
    for seat, client in zip(extra, drawn[n * g :], strict=True):
        voters[seat].append(client)
    shuffle = seeds.generator(seed, "partitions", round).permutation
    order = shuffle(np.array(owners, np.int64)).tolist()
    full = n - 2 * byzantine - 1  # index of the first seat with all partitions
    return Seats(
        tuple(tuple(sorted(ids)) for ids in voters),
        tuple(tuple(sorted(order[j::n])) for j in range(n)),
        g * (2 * byzantine + 1) + sum(seat >= full for seat in extra),
    )


def tolerates(clients: int, n: int, b: int, f: int) -> bool:
    """Return whether an election with `clients` voters, n seats and the code for b Byzantine seats tolerates f Byzantine voters.

    With fewer than n voters, each empty seat counts as an absent voter. See `Seats.tolerates`.
    """
    return assign_seats(range(max(clients, n)), n, b, 0, 1).tolerates(f, max(0, n - clients))


def _extra_seats(n: int, byzantine: int, n_extra: int) -> list[int]:
    """Return the seats of the `n_extra` extra clients (see `assign_seats`)."""
    full = list(range(n - 1, n - 2 * byzantine - 2, -1))
    if n_extra <= len(full):
        return full[:n_extra]
    pairs, odd = divmod(n_extra - len(full), 2)
    s = (n - 1) // 2 - byzantine
    return [*full, *(seat for i in range(pairs) for seat in (i, s + i)), *full[:odd]]


def _deterministic(n: int, byzantine: int) -> np.ndarray:
    if n % 2 == 0:
        raise ConfigError(
            f"the deterministic code needs an odd number of seats, not {n}; choose {n - 1} or {n + 1}, or code=bernoulli"
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
            f"redundancy={redundancy:g} is out of range; give more than 0 and at most {n} partitions per seat"
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


# Rows and votes.


@dataclass(frozen=True)
class CodeRow:
    """A voter's row of the allocation matrix: the partitions on which the voter votes."""

    client: int  # id of the voter
    seat: int
    partitions: tuple[DataPartition, ...]

    def pack(self) -> bytes:
        """Return the row as JSON: client, seat, and a list [number, *clients] for each partition."""
        listed = [[part.number, *part.clients] for part in self.partitions]
        return json.dumps([self.client, self.seat, listed], separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "CodeRow":
        """Parse the JSON that `pack` returns.

        Raises ProtocolError for malformed JSON, a row without partitions, a partition without clients, and a repeated partition or client.
        """
        try:
            client, seat, listed = json.loads(data)
            parts = tuple(DataPartition(number, tuple(clients)) for number, *clients in listed)
            numbers = [part.number for part in parts]
            clients = [client for part in parts for client in part.clients]
            integers = all(type(n) is int for n in (client, seat, *numbers, *clients))
            twice = len(set(numbers)) < len(numbers) or len(set(clients)) < len(clients)
            if not (parts and integers and all(part.clients for part in parts)) or twice:
                raise ValueError(data)
            return cls(client, seat, parts)
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(
                "the announced row of the allocation matrix is missing or damaged; server and clients need the same version of fedcomp"
            ) from error

    @property
    def senders(self) -> list[int]:
        """Ids of the clients whose data or ballots determine the vote, ascending."""
        return sorted({client for part in self.partitions for client in part.clients})


def announced_row(announced: Mapping[str, bytes]) -> CodeRow:
    """Return the voter's row from the announcements `announced`. Raises ProtocolError for a missing or damaged row."""
    return CodeRow.unpack(announced.get(ROW, b""))


def ballot_of(update: Tensor, seed: int, round: int, number: int) -> bytes:
    """Return the ballot of partition `number` from its update [numel]. Zeros and NaN get random signs.

    The random signs depend only on the seed, the round and the partition, so all voters draw the same signs.
    """
    return kernels.bits.signs(torch.nan_to_num(update), seeds.key(seed, "zeros", round, number))


def signs_of(update: Update, zeros: int | None = None) -> votes.PackedSigns:
    """Return the packed signs of an update. Zeros get random signs from the seed `zeros`, or a positive sign if `zeros` is None."""
    return update.raw if isinstance(update, Bits) else kernels.bits.signs(update.dense(), zeros)


def vote_on_ballots(
    row: CodeRow, sent: Mapping[int, votes.PackedSigns], numel: int, seed: int, round: int
) -> Tensor:
    """Return a voter's vote, +1 or −1 per coordinate, float32 [numel]. `sent`: the ballots that the voter received, by client.

    The ballot of a partition is the majority of its clients' ballots. If the voter received none of these, the ballot consists of random
    signs. All voters draw the same random signs, so that honest voters agree.
    """
    ballots: list[votes.PackedSigns] = []
    for part in row.partitions:
        received = [sent[client] for client in part.clients if client in sent]
        if received:
            tie = seeds.key(seed, "partition tie", round, part.number)
            ballots.append(votes.majority(received, numel, tie))
        else:
            missing = seeds.key(seed, "missing", round, part.number)
            ballots.append(kernels.bits.random_bits(missing, numel, votes.TIE_STREAM))
    return vote_of(row, ballots, numel, seed, round)


def vote_of(
    row: CodeRow, ballots: Sequence[votes.PackedSigns], numel: int, seed: int, round: int
) -> Tensor:
    """Return a vote, +1 or −1 per coordinate, float32 [numel]: the majority of the partitions' ballots, which are in the order of the row.

    Ties are broken at random, with a seed that depends on the seat. Honest voters of one seat therefore agree, and the random signs of
    different seats cancel on average.
    """
    packed = votes.majority(ballots, numel, seeds.key(seed, "local tie", round, row.seat))
    return torch.from_numpy(kernels.sign_values(packed, numel, 1.0))
