"""What a voter makes of its row: the same bits as every other honest voter, whoever trained them; and it counts what it was passed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from federation import Federation
from test_process import DATA, a_strategy, invitation, own

from fedcomp import RunConfig, UserError, codec, memory, seeds
from fedcomp.codecs import Context
from fedcomp.deployment.member import Member
from fedcomp.errors import FrameError
from fedcomp.keys.keyring import point_of
from fedcomp.messages import TRAIN, UPDATE, Assignment
from fedcomp.privacy.ballots import CARD
from fedcomp.strategies import Rules, resolved, strategy
from fedcomp.strategies.client_algorithm import DataPartition
from fedcomp.strategies.election import BallotElectionClient, DataElectionClient
from fedcomp.strategies.local_election import BALLOTS, ROW, TALLY, Row
from fedcomp.strategies.sealed_messages import KEY_OF, NO_CARD, terms_of

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
        f.members[client].answer(asked(f, client, Row(client, client, parts)))
        for client in range(5)
    ]
    assert {report.kind for report in reports} == {UPDATE} and len(
        {report.frame for report in reports}
    ) == 1
    assert len(reports[0].frame) <= 6 + 24
    other = f.members[0].answer(asked(f, 0, Row(0, 0, parts[1:4]), round=2))
    assert other.kind == UPDATE and other.frame != reports[0].frame


def test_a_partition_trains_alike_whoever_does_it_and_beside_whatever():
    f = federation("election:byzantine=2")
    alone = f.members[0].answer(asked(f, 0, Row(0, 0, (DataPartition(3, (3,)),)))).frame
    again = f.members[4].answer(asked(f, 4, Row(4, 9, (DataPartition(3, (3,)),)))).frame
    renumbered = f.members[1].answer(asked(f, 1, Row(1, 0, (DataPartition(2, (3,)),)))).frame
    assert alone == again != renumbered


def test_who_lacks_the_data_of_a_part_says_so():
    f = federation("election:byzantine=2")
    f.members[0].trainer.partitions.shards = {0: np.arange(3)}
    report = f.members[0].answer(asked(f, 0, Row(0, 0, (DataPartition(3, (3,)),))))
    assert (report.kind, report.stage) == ("failed", "train") and "--partition-id" in report.reason
    nothing = f.members[1].answer(asked(f, 1, ROWS, announced=[]))
    assert nothing.stage == "train" and "not told what to count" in nothing.reason


def test_passed_ballots_are_opened_and_counted():
    work, kept = BallotElectionClient(), memory("none", codec("sign"), 42)
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
    told_options = member.session.algorithm.options
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
    assert sorted(np.concatenate(member.session.trainer.partitions.shards)) == list(
        range(len(DATA))
    )


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
    assert BallotElectionClient().seed(sign, 9, a) == seeds.key(9, "encode", 4, 2)
    assert (
        BallotElectionClient().seed(sign, 9, replace(a, phase=TALLY))
        == DataElectionClient().seed(sign, 9, a)
        == 9
    )
