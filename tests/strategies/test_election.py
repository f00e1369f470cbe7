"""When the result of an election counts, which ballots a voter counts, and which options are refused."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import for_each
from federation import Federation

from fedcomp import UserError, codec, memory, seeds
from fedcomp.codecs import Context
from fedcomp.errors import ConfigError, FrameError
from fedcomp.layout import Layout
from fedcomp.messages import TRAIN, UPDATE, Assignment
from fedcomp.server.results import WarningLog
from fedcomp.strategies import RoundStrategy, StrategyConfig, strategy
from fedcomp.strategies.base import DataPartition, Phase, Progress
from fedcomp.strategies.codes import (
    BALLOTS,
    ROW,
    TALLY,
    CodeRow,
    allocation_matrix,
    assign_seats,
)
from fedcomp.strategies.election import BallotElectionClient

RULES = StrategyConfig(
    participation=1.0,
    uplink="sign",
    downlink="efsign",
    memory="none",
    downlink_memory="none",
    seed=3,
    lr=0.02,
)


def made(text: str, clients: int, rules: StrategyConfig = RULES, **settings) -> RoundStrategy:
    return strategy(text, replace(rules, clients=clients), Layout.flat(8), **settings)


def federation(text: str, clients: int = 5, settings: dict | None = None, **changes) -> Federation:
    rules = replace(RULES, clients=clients, **changes)
    return Federation(
        rules, clients=clients, strategy=lambda *args: strategy(text, *args, **(settings or {}))
    )


# When a result counts.


@for_each("n, b", [(3, 0), (3, 1), (5, 1), (5, 2)])
def test_a_result_counts_exactly_if_it_is_certainly_correct(n, b):
    """Enumerate the seats of f Byzantine clients, of which m are excluded, and of `a` absent clients, and all signs of the partitions."""
    signs = np.array(list(itertools.product((-1, 1), repeat=n)))
    G = allocation_matrix("deterministic", n, b)
    votes, truth = np.sign(signs @ G.T), np.sign(signs.sum(1))
    for f, m, a in itertools.product(range(n + 1), repeat=3):
        lying = max(0, f - m)
        if lying + m + a > n:
            continue
        fates = set(
            itertools.permutations([-1] * lying + [0] * (m + a) + [1] * (n - lying - m - a))
        )
        least = min(int((votes * np.array(fate) * truth[:, None]).sum(1).min()) for fate in fates)
        assert (
            assign_seats(range(n), n, b, 0, 1).tolerates(lying, m + a)
            == (2 * lying + m + a <= 2 * b)
            == (least > 0)
        ), (f, m, a)


@for_each("options, bad, lost, closes", [
    ("byzantine=1", 1, 0, True),
    ("byzantine=1", 0, 1, False),
    ("byzantine=2", 1, 1, True),
    ("byzantine=2", 1, 2, False),
    ("byzantine=2,f=1", 1, 2, True),
    ("byzantine=2,f=1", 0, 3, False),
    ("byzantine=2,f=0", 0, 4, True),
    ("byzantine=2,f=0", 3, 1, True),
])  # fmt: skip
def test_absent_voters_and_invalid_frames_count_according_to_the_rule(options, bad, lost, closes):
    said: list[str] = []
    f = federation(f"election:{options}", settings={"warn": WarningLog(said.append)})
    honest = federation(f"election:{options}")
    for client in range(bad):
        f.faults[(client, 1)] = lambda a, r: replace(r, frame=r.frame[:-1])
    for client in range(bad, bad + lost):
        f.faults[(client, 1)] = lambda a, r: replace(
            r, kind="failed", frame=b"", stage="train", reason="no memory left"
        )
    (outcome,), (whole,) = f.loop.rounds([1]), honest.loop.rounds([1])
    assert (outcome.broadcast is not None) == closes == (len(outcome.accepted) > 0)
    assert len(outcome.accepted) + len(outcome.rejections) == 5
    if closes:
        assert outcome.broadcast.frame == whole.broadcast.frame
        assert len(said) == (bad > f.strategy.f)
    else:
        assert {r.stage for r in outcome.rejections if r.client >= bad + lost} == {
            "aggregate"
        } and len(said) == 1
        assert torch.equal(f.loop.broadcasts.weights, f.initial)


def test_the_round_after_a_failed_one_moves_the_model():
    f = federation("election:byzantine=1")
    f.faults[(2, 2)] = lambda a, r: replace(
        r, kind="failed", frame=b"", stage="train", reason="no memory left"
    )
    outcomes = list(f.loop.rounds(range(1, 5)))
    assert [outcome.broadcast is not None for outcome in outcomes] == [True, False, True, True]
    assert "1 are absent, 0 are proven Byzantine" in outcomes[1].rejections[0].reason
    assert outcomes[1].suspicion.keys() == outcomes[0].suspicion.keys()


def test_a_round_without_votes_is_reported():
    said: list[str] = []
    f = federation("election:byzantine=1", settings={"warn": WarningLog(said.append)})
    for client in range(5):
        f.faults[(client, 1)] = lambda a, r: replace(
            r, kind="failed", frame=b"", stage="train", reason="no memory left"
        )
    first, second = f.loop.rounds([1, 2])
    assert (
        first.broadcast is None
        and second.broadcast is not None
        and said == ["round 1 failed: none of 5 clients has voted"]
    )


def test_a_quorum_that_byzantine_clients_could_fill_is_raised():
    said: list[str] = []
    rules = replace(RULES, quorum=0.3)
    one = made("election:byzantine=2,f=1", 9, rules, warn=WarningLog(said.append))
    assert len(one.select_clients(range(9), 1, "")) == 9
    (phase,) = one.phases(1)
    assert said == [
        "--quorum 0.3 is 3 of 9 answers, but a vote with f=1 waits for 7 answers, so that fast Byzantine clients cannot fill the quorum"
    ]
    assert phase.completion.check(Progress(9, 6, 6, 0.0)) is None
    assert phase.completion.check(Progress(9, 7, 7, 0.0)) is not None


# Seats.


def rows_of(one: RoundStrategy, cohort: list[int], phase: str = TRAIN) -> dict[int, CodeRow]:
    return {
        client: CodeRow.unpack(one.announce(Phase(phase), client, {})[ROW]) for client in cohort
    }


def begun(text: str, clients: int, **changes) -> RoundStrategy:
    return federation(text, clients, **changes).strategy


def test_the_row_of_a_client_is_that_of_its_seat_in_the_matrix():
    one = begun("election:byzantine=2", 9)
    for round in (1, 2):
        cohort = one.select_clients(range(9), round, "")
        rows = rows_of(one, cohort)
        assert sorted(row.seat for row in rows.values()) == list(range(9))
        assert all(row.client == client for client, row in rows.items())
        owner = {part.number: part.clients for row in rows.values() for part in row.partitions}
        assert sorted(sets for (sets,) in owner.values()) == list(range(9))
        for place, client in enumerate(cohort):
            assert [part.number for part in rows[client].partitions] == np.flatnonzero(
                one.allocation[place]
            ).tolist()


def test_more_clients_than_seats_share_the_seats_and_the_partitions():
    one = begun("election:byzantine=1,seats=5,f=2", 13)
    cohort = one.select_clients(range(13), 1, "")
    rows = rows_of(one, cohort)
    by_seat: dict[int, set] = {}
    for row in rows.values():
        by_seat.setdefault(row.seat, set()).add(row.partitions)
    assert len(by_seat) == 5 and all(len(parts) == 1 for parts in by_seat.values()), (
        "clients of one seat count the same partitions"
    )
    assert sorted({client for row in rows.values() for client in row.senders}) == list(range(13))
    assert len(one.allocation) == 13


def test_a_code_has_as_many_seats_as_the_cohort_has_clients_up_to_15():
    sizes = {
        clients: len(made("election:byzantine=1", clients).code)
        for clients in (3, 4, 9, 10, 15, 16, 200)
    }
    assert sizes == {3: 3, 4: 3, 9: 9, 10: 9, 15: 15, 16: 15, 200: 15}
    assert len(made("election:code=uncoded,byzantine=1", 10).code) == 10


@for_each("form", ["data", "ballots"])
def test_empty_seats_count_as_absent_voters(form):
    said: list[str] = []
    one = made(f"election:byzantine=2,f=1,form={form}", 9, warn=WarningLog(said.append))
    assert one.min_clients == 7 and one.select_clients(range(9), 1, "") == list(range(9))
    cohort = one.select_clients([0, 1, 2, 4, 5, 7, 8], 2, "")
    assert cohort == [0, 1, 2, 4, 5, 7, 8] and len(one.allocation) == 7
    rows = rows_of(one, cohort, TALLY)
    if form == "data":
        assert {3, 6} & {client for row in rows.values() for client in row.senders}, (
            "voters have the data of absent clients"
        )
    assert (
        one.select_clients([0, 1, 2, 4, 5, 7], 3, "") == one.select_clients([1], 4, "") == []
        and len(said) == 1
        and "is skipped" in said[0]
    )


@for_each("options", ["form=data", "form=ballots", "form=ballots,sealed=true"])
def test_a_round_is_skipped_while_too_few_clients_are_connected(options):
    said: list[str] = []
    f = federation(f"election:byzantine=2,{options}", settings={"warn": WarningLog(said.append)})
    f.clients = 3
    (first,) = f.loop.rounds([1])
    f.clients = 5
    (second,) = f.loop.rounds([2])
    assert (
        (first.cohort, first.broadcast) == ([], None) and "is skipped" in said[0] and len(said) == 1
    )
    assert second.broadcast is not None and len(second.accepted) == 5


def test_a_cohort_below_the_number_of_seats_is_enlarged():
    one = begun("election:byzantine=1,seats=9", 18, participation=0.5)
    assert (
        len(one.select_clients(range(18), 1, "")) == 9
        and len(one.select_clients(range(16), 1, "")) == 9
    )


def test_ballots_are_forwarded_only_to_voters_that_count_them():
    f = federation("election:byzantine=0,form=ballots")
    told: dict[tuple, set] = {}
    handle = f.handle

    def listen(assignments):
        for a in assignments:
            told[a.phase, a.client] = {name.decode() for name in a.announced[::2]}
        return handle(assignments)

    f.handle = listen
    (outcome,) = f.loop.rounds([1])
    assert outcome.broadcast is not None
    for client in range(5):
        row = f.strategy.row(client)
        assert told[BALLOTS, client] == set() and told[TALLY, client] == {
            ROW,
            *map(str, row.senders),
        }
    assert {len(f.strategy.row(client).senders) for client in range(5)} == {1, 3, 5}
    passed = sum(len(f.strategy.row(client).senders) for client in range(5)) * len(
        outcome.accepted[0].frame
    )
    assert sum(outcome.traffic.downlink.values()) > passed
    assert set(outcome.traffic.uplink.values()) == {2 * len(outcome.accepted[0].frame)}, (
        "one ballot, one vote"
    )


def test_the_sender_of_an_empty_ballot_is_rejected():
    f = federation("election:byzantine=2,form=ballots")
    f.faults[(1, 1)] = lambda a, r: replace(r, frame=b"", ticket="") if a.phase == BALLOTS else r
    (outcome,) = f.loop.rounds([1])
    assert len(outcome.accepted) == 4 and outcome.broadcast is not None
    assert [(r.client, "empty" in r.reason) for r in outcome.rejections] == [(1, True)]


# Refused options.


@for_each("text, clients, changes, fix", [
    ("election", 5, {"uplink": "efsign"}, "leave --uplink out"),
    ("election", 5, {"uplink": "stc"}, "leave --uplink out"),
    ("election", 5, {"memory": "signum"}, "leave --memory out, or give none"),
    ("election", 5, {"weights": "examples"}, "leave --weights out"),
    ("election", 5, {"keep_momentum": True}, "leave --keep-momentum out"),
    ("election:byzantine=3", 5, {}, "needs 7 seats.* give byzantine=2"),
    ("election:byzantine=1", 2, {}, "a larger --participation"),
    ("election:byzantine=-1", 5, {}, "0 to 2 Byzantine seats"),
    ("election:byzantine=1,f=2", 5, {}, "smaller 'f'"),
    ("election:seats=4", 4, {}, "choose 3 or 5"),
    ("election:seats=4", 5, {}, "choose 3 or 5"),
    ("election:seats=5", 5, {"lr": 1e300}, "--lr 1e[+]300"),
    ("election:seats=7", 5, {}, "seats=7 needs rounds of at least 7 clients"),
    ("election:seats=1000000001", 5, {}, "a smaller 'seats'"),
    ("election:code=bernoulli,seats=1000000000", 9, {}, "a smaller 'seats'"),
    ("election:byzantine=2,seats=3", 9, {}, "needs 5 seats, .* more 'seats'"),
    ("election", 2, {}, "a round of 2 clients has only 1; .*a larger --participation"),
    ("election:redundancy=2", 5, {}, "code=bernoulli"),
    ("election:f=-1", 5, {}, "at least 0"),
    ("election:momentum=1", 5, {}, "such as 0.9"),
    ("election:form=dta", 5, {}, "did you mean 'data'"),
])  # fmt: skip
def test_the_error_for_an_unsuitable_option_names_a_suitable_one(text, clients, changes, fix):
    with pytest.raises(UserError, match=fix):
        made(text, clients, replace(RULES, **changes))


def test_the_bound_of_f_depends_on_the_size_of_the_cohort():
    assert made("election:byzantine=1,seats=5,f=6", 25).f == 6
    with pytest.raises(ConfigError, match="tolerates 7 Byzantine clients among 25"):
        made("election:byzantine=1,seats=5,f=8", 25)


def test_the_notice_says_what_each_form_guarantees():
    assert (
        "up to 2 Byzantine clients in a round cannot change the model"
        in made("election:byzantine=2", 9).notice
    )
    assert (
        "the ballot of a Byzantine client counts like any other"
        in made("election:byzantine=2,form=ballots", 9).notice
    )
    assert "guarantees nothing" in made("election:code=bernoulli,byzantine=2", 9).notice


def test_a_bernoulli_code_reports_its_redundancy_as_drawn():
    run = made("election:code=bernoulli,byzantine=2,redundancy=2", 15)
    drawn = run.allocation.sum() / 15
    assert drawn > 2 and f"trains on {drawn:.3g} partitions on average, not 2:" in run.notice
    assert "partitions on average" not in made("election:byzantine=2", 15).notice
    ballots = made("election:code=bernoulli,byzantine=2,redundancy=2,form=ballots", 15).notice
    assert f"counts the ballots of {drawn:.3g} of 15 groups of clients on average" in ballots
    assert "trains on" not in ballots


def test_the_notice_advises_against_even_cohorts():
    advice = "the number of clients in a round is 10, which is even"
    assert advice in made("vote", 10).notice and not made("vote", 9).notice
    assert advice in made("election:code=uncoded,byzantine=2", 10).notice
    assert "is even" not in made("election:byzantine=2", 10).notice, (
        "a deterministic code has no ties"
    )


# Clients.


def asked(f: Federation, client: int, row: CodeRow, **changes) -> Assignment:
    b = f.loop.broadcasts
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


def test_honest_voters_of_equal_rows_send_the_same_vote():
    f = federation("election:byzantine=2")
    parts = tuple(DataPartition(j, (j,)) for j in range(5))
    reports = [
        f.members[client].answer(asked(f, client, CodeRow(client, client, parts)))
        for client in range(5)
    ]
    assert {report.kind for report in reports} == {UPDATE} and len(
        {report.frame for report in reports}
    ) == 1
    assert len(reports[0].frame) <= 6 + 24
    other = f.members[0].answer(asked(f, 0, CodeRow(0, 0, parts[1:4]), round=2))
    assert other.kind == UPDATE and other.frame != reports[0].frame


def test_the_ballot_of_a_partition_depends_only_on_its_number_and_data():
    f = federation("election:byzantine=2")
    alone = f.members[0].answer(asked(f, 0, CodeRow(0, 0, (DataPartition(3, (3,)),)))).frame
    again = f.members[4].answer(asked(f, 4, CodeRow(4, 9, (DataPartition(3, (3,)),)))).frame
    renumbered = f.members[1].answer(asked(f, 1, CodeRow(1, 0, (DataPartition(2, (3,)),)))).frame
    assert alone == again != renumbered


def test_a_client_without_the_data_of_a_partition_fails_with_a_reason():
    f = federation("election:byzantine=2")
    f.members[0].trainer.all_shards = {0: np.arange(3)}
    report = f.members[0].answer(asked(f, 0, CodeRow(0, 0, (DataPartition(3, (3,)),))))
    assert (report.kind, report.stage) == ("failed", "train") and "--partition-id" in report.reason
    nothing = f.members[1].answer(asked(f, 1, CodeRow(1, 0, ()), announced=[]))
    assert nothing.stage == "train" and "missing or damaged" in nothing.reason


def test_a_client_votes_on_the_ballots_that_the_server_forwards():
    algorithm, m = BallotElectionClient(), memory("none", codec("sign"), 42)
    generator = torch.Generator().manual_seed(1)
    ballots = {client: torch.randn(42, generator=generator).sign() for client in range(3)}
    row = CodeRow(0, 0, tuple(DataPartition(client, (client,)) for client in range(3)))
    announced = {ROW: row.pack()} | {
        str(client): codec("sign").encode(x) for client, x in ballots.items()
    }
    context = Context(round=1, phase=TALLY, announced=announced)
    vote = algorithm.later_update(m, {}, 5, context)
    assert torch.equal(vote, torch.stack(list(ballots.values())).sum(0).sign())
    (frame,) = algorithm.encode([m], vote[None], [{}], [5], context)
    assert torch.equal(codec("sign").decode(frame, numel=42), vote) and m.pending == frame
    with pytest.raises(FrameError):
        algorithm.later_update(m, {}, 5, replace(context, announced=announced | {"1": b"nonsense"}))


def test_votes_use_the_seed_of_the_run_and_ballots_that_of_the_client():
    a = Assignment(4, BALLOTS, 2, "", "", "", "", [], "")
    sign = codec("sign")
    assert BallotElectionClient().seed(sign, 9, a) == seeds.key(9, "encode", 4, 2)
    assert BallotElectionClient().seed(sign, 9, replace(a, phase=TALLY)) == 9
