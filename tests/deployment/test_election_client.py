"""What a voter makes of its row: the same bits as every other honest voter, whoever trained them; and it counts what it was passed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import for_each
from cryptography.hazmat.primitives.asymmetric import ec
from federation import Federation
from test_process import DATA, a_strategy, invitation, own

from fedcomp import RunConfig, UserError, codec, memory, seeds
from fedcomp.clients.client import shard_of
from fedcomp.codecs import Context
from fedcomp.deployment.member import Member
from fedcomp.errors import FrameError, ProtocolError
from fedcomp.kernels import votes
from fedcomp.keys.keyring import point_of
from fedcomp.messages import TRAIN, UPDATE, Assignment
from fedcomp.strategies import Rules, resolved, strategy
from fedcomp.strategies.announcements import terms_of
from fedcomp.strategies.client_algorithm import DataPartition
from fedcomp.strategies.local_election import (
    BALLOTS,
    ROW,
    TALLY,
    BallotElection,
    DataElection,
    Row,
    ballot_of,
    local_tie_seed,
    missing_ballot,
    of_partitions,
    signs,
    tie_seed,
)  # fmt: skip
from fedcomp.strategies.sealed_voter import CARD, KEY_OF, NO_CARD

RULES = Rules(
    participation=1.0,
    uplink="sign",
    downlink="efsign",
    memory="none",
    downlink_memory="none",
    seed=3,
    lr=0.02,
)
ROWS = Row(7, 2, (DataPartition(0, (4,)), DataPartition(3, (1, 9))))


def test_a_row_arrives_as_it_was_sent():
    assert Row.unpack(ROWS.pack()) == ROWS and ROWS.senders == [1, 4, 9]
    assert len(Row(12, 3, tuple(DataPartition(j, (j,)) for j in range(15))).pack()) < 120


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
    with pytest.raises(ProtocolError, match="cannot be read"):
        Row.unpack(data)


def test_coins_of_seats_are_their_own_those_of_the_tally_are_shared():
    of_seats = {local_tie_seed(1, 2, seat) for seat in range(5)}
    assert tie_seed(1, 2) == tie_seed(1, 2)
    assert (
        len(of_seats | {local_tie_seed(1, 3, 0), tie_seed(1, 2), tie_seed(1, 3), tie_seed(2, 2)})
        == 9
    )


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
    first, second = of_partitions(ROWS, cast, 64, 1, 1)
    assert first.tobytes() == cast[4].tobytes()
    agree = signs(cast[1], 64) == signs(cast[9], 64)
    assert torch.equal(signs(second, 64)[agree], signs(cast[1], 64)[agree])
    gone = of_partitions(ROWS, {1: cast[1]}, 64, 1, 1)
    assert (
        gone[0].tobytes() == missing_ballot(64, 1, 1, 0).tobytes()
        and gone[1].tobytes() == cast[1].tobytes()
    )
    assert missing_ballot(64, 1, 1, 0).tobytes() != missing_ballot(64, 1, 1, 1).tobytes()


def federation(text: str, clients: int = 5) -> Federation:
    return Federation(
        RULES, clients=clients, strategy=lambda rules, **told: strategy(text, rules, **told)
    )


def asked(f: Federation, client: int, row: Row, **changes) -> Assignment:
    b = f.strategy.broadcasts
    a = Assignment(
        1,
        TRAIN,
        client,
        "up-to-date",
        b.version,
        b.version,
        b.fingerprint,
        [],
        "",
        [ROW.encode(), row.pack()],
    )
    return replace(a, **changes)


def test_honest_voters_of_equal_rows_agree_to_the_bit():
    f = federation("election:byzantine=2")
    parts = tuple(DataPartition(j, (j,)) for j in range(5))
    reports = [
        f.members[client].handle(asked(f, client, Row(client, client, parts)))
        for client in range(5)
    ]
    assert {report.kind for report in reports} == {UPDATE} and len(
        {report.frame for report in reports}
    ) == 1
    assert len(reports[0].frame) <= 6 + 24
    other = f.members[0].handle(asked(f, 0, Row(0, 0, parts[1:4]), round=2))
    assert other.kind == UPDATE and other.frame != reports[0].frame


def test_a_partition_trains_alike_whoever_does_it_and_beside_whatever():
    f = federation("election:byzantine=2")
    alone = f.members[0].handle(asked(f, 0, Row(0, 0, (DataPartition(3, (3,)),)))).frame
    again = f.members[4].handle(asked(f, 4, Row(4, 9, (DataPartition(3, (3,)),)))).frame
    renumbered = f.members[1].handle(asked(f, 1, Row(1, 0, (DataPartition(2, (3,)),)))).frame
    assert alone == again != renumbered


def test_who_lacks_the_data_of_a_part_says_so():
    f = federation("election:byzantine=2")
    f.members[0].all_shards = None
    report = f.members[0].handle(asked(f, 0, Row(0, 0, (DataPartition(3, (3,)),))))
    assert (report.kind, report.stage) == ("failed", "train") and "--partition-id" in report.reason
    with pytest.raises(ProtocolError, match="part 3"):
        shard_of(DataPartition(3, (5,)), [np.arange(3)] * 5)
    nothing = f.members[1].handle(asked(f, 1, ROWS, announced=[]))
    assert nothing.stage == "train" and "not told what to count" in nothing.reason


def test_passed_ballots_are_opened_and_counted():
    work, kept = BallotElection(), memory("none", codec("sign"), 42)
    generator = torch.Generator().manual_seed(1)
    ballots = {client: torch.randn(42, generator=generator).sign() for client in range(3)}
    row = Row(0, 0, tuple(DataPartition(client, (client,)) for client in range(3)))
    announced = {ROW: row.pack()} | {
        str(client): codec("sign").encode(x) for client, x in ballots.items()
    }
    context = Context(round=1, phase=TALLY, announced=announced)
    heard = work.later_update(kept, {}, 5, context)
    assert torch.equal(heard, torch.stack(list(ballots.values())).sum(0).sign())
    (frame,) = work.encode([kept], heard[None], [{}], [5], context)
    assert torch.equal(codec("sign").decode(frame, numel=42), heard) and kept.pending == frame
    with pytest.raises(FrameError):
        work.later_update(kept, {}, 5, replace(context, announced=announced | {"1": b"nonsense"}))


def deployed(text: str, **changes) -> tuple[Member, Assignment]:
    """A member of a run of five, and what it is asked first."""
    config = resolved(RunConfig(clients=5, participation=1.0, batch_size=10, strategy=text))
    made = a_strategy(config)
    member = Member(own(2, **changes), None)
    member.key = ec.generate_private_key(ec.SECP384R1())
    presence = member.join(invitation(config, made))
    assert not presence.reason, presence.reason
    b = made.broadcasts
    return member, Assignment(
        1,
        made.client_algorithm.phases[0],
        2,
        "up-to-date",
        b.version,
        b.version,
        b.fingerprint,
        [],
        "",
    )


def test_a_client_asked_again_about_something_else_answers_anew():
    """A server that was started again begins another attempt of the round: cards of the one before are worth nothing."""
    member, asked = deployed("election:byzantine=2,form=ballots,sealed=true")
    told_options = member.client.algorithm.options
    point = point_of(member.key.public_key())
    others = {
        client: point_of(ec.generate_private_key(ec.SECP384R1()).public_key())
        for client in range(5)
    } | {2: point}

    def attempt(name: bytes) -> Assignment:
        told = {
            "attempt": name * 32,
            "terms": terms_of(told_options, asked.fingerprint, 1.0).encode(),
        }
        told |= {ROW: Row(2, 0, tuple(DataPartition(j, (j,)) for j in range(5))).pack()}
        told |= {f"{KEY_OF}{client}": key for client, key in others.items()}
        return replace(
            asked, announced=[part for key, value in told.items() for part in (key.encode(), value)]
        )

    first = member.answer(attempt(b"1"), 1)
    assert first.kind == UPDATE and member.answer(attempt(b"1"), 1) is first
    second = member.answer(attempt(b"2"), 2)
    assert (
        second.kind == UPDATE
        and len(second.frame) == len(first.frame)
        and second.frame != first.frame
    )
    others[3] = point_of(ec.generate_private_key(ec.SECP384R1()).public_key())
    changed = member.answer(attempt(b"3"), 3)
    cards = [changed.frame[at : at + CARD] for at in range(0, 5 * CARD, CARD)]
    assert changed.kind == UPDATE and [card == NO_CARD for card in cards] == [
        client == 3 for client in range(5)
    ], "it has another key of 3"


def test_a_client_with_its_own_data_alone_or_another_cut_of_it_cannot_train_for_others():
    for changes in ({"partition_id": None}, {"partitions": 7}):
        with pytest.raises(
            UserError,
            match="--partition-id K and the data of the whole task, or the server form=ballots",
        ):
            deployed("election:byzantine=2", **changes)
        deployed("election:byzantine=2,form=ballots", **changes)
    member, _ = deployed("election:byzantine=2")
    assert sorted(np.concatenate(member.client.all_shards)) == list(range(len(DATA)))


def test_a_client_without_a_key_cannot_seal():
    config = resolved(
        RunConfig(
            clients=5,
            participation=1.0,
            batch_size=10,
            strategy="election:byzantine=2,form=ballots,sealed=true",
        )
    )
    with pytest.raises(UserError, match="leave --stock out"):
        Member(own(2), None).join(invitation(config, a_strategy(config)))


def test_seeds_are_the_clients_own_where_it_signs_for_itself_and_the_runs_where_all_have_to_agree():
    a = Assignment(4, BALLOTS, 2, "", "", "", "", [], "")
    sign = codec("sign")
    assert BallotElection().seed(sign, 9, a) == seeds.key(9, "encode", 4, 2)
    assert (
        BallotElection().seed(sign, 9, replace(a, phase=TALLY))
        == DataElection().seed(sign, 9, a)
        == 9
    )
