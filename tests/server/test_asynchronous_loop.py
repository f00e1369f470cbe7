"""Asynchronous rounds: late updates have less weight, clients that are too late are rejected, and virtual time depends only on the seed."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import for_each
from every_codec import same_bits
from federation import Federation, ReversedTransport, SlowTransport
from test_round_loop import Accounts, run

from fedcomp.messages import DENSE
from fedcomp.sim.timing import random_work_s
from fedcomp.strategies import Asynchronous, StrategyConfig
from fedcomp.strategies.base import AcceptedUpdate

HALF = StrategyConfig(
    participation=0.5, uplink="stc:density=10%", downlink="stc:density=10%", seed=3
)
CLIENTS = 10


def asynchronous(**options) -> partial:
    return partial(Asynchronous, options=Asynchronous.Options(**options))


def virtual(
    rules: StrategyConfig = HALF, kind: type = Federation, at_once: int = 4, **options
) -> Federation:
    """Return a federation with an asynchronous strategy in virtual time."""
    federation = kind(rules, clients=CLIENTS, strategy=asynchronous(**options), at_once=at_once)
    federation.loop.work_s = random_work_s(rules.seed)
    return federation


def test_waiting_for_all_clients_is_equivalent_to_the_strategy_average():
    average = Federation(HALF, clients=CLIENTS)
    waits = virtual(wait=1.0)
    for mine, other in zip(run(average, 6), run(waits, 6), strict=True):
        assert mine.cohort == other.cohort and mine.traffic == other.traffic
    assert same_bits(average.loop.broadcasts.weights, waits.loop.broadcasts.weights)


@for_each("wait", [0.0, 0.4])
def test_a_round_ends_with_the_first_answers(wait):
    federation = virtual(wait=wait)
    seconds, ready, now = random_work_s(HALF.seed), {}, 0.0
    for outcome in federation.loop.rounds(range(1, 15)):
        ready |= {
            c: now + seconds(outcome.round, c)
            for c in range(CLIENTS)
            if federation.loop.started_in.get(c) == outcome.round
        }
        ready |= {c: now + seconds(outcome.round, c) for c in outcome.cohort if c not in ready}
        first = sorted(ready, key=ready.get)[: 2 if wait else 1]
        assert outcome.cohort == sorted(first) and len(ready) == 5
        now = max(ready.pop(client) for client in first)
        assert federation.loop.now == now


def test_a_client_that_is_training_gets_no_new_assignment():
    federation = virtual(wait=0.0)
    handle, asked = federation.handle, []

    def listening(assignments):
        asked.extend(a.client for a in assignments)
        return handle(assignments)

    federation.handle = listening
    at_work: set[int] = set()
    for outcome in federation.loop.rounds(range(1, 20)):
        assert len(asked) == len(set(asked)) and not at_work & set(asked)
        at_work = (at_work | set(asked)) - set(outcome.cohort)
        assert at_work == federation.loop.started_in.keys() and len(at_work) == 4
        asked.clear()


def test_a_late_update_has_less_weight_and_other_updates_do_not_have_more():
    rules = replace(
        HALF, uplink="identity", downlink="identity", memory="none", downlink_memory="none"
    )
    federation = virtual(rules, wait=0.4, decay=1.0)
    late = set()
    for round in range(1, 9):
        before = federation.loop.broadcasts.weights.clone()
        began = dict(federation.loop.started_in)
        (outcome,) = run(federation, 1, round)
        staleness = {client: round - began.get(client, round) for client in outcome.cohort}
        updates = [a.update.dense() / (1 + staleness[a.client]) for a in outcome.accepted]
        step = sum(updates) / len(updates)
        torch.testing.assert_close(federation.loop.broadcasts.weights - before, step)
        late |= set(staleness.values())
    assert len(late) > 1


def test_without_decay_all_updates_have_the_same_weight():
    federation = virtual(decay=0.0)
    run(federation, 6)
    assert federation.strategy.discount(AcceptedUpdate(0, None, 1, 0.0, "", staleness=3)) == 1.0


def test_a_client_that_is_too_late_is_rejected_and_keeps_its_update():
    federation = virtual(wait=0.0, staleness=3)
    accounts = Accounts(federation)
    given_up = 0
    for round in range(1, 25):
        began = dict(federation.loop.started_in)
        (outcome,) = run(federation, 1, round)
        accounts.take(outcome)
        assert all(round - began.get(a.client, round) <= 3 for a in outcome.accepted)
        for refused in outcome.rejections:
            assert (
                refused.reason == "no answer in the 4 rounds since the client started training"
                and refused.client in outcome.cohort
            )
            assert refused.client not in federation.loop.started_in
        given_up += len(outcome.rejections)
        assert len(federation.loop.started_in) < 5
    assert given_up > 3
    accounts.settle_and_check()


@for_each("staleness", [16, 1])
def test_the_bytes_of_a_round_are_the_bytes_of_its_frames(staleness):
    federation = virtual(wait=0.4, staleness=staleness)
    handle, down, up, given_up = federation.handle, {}, {}, 0

    def listening(assignments):
        down.update({a.client: sum(map(len, a.frames)) for a in assignments})
        reports = handle(assignments)
        up.update({r.client: len(r.frame) for r in reports})
        return reports

    federation.handle = listening
    for outcome in federation.loop.rounds(range(1, 12)):
        assert outcome.traffic.downlink == down and outcome.traffic.uplink == {
            client: up[client] for client in outcome.cohort
        }
        down.clear()
        given_up += len(outcome.rejections)
    assert bool(given_up) == (staleness == 1)


def test_results_do_not_depend_on_the_order_in_which_clients_are_simulated():
    together, one_by_one = virtual(at_once=CLIENTS), virtual(at_once=1)
    one_by_one.use(ReversedTransport(one_by_one))
    run(together, 10), run(one_by_one, 10)
    assert same_bits(together.loop.broadcasts.weights, one_by_one.loop.broadcasts.weights)


def test_some_clients_are_slow_in_all_rounds_and_every_client_varies():
    seconds = random_work_s(1)
    times = torch.tensor(
        [[seconds(round, client) for round in range(200)] for client in range(20)],
        dtype=torch.float64,
    )
    lasting = times.mean(1)
    assert 0.5 <= float(times.min()) and float(times.max()) <= 6.0
    assert float(lasting.max()) > 2 * float(lasting.min()) and bool(
        (times.std(1) > 0.2 * lasting).all()
    )
    assert seconds(7, 3) == random_work_s(1)(7, 3) != random_work_s(2)(7, 3)


# Clients that answer in real time.


@pytest.mark.parametrize("slow", [30, None])
def test_a_slow_client_delays_no_round_and_is_finally_rejected(slow):
    federation = Federation(
        replace(HALF, participation=1.0), clients=4, strategy=asynchronous(wait=0.5, staleness=5)
    )
    accounts = Accounts(federation)
    transport = SlowTransport(federation, {1: slow})
    federation.use(transport)
    outcomes = []
    for outcome in federation.loop.rounds(range(1, 15)):
        accounts.take(outcome)
        outcomes.append(outcome)
    assert all(outcome.broadcast for outcome in outcomes) and all(
        a.client != 1 for o in outcomes for a in o.accepted
    )
    refused = [(o.round, r.client, r.reason) for o in outcomes for r in o.rejections]
    assert refused == [
        (7, 1, "no answer in the 6 rounds since the client started training"),
        (14, 1, "no answer in the 6 rounds since the client started training"),
    ]
    accounts.settle_and_check()
    if slow is None:
        # The client is back. Its assignment says that none of its proposals was accepted.
        transport.takes[1] = 0
        more = run(federation, 8, 15)
        assert any(a.client == 1 for outcome in more for a in outcome.accepted)


def test_answers_are_accepted_in_the_order_of_their_arrival():
    federation = Federation(
        replace(HALF, participation=1.0), clients=4, strategy=asynchronous(wait=0.25)
    )
    federation.use(SlowTransport(federation, {0: 9, 1: 6, 2: 3}))
    assert run(federation, 3)[0].cohort == [3]
    assert federation.loop.started_in.keys() >= {0, 1}
    assert all(bool(o.accepted) for o in run(federation, 12, 4))


def test_a_client_that_lost_its_state_gets_the_current_model():
    federation = Federation(
        replace(HALF, participation=1.0), clients=4, strategy=asynchronous(wait=0.25)
    )
    run(federation, 4)
    (lost,) = set(range(4)) - federation.loop.started_in.keys()
    federation.members[lost].replica.restore(torch.zeros(federation.layout.numel), "")
    federation.use(SlowTransport(federation, {lost: 2}))
    forms = []
    handle = federation.handle

    def listening(assignments):
        forms.extend((a.form, a.version) for a in assignments if a.client == lost)
        return handle(assignments)

    federation.handle = listening
    outcomes = run(federation, 8, 5)
    (_, asked), (form, sent) = forms[:2]
    assert form == DENSE and sent != asked
    assert any(a.client == lost for outcome in outcomes for a in outcome.accepted)
    assert sum(o.traffic.downlink.get(lost, 0) for o in outcomes) > 4 * federation.layout.numel


def test_a_phase_ends_at_the_time_limit_with_the_answers_so_far():
    federation = Federation(
        replace(HALF, participation=1.0, timeout_s=0.01), clients=4, strategy=asynchronous(wait=1.0)
    )
    federation.use(SlowTransport(federation, {0: None, 1: None}))
    (outcome,) = run(federation, 1)
    assert outcome.cohort == [2, 3] and federation.loop.started_in.keys() == {0, 1}
