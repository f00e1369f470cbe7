"""What a voter counts: its row, the ballots of the row, and the vote that follows."""

import itertools

import numpy as np
import pytest
import torch
from cases import for_each

from fedcomp.errors import ProtocolError
from fedcomp.kernels import Signs, votes
from fedcomp.strategies.base import DataPartition
from fedcomp.strategies.local_election import CodeRow, ballot_of, vote_of, vote_on_ballots

ROWS = CodeRow(7, 2, (DataPartition(0, (4,)), DataPartition(3, (1, 9))))


def signs(packed, numel: int) -> torch.Tensor:
    return torch.from_numpy(Signs(np.frombuffer(packed, np.uint8), numel, 1.0).values())


def test_a_row_arrives_as_it_was_sent():
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
def test_what_is_no_row_is_refused(data):
    with pytest.raises(ProtocolError, match="missing or damaged"):
        CodeRow.unpack(data)


def test_coins_of_ties_differ_between_seats_and_rounds():
    one, other = (votes.pack(np.full((1, 1000), sign))[0] for sign in (1.0, -1.0))
    voted = {
        (seat, round): vote_of(CodeRow(7, seat, ROWS.partitions), [one, other], 1000, 1, round)
        for seat in range(3)
        for round in (1, 2)
    }
    again = vote_of(CodeRow(8, 0, ROWS.partitions), [other, one], 1000, 1, 1)
    assert torch.equal(again, voted[0, 1]), "voters of one seat vote alike"
    for a, b in itertools.combinations(voted.values(), 2):
        assert 400 < (a == b).sum() < 600


def test_zeros_and_what_is_no_number_are_coins_of_the_partition_and_round():
    x = torch.zeros(1000)
    x[:10], x[10:20], x[20] = 2.0, -2.0, float("nan")
    packed = [
        signs(ballot_of(x, 1, round, part), 1000)
        for round, part in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert torch.equal(packed[0], packed[1])
    for other in packed[2:]:
        assert 400 < (other[20:] == packed[0][20:]).sum() < 580
    assert all(torch.equal(p[:20], x[:20].sign()) for p in packed)
    infinite = torch.full((8,), float("-inf"))
    assert torch.equal(signs(ballot_of(infinite, 1, 1, 0), 8), -torch.ones(8))


def test_a_partition_of_several_has_the_majority_of_its_ballots_and_one_of_none_a_coin_for_all():
    generator = np.random.default_rng(5)
    cast = {
        client: votes.pack((2.0 * (generator.random(64) < 0.5) - 1)[None])[0]
        for client in (1, 4, 9)
    }
    first, second = (CodeRow(7, 2, (part,)) for part in ROWS.partitions)
    assert torch.equal(vote_on_ballots(first, cast, 64, 1, 1), signs(cast[4], 64))
    agree = signs(cast[1], 64) == signs(cast[9], 64)
    assert torch.equal(vote_on_ballots(second, cast, 64, 1, 1)[agree], signs(cast[1], 64)[agree])
    assert torch.equal(vote_on_ballots(second, {1: cast[1]}, 64, 1, 1), signs(cast[1], 64))
    coin = vote_on_ballots(first, {1: cast[1]}, 64, 1, 1)
    other_voter = CodeRow(8, 0, (ROWS.partitions[0],))
    assert torch.equal(coin, vote_on_ballots(other_voter, {}, 64, 1, 1))
    assert not torch.equal(coin, vote_on_ballots(second, {}, 64, 1, 1))
