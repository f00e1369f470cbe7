"""The deterministic code tolerates the claimed number of Byzantine clients in any seats. Voters of one row cast the same vote."""

from itertools import combinations, product

import numpy as np
import pytest
import torch
from cases import for_each

from fedcomp.errors import ConfigError, ProtocolError, SpecError
from fedcomp.kernels import sign_values
from fedcomp.kernels import votes as kernel
from fedcomp.strategies import allocation_matrix, majority
from fedcomp.strategies.base import DataPartition
from fedcomp.strategies.codes import (
    CodeRow,
    assign_seats,
    ballot_of,
    default_redundancy,
    vote_of,
    vote_on_ballots,
)

ODD = (1, 3, 5, 7, 9, 11, 13, 15)
CLAIMS = [(n, b) for n in ODD for b in range((n + 1) // 2)]


def patterns(n: int) -> np.ndarray:
    """All 2^n sign vectors of n partitions: int8 [2^n, n]."""
    return (2 * (np.arange(1 << n)[:, None] >> np.arange(n) & 1) - 1).astype(np.int8)


def local(matrix: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """The vote of each seat, computed from sums: ±1, or 0 for a tie, float32 [patterns, n]."""
    return np.sign(signs.astype(np.float32) @ matrix.T.astype(np.float32))


def truth(signs: np.ndarray) -> np.ndarray:
    return np.sign(signs.sum(1, dtype=np.int64)).astype(np.float32)


@for_each("n, b", [claim for claim in CLAIMS if claim[0] <= 9])
def test_no_set_of_tolerated_byzantine_and_absent_seats_changes_a_result(n, b):
    signs = patterns(n)
    votes = local(allocation_matrix("deterministic", n, b), signs)
    roles = np.array(
        list(product((1, -1, 0), repeat=n)), np.float32
    )  # honest, opposite of the honest vote, absent
    byzantine, absent = (roles < 0).sum(1), (roles == 0).sum(1)
    borne = 2 * byzantine + absent <= 2 * b
    seats = assign_seats(range(n), n, b, 0, 1)
    assert borne.tolist() == [seats.tolerates(f, a) for f, a in zip(byzantine, absent)]
    assert (votes @ roles[borne].T * truth(signs)[:, None] > 0).all()
    beyond = 2 * byzantine + absent == 2 * b + 1
    assert (
        votes @ roles[beyond].T * truth(signs)[:, None] <= 0
    ).any()  # one more is not always tolerated


@for_each("n, b", CLAIMS)
def test_the_smallest_margin_of_correct_votes_is_2b_plus_1(n, b):
    signs = patterns(n)
    margins = local(allocation_matrix("deterministic", n, b), signs).sum(1) * truth(signs)
    assert margins.min() == 2 * b + 1


@for_each("n, b", [(11, 2), (11, 5), (13, 3), (15, 1), (15, 3), (15, 6), (15, 7)])
def test_majorities_are_correct_with_random_and_with_worst_byzantine_seats(n, b):
    rng, G, signs = (
        np.random.default_rng(n + b),
        allocation_matrix("deterministic", n, b),
        patterns(n),
    )
    votes = np.stack([majority(signs.T[row.astype(bool)], 1) for row in G])  # [n, patterns]
    expected = majority(signs.T, 2)
    assert np.array_equal(votes.T, local(G, signs))  # so no local vote is a tie
    worst = int(np.argmin(votes.sum(0) * expected))
    with_truth = np.flatnonzero(votes[:, worst] == expected[worst])
    for f in range(b + 1):
        a = 2 * (b - f)
        for seats in (
            *(rng.permutation(n)[: f + a] for _ in range(10)),
            rng.permutation(with_truth)[: f + a],
        ):
            cast = votes.copy()
            cast[seats[:f]] *= -1 if f % 2 else rng.choice([-1, 1], (f, 1 << n)).astype(np.int8)
            assert np.array_equal(majority(np.delete(cast, seats[f:], axis=0), 3), expected)


def test_the_rows_and_the_redundancy_of_the_deterministic_code():
    assert allocation_matrix("deterministic", 5, 1).tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 1, 1, 0],
        *[[1] * 5] * 3,
    ]
    alone, without_two = (
        np.eye(7)[:3],
        [[0, 0, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1, 1]],
    )
    assert np.array_equal(
        allocation_matrix("deterministic", 7, 0), [*alone, *without_two, np.ones(7)]
    )
    for n, b in CLAIMS:
        G, s = allocation_matrix("deterministic", n, b), (n - 1) // 2 - b
        assert (
            G.dtype == np.uint8
            and G.shape == (n, n)
            and (G.sum(1) % 2 == 1).all()
            and G.any(0).all()
        )
        assert G.sum() / n == pytest.approx((n + 2 * b + 1) / 2 - s / n)
    assert [
        round(allocation_matrix("deterministic", n, b).sum() / n, 3)
        for n, b in [(5, 1), (9, 2), (15, 3)]
    ] == [3.8, 6.778, 10.733]


def test_the_allocation_of_uncoded_is_the_identity():
    for n in (1, 2, 8):
        assert np.array_equal(allocation_matrix("uncoded", n), np.eye(n, dtype=np.uint8))


@for_each("n, redundancy", [(5, 2), (9, 2.5), (15, 3), (16, None), (100, 12)])
def test_the_bernoulli_code_has_no_empty_line_and_about_the_requested_redundancy(n, redundancy):
    drawn = np.stack([allocation_matrix("bernoulli", n, 1, redundancy, seed) for seed in range(40)])
    assert (
        drawn.dtype == np.uint8 and drawn.max() == 1 and drawn.any(1).all() and drawn.any(2).all()
    )
    asked = default_redundancy(n) if redundancy is None else redundancy
    assert (
        asked - 0.1 < drawn.sum((1, 2)).mean() / n < asked + 0.5
    )  # draws with an empty row or column are repeated
    assert np.array_equal(
        drawn[7], allocation_matrix("bernoulli", n, 1, redundancy, 7)
    ) and not np.array_equal(drawn[7], drawn[8])


def test_rows_and_columns_that_stay_empty_get_one_entry_each():
    for seed in range(20):
        G = allocation_matrix("bernoulli", 12, redundancy=0.01, seed=seed)
        assert (G.sum(1) >= 1).all() and G.any(0).all() and G.sum() <= 24


@for_each(
    "given, names",
    [
        (("deterministc", 5), "did you mean 'deterministic'"),
        (("deterministic", 4, 1), "choose 3 or 5"),
        (("deterministic", 5, 3), "0 to 2"),
        (("deterministic", 5, -1), "0 to 2"),
        (("uncoded", 0), "at least 1"),
        (("deterministic", 5, 1, 2.0), "code=bernoulli"),
        (("bernoulli", 5, 1, 0.0), "at most 5"),
        (("bernoulli", 5, 1, 5.5), "at most 5"),
        (("bernoulli", 5, 1, float("nan")), "at most 5"),
    ],
)
def test_the_error_for_an_invalid_code_names_valid_values(given, names):
    with pytest.raises((ConfigError, SpecError), match=names):
        allocation_matrix(*given)


# Cohorts.


@for_each("n, b", [(1, 0), (3, 0), (3, 1), (5, 0), (5, 1), (5, 2), (7, 1), (9, 0), (9, 2), (9, 4)])
def test_a_cohort_tolerates_byzantine_clients_in_any_seats_up_to_its_margin(n, b):
    signs = patterns(n)
    votes = local(allocation_matrix("deterministic", n, b), signs) * truth(signs)[:, None]
    for m in range(n, 3 * n + 2):
        seats = assign_seats(range(m), n, b, 5, m)
        sizes = np.array([len(voters) for voters in seats.voters], np.float32)
        assert (votes @ sizes).min() >= seats.margin >= m // n * (2 * b + 1)
        if m % n == 0:
            assert (votes @ sizes).min() == seats.margin == m // n * (2 * b + 1)
        assert seats.tolerates(0, seats.margin - 1) and not seats.tolerates(0, seats.margin)
        assert seats.tolerates((seats.margin - 1) // 2, 0) and not seats.tolerates(
            (seats.margin + 1) // 2, 0
        )


@for_each("m", [9, 10, 17, 31])
def test_each_client_has_one_seat_and_the_data_of_each_client_are_in_one_partition(m):
    clients = [100 + 7 * i for i in range(m)]
    seats = assign_seats(clients, 9, 2, 1, 4)
    assert sorted(client for voters in seats.voters for client in voters) == clients
    assert sorted(data for group in seats.partitions for data in group) == clients
    assert max(map(len, seats.partitions)) - min(map(len, seats.partitions)) <= 1
    assert all(client in seats.voters[seats.seat_of(client)] for client in clients)
    with pytest.raises(KeyError):
        seats.seat_of(99)


def test_seats_depend_on_seed_and_round_but_not_on_the_order_of_ids():
    ids = list(range(20))
    assert assign_seats(ids, 5, 1, 3, 8) == assign_seats(ids[::-1], 5, 1, 3, 8)
    assert (
        len({assign_seats(ids, 5, 1, seed, round).voters for seed in (3, 4) for round in (8, 9)})
        == 4
    )
    assert (
        len({assign_seats(ids, 5, 1, 3, round).seat_of(0) for round in range(40)}) == 5
    )  # a client has every seat in some round
    own = assign_seats(ids, 5, 1, 3, 8, owners=range(50, 57))
    assert own.voters == assign_seats(ids, 5, 1, 3, 8).voters and sorted(
        sum(own.partitions, ())
    ) == list(range(50, 57))


def test_too_few_clients_raise_a_config_error():
    with pytest.raises(
        ConfigError, match="9 seats needs at least 9 clients, not 8; choose fewer seats"
    ):
        assign_seats(range(8), 9, 2, 0, 1)
    with pytest.raises(ConfigError, match="9 clients with data, not 3"):
        assign_seats(range(9), 9, 2, 0, 1, owners=range(3))


def test_sums_of_signs_in_a_partition_would_break_the_code():
    G, sums = (
        allocation_matrix("deterministic", 7, 0),
        np.array([[5, -1, -1, -1, -1, -1, 1]]),
    )  # sums over the five clients of each partition
    assert sums.sum() > 0 and local(G, sums).sum() < 0
    assert np.sign(local(G, np.sign(sums)).sum()) == np.sign(np.sign(sums).sum())


# Rows and votes.


ROWS = CodeRow(7, 2, (DataPartition(0, (4,)), DataPartition(3, (1, 9))))


def unpacked(packed, numel: int) -> torch.Tensor:
    return torch.from_numpy(sign_values(np.frombuffer(packed, np.uint8), numel, 1.0))


def test_a_row_is_equal_after_packing_and_unpacking():
    assert CodeRow.unpack(ROWS.pack()) == ROWS and ROWS.senders == [1, 4, 9]
    assert len(CodeRow(12, 3, tuple(DataPartition(j, (j,)) for j in range(15))).pack()) < 120


@for_each(
    "data",
    [
        b"",
        b"{}",
        b"[1,2]",
        b"[1,2,[]]",
        b"[1,2,[[3]]]",
        b'[1,2,[["a",4]]]',
        b"[1,2,[[1,true]]]",
        b"[" * 9999,
    ],
)
def test_damaged_rows_are_refused(data):
    with pytest.raises(ProtocolError, match="missing or damaged"):
        CodeRow.unpack(data)


def test_random_signs_of_ties_differ_between_seats_and_rounds():
    one, other = (kernel.pack(np.full((1, 1000), sign))[0] for sign in (1.0, -1.0))
    voted = {
        (seat, round): vote_of(CodeRow(7, seat, ROWS.partitions), [one, other], 1000, 1, round)
        for seat in range(3)
        for round in (1, 2)
    }
    again = vote_of(CodeRow(8, 0, ROWS.partitions), [other, one], 1000, 1, 1)
    assert torch.equal(again, voted[0, 1]), "voters of one seat cast the same vote"
    for a, b in combinations(voted.values(), 2):
        assert 400 < (a == b).sum() < 600


def test_signs_of_zeros_and_nan_are_random_by_partition_and_round():
    x = torch.zeros(1000)
    x[:10], x[10:20], x[20] = 2.0, -2.0, float("nan")
    packed = [
        unpacked(ballot_of(x, 1, round, part), 1000)
        for round, part in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert torch.equal(packed[0], packed[1])
    for other in packed[2:]:
        assert 400 < (other[20:] == packed[0][20:]).sum() < 580
    assert all(torch.equal(p[:20], x[:20].sign()) for p in packed)
    infinite = torch.full((8,), float("-inf"))
    assert torch.equal(unpacked(ballot_of(infinite, 1, 1, 0), 8), -torch.ones(8))


def test_the_ballot_of_a_partition_is_a_majority_and_random_without_ballots():
    generator = np.random.default_rng(5)
    cast = {
        client: kernel.pack((2.0 * (generator.random(64) < 0.5) - 1)[None])[0]
        for client in (1, 4, 9)
    }
    first, second = (CodeRow(7, 2, (part,)) for part in ROWS.partitions)
    assert torch.equal(vote_on_ballots(first, cast, 64, 1, 1), unpacked(cast[4], 64))
    agree = unpacked(cast[1], 64) == unpacked(cast[9], 64)
    assert torch.equal(vote_on_ballots(second, cast, 64, 1, 1)[agree], unpacked(cast[1], 64)[agree])
    assert torch.equal(vote_on_ballots(second, {1: cast[1]}, 64, 1, 1), unpacked(cast[1], 64))
    coin = vote_on_ballots(first, {1: cast[1]}, 64, 1, 1)
    other_voter = CodeRow(8, 0, (ROWS.partitions[0],))
    assert torch.equal(coin, vote_on_ballots(other_voter, {}, 64, 1, 1))
    assert not torch.equal(coin, vote_on_ballots(second, {}, 64, 1, 1))
