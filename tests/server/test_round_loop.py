"""The round loop with real clients: bytes are counted, rejections have reasons, and rejected updates stay in the clients' memories."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from cases import for_each
from federation import AlteredTransport, Federation, ReversedTransport, sum_updates

from fedcomp.callbacks import Rejection
from fedcomp.layout import Layout
from fedcomp.messages import DENSE, UPDATE, failure
from fedcomp.strategies import Average, Phase, StrategyConfig
from fedcomp.strategies.base import AcceptedUpdate, cohort_size, draw_cohort

ALL = StrategyConfig(
    participation=1.0, uplink="stc:density=10%", downlink="stc:density=10%", seed=3
)
HALF = replace(ALL, participation=0.5)


def run(federation: Federation, rounds: int, first: int = 1) -> list:
    return list(federation.loop.rounds(range(first, first + rounds)))


def test_clients_of_a_round_have_the_weights_that_the_server_had_at_its_start():
    federation = Federation(HALF)
    for round in range(1, 9):
        before = federation.loop.broadcasts.weights.clone()
        (outcome,) = run(federation, 1, round)
        for client in outcome.cohort:
            assert torch.equal(federation.members[client].replica.weights, before)


def test_the_bytes_of_a_round_are_the_lengths_of_its_frames():
    federation = Federation(HALF)
    seen: dict[int, tuple[int, int]] = {}
    handle = federation.handle

    def listening(assignments):
        down = [sum(map(len, a.frames)) for a in assignments]
        reports = handle(assignments)
        for r, sent in zip(reports, down, strict=True):
            seen[r.client] = sent, len(r.frame)
        return reports

    federation.handle = listening
    for outcome in federation.loop.rounds(range(1, 7)):
        assert {c: down for c, (down, _) in seen.items()} == outcome.traffic.downlink
        assert {c: up for c, (_, up) in seen.items()} == outcome.traffic.uplink
        seen.clear()


def test_first_downloads_and_catch_up_bytes_are_parts_of_the_downlink_bytes():
    federation = Federation(HALF)
    outcomes = run(federation, 10)
    first, *later = [o.traffic for o in outcomes]
    # Server and clients construct the same initial weights.
    assert first.first_download_bytes == first.catch_up_bytes == 0
    assert any(t.first_download_bytes for t in later) and any(t.catch_up_bytes for t in later)
    for before, o, t in zip(outcomes, outcomes[1:], later, strict=False):
        newest = len(before.broadcast.frame)
        regular = sum(t.downlink.values()) - t.first_download_bytes - t.catch_up_bytes
        assert 0 <= regular <= newest * len(o.cohort)


def test_without_compression_the_model_moves_by_the_mean_of_the_updates():
    federation = Federation(replace(ALL, uplink="identity", downlink="identity"))
    start = federation.initial
    (outcome,) = run(federation, 1)
    updates = [a.update.dense() for a in outcome.accepted]
    torch.testing.assert_close(
        federation.loop.broadcasts.weights, start + torch.stack(updates).mean(0)
    )


def test_weights_by_examples_are_capped():
    layout = Layout.flat(8)
    strategy = Average(replace(ALL, weights="examples", weight_cap=1.5), layout)
    answers = [
        AcceptedUpdate(i, None, examples, 0.0, "") for i, examples in enumerate([10, 10, 100])
    ]
    assert strategy.client_weights(answers) == [10.0, 10.0, 60.0]
    assert Average(ALL, layout).client_weights(answers) == [1.0, 1.0, 1.0]


def test_the_order_of_answers_does_not_change_the_model():
    together, one_by_one = Federation(ALL, at_once=6), Federation(ALL, at_once=1)
    one_by_one.use(ReversedTransport(one_by_one))
    run(together, 4), run(one_by_one, 4)
    assert torch.equal(together.loop.broadcasts.weights, one_by_one.loop.broadcasts.weights)


class Accounts:
    """A check that for each client, the accepted updates and the residual add up to the inputs of the memory."""

    def __init__(self, federation: Federation):
        self.federation = federation
        self.inputs = [torch.zeros(federation.layout.numel) for _ in federation.members]
        self.accepted = [torch.zeros(federation.layout.numel) for _ in federation.members]
        for client, member in enumerate(federation.members):
            sum_updates(member, self.inputs[client])

    def take(self, outcome) -> None:
        for answer in outcome.accepted:
            answer.update.add_to(self.accepted[answer.client])

    def settle_and_check(self) -> None:
        for client, member in enumerate(self.federation.members):
            if member.memory.pending is not None:
                taken = member.ticket == self.federation.loop.tickets.get(client, "")
                member.memory.commit() if taken else member.memory.rollback()
            total = self.accepted[client] + member.memory.state_dict()["residual"]
            torch.testing.assert_close(total, self.inputs[client], rtol=1e-4, atol=1e-5)


def lose(a, r):
    return replace(r, kind="failed", frame=b"", stage="link", reason="lost")


def spoil(a, r):
    return replace(r, frame=r.frame[:-1])


def another_round(a, r):
    return replace(r, round=r.round - 1)


def another_version(a, r):
    return replace(r, version="0" * 32)


def unknown_kind(a, r):
    return replace(r, kind="partial-update")


@for_each("fault", [lose, spoil, another_round, another_version, unknown_kind])
def test_the_update_of_a_rejected_report_stays_in_the_memory(fault):
    federation = Federation(HALF)
    accounts = Accounts(federation)
    for client in range(6):
        federation.faults[client, 3] = federation.faults[(client + 1) % 6, 5 + client % 2] = fault
    rejected = 0
    for outcome in federation.loop.rounds(range(1, 12)):
        accounts.take(outcome)
        rejected += len(outcome.rejections)
    assert rejected >= 3
    accounts.settle_and_check()


def test_a_client_that_missed_rounds_learns_later_which_proposal_was_accepted():
    federation = Federation(replace(ALL, participation=0.5), clients=4)
    accounts = Accounts(federation)
    for outcome in federation.loop.rounds(range(1, 20)):
        accounts.take(outcome)
    accounts.settle_and_check()


def test_a_rejection_names_client_stage_and_reason_and_the_run_continues():
    federation = Federation(ALL)
    federation.faults[2, 1] = spoil
    first, second = run(federation, 2)
    (rejection,) = first.rejections
    assert (rejection.client, rejection.stage) == (2, "reply") and "checksum" in rejection.reason
    assert len(first.accepted) == 5 and len(second.accepted) == 6


def test_the_reason_of_a_failed_client_is_limited_in_length():
    federation = Federation(ALL)
    handle = federation.handle
    federation.handle = lambda assignments: [
        failure(a, stage="z" * 10**6, reason="y" * 10**6) if r.client == 1 else r
        for a, r in zip(assignments, handle(assignments), strict=True)
    ]
    (outcome,) = run(federation, 1)
    assert outcome.rejections == [Rejection(1, "reply", "y" * 1000)]


def test_a_round_without_accepted_updates_keeps_the_model():
    federation = Federation(ALL)
    for client in range(6):
        federation.faults[client, 1] = lose
    first, second = run(federation, 2)
    assert first.broadcast is None and first.train_loss is None
    assert second.broadcast is not None


def test_updates_whose_sum_is_not_finite_are_rejected_together():
    federation = Federation(replace(ALL, uplink="identity"))
    huge = torch.full((federation.layout.numel,), 3e38)
    for client in (0, 1):
        federation.faults[client, 1] = lambda a, r: replace(
            r, frame=federation.strategy.uplink.encode(huge)
        )
    first, second = run(federation, 2)
    assert first.broadcast is None and {r.stage for r in first.rejections} == {"aggregate"}
    assert second.broadcast is not None
    assert bool(federation.loop.broadcasts.weights.isfinite().all())


def test_a_client_that_lost_its_disk_gets_the_dense_model_in_the_same_round():
    federation = Federation(ALL)
    run(federation, 3)
    lost = federation.members[4]
    lost.replica.restore(torch.zeros(federation.layout.numel), "")
    forms = []
    handle = federation.handle

    def listening(assignments):
        forms.extend(a.form for a in assignments if a.client == 4)
        return handle(assignments)

    federation.handle = listening
    (outcome,) = run(federation, 1, 4)
    assert forms[-1] == DENSE and len(forms) == 2
    assert len(outcome.accepted) == 6 and not outcome.rejections
    assert outcome.traffic.downlink[4] > 4 * federation.layout.numel


def test_a_report_that_is_delivered_twice_counts_once():
    federation = Federation(ALL)
    federation.use(AlteredTransport(federation, lambda ds: [d for d in ds for _ in range(2)]))
    (outcome,) = run(federation, 1)
    assert len(outcome.accepted) == 6
    assert outcome.traffic.uplink == {
        a.client: outcome.traffic.uplink[a.client] for a in outcome.accepted
    }


def test_cohorts_depend_only_on_seed_and_round():
    assert draw_cohort(range(100), 10, 1, 5) == draw_cohort(list(range(99, -1, -1)), 10, 1, 5)
    assert draw_cohort(range(100), 10, 1, 5) != draw_cohort(range(100), 10, 1, 6)
    assert [cohort_size(0.1, n) for n in (1, 2, 5, 10, 25, 200)] == [1, 2, 2, 2, 3, 20]


class SecondLook(Average):
    """A strategy whose second phase asks the accepted clients again, and announces their number."""

    def phases(self, round):
        return Phase("train"), Phase("look again")

    def announce(self, phase, client, before):
        return {"accepted": str(len(before["train"])).encode()} if before else {}

    def aggregate(self, updates, into):
        assert list(updates.phases) == ["train", "look again"]
        return super().aggregate(updates, into)


def test_a_round_may_have_several_phases():
    federation = Federation(ALL, strategy=SecondLook)
    announced = []
    handle = federation.handle

    def in_phases(assignments: Sequence):
        announced.extend((a.phase, a.announced) for a in assignments)
        return [
            handle([a])[0] if a.phase == "train" else replace(handle_again(a), phase=a.phase)
            for a in assignments
        ]

    def handle_again(a):
        frame = federation.strategy.uplink.encode(torch.ones(federation.layout.numel))
        member = federation.members[a.client]
        return replace(last[a.client], kind=UPDATE, frame=frame, version=member.replica.version)

    last = {}
    federation.faults = {(c, 1): lambda a, r: last.setdefault(a.client, r) for c in range(6)}
    federation.faults[5, 1] = lose
    federation.handle = in_phases
    (outcome,) = run(federation, 1)
    assert announced.count(("train", [])) == 6
    assert announced.count(("look again", [b"accepted", b"5"])) == 5
    assert outcome.traffic.downlink == {
        client: len(b"accepted5") if client < 5 else 0 for client in range(6)
    }
    assert [a.client for a in outcome.accepted] == [0, 1, 2, 3, 4]
    assert [r.client for r in outcome.rejections] == [5]


@for_each("examples", [0, -1, 10**400])
def test_an_impossible_number_of_examples_is_rejected(examples):
    federation = Federation(replace(ALL, weights="examples"))
    handle = federation.handle
    federation.handle = lambda assignments: [
        replace(r, examples=examples) if r.client == 1 else r for r in handle(assignments)
    ]
    (outcome,) = run(federation, 1)
    (rejection,) = outcome.rejections
    assert rejection.client == 1 and rejection.reason.startswith("the report has")
    assert len(outcome.accepted) == 5
