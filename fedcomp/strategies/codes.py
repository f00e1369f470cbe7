"""Codes for election coding. A code assigns partitions of the data to seats so that Byzantine voters cannot decide the vote.

Sohn, Han, Choi, Moon: Election coding for distributed learning: protecting signSGD against Byzantine attacks. NeurIPS 2020.

The data are divided into n partitions. An election has n seats, each with one or more clients as voters. The allocation matrix G ∈
{0,1}^(n×n) assigns partitions to seats: for every coordinate, seat i votes for the majority of the signs of the partitions j with G_ij = 1.

The code `deterministic` needs an odd n and tolerates b < n/2 Byzantine seats. With s = (n−1)/2 − b, row i of G assigns to seat i:

    rows 0..s−1            partition i alone
    rows s+j, j = 0..s−1   all but {j, (j+1) mod s}; for s = 1 all but {0, n−1}
    the other 2b+1 rows    all partitions.

A vote is correct if it equals the majority over all partitions. The last 2b+1 seats have all partitions, so their honest votes are correct.
Of the seats i and s+i, for each i < s, at most one votes wrongly. So if all voters are honest, the correct votes outnumber the wrong votes
by at least 2b+1. A Byzantine vote reduces the lead of the correct votes by two, and an absent seat by one. So with f Byzantine votes and
`a` absent seats, the result stays correct if 2f + a ≤ 2b. Every seat has an odd number of partitions, so its vote has no ties. The
redundancy of `deterministic` (mean number of partitions per seat) is (n+2b+1)/2 − s/n.

The code `bernoulli` draws each G_ij from Bernoulli(redundancy/n), and draws G again while it has an empty row or column. After REDRAWS
failed draws, the code sets one random entry to 1 in each empty row and column. Repeated draws raise the mean redundancy, for example from 2
to about 2.4 for n = 15. The code `bernoulli` is cheaper than `deterministic`. With Byzantine voters in random seats, `bernoulli` is correct
more often than `uncoded`. But `bernoulli` has no guarantee: with Byzantine voters in the seats with the most partitions, it may be worse
than `uncoded` (benchmarks/codes.py).

The code `uncoded` is an ordinary majority vote: G = I, so each seat has one partition.

The *ballot* of a partition holds the signs of the partition's update, packed as in kernels/votes.py.
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
REDRAWS = 200
ROW = "row"  # name under which the server announces a voter's CodeRow
BALLOTS, TALLY = "ballots", "tally"  # phases


def allocation_matrix(
    code: str, n: int, byzantine: int = 0, redundancy: float | None = None, seed: int = 0
) -> np.ndarray:
    """Return the allocation matrix G of an election with n seats, uint8 [n, n]: G[i, j] = 1 if seat i has partition j.

    `byzantine`: number of Byzantine seats to tolerate, for the code `deterministic`. `redundancy`: mean number of partitions per seat, at
    most n, by default √(n·ln n). Only the code `bernoulli` uses `redundancy` and `seed`. Raises SpecError for an unknown code, and
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
            f"redundancy={redundancy:g} has no effect with code={code}; leave redundancy out, or use code=bernoulli"
        )
    if code == "uncoded":
        return np.eye(n, dtype=np.uint8)
    if code == "deterministic":
        return _deterministic(n, byzantine)
    return _bernoulli(n, default_redundancy(n) if redundancy is None else redundancy, seed)


def mean_redundancy(matrix: np.ndarray) -> float:
    """Return the mean number of partitions per seat of an allocation matrix."""
    return float(matrix.sum() / len(matrix))


def default_redundancy(n: int) -> float:
    """Return the default redundancy (mean partitions per seat) of the code `bernoulli` with n seats: √(n·ln n), at least 1."""
    return max(1.0, math.sqrt(n * math.log(n)))


@dataclass(frozen=True)
class Seats:
    """The seats of an election with their voters, and the partitions with their data sets."""

    members: tuple[tuple[int, ...], ...]  # for each seat, its voters (client ids, ascending)
    groups: tuple[tuple[int, ...], ...]  # for each partition, the ids of its data sets, ascending
    margin: int  # smallest lead of the correct votes over the wrong votes if all voters are present and honest

    def of(self, client: int) -> int:
        """Return the seat of a client. Raises KeyError."""
        for seat, members in enumerate(self.members):
            if client in members:
                return seat
        raise KeyError(client)

    def may_close(self, byzantine_allowed: int, absent: int) -> bool:
        """Return whether the result is correct with f = `byzantine_allowed` Byzantine and `absent` absent voters: 2f + absent < margin."""
        return 2 * byzantine_allowed + absent < self.margin


def assign_seats(
    clients: Sequence[int],
    n: int,
    byzantine: int,
    seed: int,
    round: int,
    data_sets: Sequence[int] | None = None,
) -> Seats:
    """Assign a cohort of m ≥ n clients to the n seats of an election, and data sets (by default the clients' own) to its n partitions.

    Each client votes on the partitions of its seat, and all m votes count. First, each seat gets g = ⌊m/n⌋ clients. The remaining clients
    join the 2b+1 seats with all partitions, one per seat. If clients are left after that, they are divided into pairs: one client of pair i
    joins seat i, and the other joins seat s+i. A client without a partner joins a seat with all partitions. If all voters are honest, the
    correct votes outnumber the wrong votes by at least

        margin = g·(2b+1) + the number of remaining clients in seats with all partitions.

    The result stays correct with f Byzantine and `a` absent clients, in any seats, while 2f + a < margin. This guarantee holds only for the
    code `deterministic`. For other codes, `margin` has the same formula, but the result may be wrong.

    A partition of several data sets has *one* sign per coordinate: the sign of a gradient over all its data, or the majority of its data
    sets' signs.

    The assignment depends only on the seed, the round, n, `byzantine`, and the sorted client ids. Raises ConfigError for fewer than n
    clients or data sets.
    """
    clients, data = sorted(set(clients)), sorted(set(clients if data_sets is None else data_sets))
    for what, ids in (("clients", clients), ("data sets", data)):
        if len(ids) < n:
            raise ConfigError(
                f"an election with {n} seats needs at least {n} {what}, not {len(ids)}; choose fewer seats"
            )
    drawn = seeds.generator(seed, "seats", round).permutation(np.array(clients, np.int64)).tolist()
    g, n_extra = divmod(len(drawn), n)
    extra = _extra_seats(n, byzantine, n_extra)
    members: list[list[int]] = [drawn[seat * g : (seat + 1) * g] for seat in range(n)]
    for seat, client in zip(extra, drawn[n * g :], strict=True):
        members[seat].append(client)
    shuffle = seeds.generator(seed, "partitions", round).permutation
    order = shuffle(np.array(data, np.int64)).tolist()
    full = n - 2 * byzantine - 1  # index of the first seat with all partitions
    return Seats(
        tuple(tuple(sorted(ids)) for ids in members),
        tuple(tuple(sorted(order[j::n])) for j in range(n)),
        g * (2 * byzantine + 1) + sum(seat >= full for seat in extra),
    )


def can_close(clients: int, n: int, b: int, f: int) -> bool:
    """Return whether an election tolerates f Byzantine voters among `clients` voters, with n seats and a code for b Byzantine seats.

    An empty seat counts as an absent voter.
    """
    return assign_seats(range(max(clients, n)), n, b, 0, 1).may_close(f, max(0, n - clients))


def _extra_seats(n: int, byzantine: int, n_extra: int) -> list[int]:
    """Return the seats for the `n_extra` clients that remain when all n seats have equally many clients."""
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
    """A voter's row of the allocation matrix: the voter's client id, its seat, and the partitions of this seat."""

    client: int
    seat: int
    partitions: tuple[DataPartition, ...]

    def pack(self) -> bytes:
        """Return the row as JSON: client, seat, and for each partition a list of its number and its clients."""
        listed = [[part.number, *part.clients] for part in self.partitions]
        return json.dumps([self.client, self.seat, listed], separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes) -> "CodeRow":
        """Parse the JSON that `pack` returns. Raises ProtocolError for empty rows or partitions, and for repeated partitions or clients."""
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
        """Ids of the clients whose data or ballots determine the voter's vote, ascending."""
        return sorted({client for part in self.partitions for client in part.clients})


def announced_row(announced: Mapping[str, bytes]) -> CodeRow:
    """Return the row of the allocation matrix that the server announced to a voter. Raises ProtocolError for a missing or damaged row."""
    return CodeRow.unpack(announced.get(ROW, b""))


def ballot_of(update: Tensor, seed: int, round: int, number: int) -> bytes:
    """Return the ballot (packed signs) of a partition's update [numel]. Zeros and NaN get random signs, with a seed for each partition."""
    return kernels.bits.signs(torch.nan_to_num(update), seeds.key(seed, "zeros", round, number))


def signs_of(update: Update, zeros: int | None = None) -> votes.PackedSigns:
    """Return the packed signs of an update [numel].

    Zeros get random signs that depend on the seed `zeros`. If `zeros` is None, zeros get a positive sign.
    """
    return update.raw if isinstance(update, Bits) else kernels.bits.signs(update.dense(), zeros)


def vote_on_ballots(
    row: CodeRow, sent: Mapping[int, votes.PackedSigns], numel: int, seed: int, round: int
) -> Tensor:
    """Return a voter's vote, +1 or −1 per coordinate [numel], on the ballots of its row. `sent`: client → ballot (packed signs).

    The ballot of a partition is the majority of its clients' ballots. For a partition without ballots, all voters draw the same random
    signs, so that honest voters still agree.
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
    """Return a vote, +1 or −1 per coordinate, float32 [numel]: the majority of the ballots of a row's partitions.

    Ties are broken at random, with a seed for each seat: honest voters of one seat agree, and the random signs of different seats cancel on
    average.
    """
    packed = votes.majority(ballots, numel, seeds.key(seed, "local tie", round, row.seat))
    return torch.from_numpy(kernels.sign_values(packed, numel, 1.0))
