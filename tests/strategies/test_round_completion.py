"""A phase ends when all clients have answered, a quorum was accepted, or the deadline has passed. Late updates are sent again later."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import for_each
from federation import AlteredTransport, Federation, sum_updates
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import RunConfig
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout
from fedcomp.server.results import make_strategy
from fedcomp.server.transport import Clock, Delivery
from fedcomp.sim import simulate
from fedcomp.strategies import Average, StrategyConfig, resolved
from fedcomp.strategies.base import DEADLINE, Progress, RoundCompletion, quorum_size
from fedcomp.strategies.powersgd import PowerSGD
from fedcomp.strategies.sketched_sgd import SketchedSGD
from fedcomp.transports.inprocess import InProcessTransport

ALL = StrategyConfig(
    participation=1.0, uplink="stc:density=10%", downlink="stc:density=10%", seed=3
)
counts = st.integers(0, 50)


@given(
    asked=counts, answered=counts, accepted=counts, quorum=st.floats(0.01, 1), over=st.booleans()
)
def test_a_phase_closes_as_soon_as_its_condition_holds(asked, answered, accepted, quorum, over):
    answered = min(answered, asked)
    accepted = min(accepted, answered)
    closed = RoundCompletion(quorum, 10.0).check(
        Progress(asked, answered, accepted, 11.0 if over else 9.0)
    )
    assert (closed is not None) == (
        answered == asked or accepted >= quorum_size(quorum, asked) or over
    )
    late = over and answered < asked and accepted < quorum_size(quorum, asked)
    assert (closed is not None and closed.stage == DEADLINE) == late
    assert (RoundCompletion().check(Progress(asked, answered, accepted, 1e9)) is not None) == (
        answered == asked
    )
    if closed is None:
        left = RoundCompletion(quorum, 10.0).answers_until_check(
            Progress(asked, answered, accepted, 0.0)
        )
        after = [Progress(asked, answered + n, accepted + n, 0.0) for n in (left - 1, left)]
        ends = [RoundCompletion(quorum, 10.0).check(progress) is not None for progress in after]
        assert ends == [False, True], "the next check is exactly when the phase may close"


@for_each(
    "quorum, clients, enough",
    [
        (1.0, 10, 10),
        (0.7, 10, 7),
        (0.1, 30, 3),
        (2 / 3, 3, 2),
        (0.5, 5, 3),
        (0.01, 10, 1),
        (1.0, 0, 1),
    ],
)
def test_a_quorum_is_a_whole_number_of_clients(quorum, clients, enough):
    assert quorum_size(quorum, clients) == enough


def test_without_a_deadline_no_client_is_late():
    assert RoundCompletion().check(Progress(3, 2, 2, 1e12)) is None


@for_each(
    "strategy, rules",
    [
        (Average, ALL),
        (Average, replace(ALL, memory="ef21")),
        (
            partial(PowerSGD, options=PowerSGD.Options(rank=1)),
            replace(ALL, uplink="powersgd:rank=1", memory="lowrank"),
        ),
        (SketchedSGD, replace(ALL, uplink="sketch:rows=3,columns=12", memory="sketched")),
    ],
    ids=["average", "ef21", "powersgd", "sketched-sgd"],
)
def test_a_quorum_closes_a_round_and_rejects_the_other_clients(strategy, rules):
    federation = Federation(replace(rules, quorum=0.5), at_once=1, strategy=strategy)
    before = federation.loop.broadcasts.version
    for outcome in federation.loop.rounds(range(1, 6)):
        assert {a.client for a in outcome.accepted}.isdisjoint(r.client for r in outcome.rejections)
        assert len(outcome.accepted) + len(outcome.rejections) == len(outcome.cohort) == 6
        # Half of the 6 clients; with two phases, half of these 3, rounded up.
        assert len(outcome.accepted) == (2 if len(list(federation.strategy.phases(1))) > 1 else 3)
        assert all(r.stage == "quorum" and "(--quorum 0.5)" in r.reason for r in outcome.rejections)
        assert outcome.broadcast is not None and federation.loop.broadcasts.version != before


class StoppedClock(Clock):
    """A clock that only the test moves."""

    now_s = 0.0

    def now(self) -> float:
        return self.now_s


class PatientTransport(AlteredTransport):
    """A transport that advances the clock only while no answer arrives."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.clock = StoppedClock()

    def receive(self, timeout_s: float) -> list[Delivery]:
        arrived = super().receive(timeout_s)
        if not arrived:
            self.clock.now_s += timeout_s
        return arrived


def late(deliveries):
    """Drop the answers of client 0 in odd rounds, which arrive after they were cancelled."""
    return [d for d in deliveries if d.client != 0 or d.answer.round % 2 == 0]


@for_each("quorum", [5 / 6, 1.0])
def test_a_late_update_returns_to_its_senders_residual(quorum):
    federation = Federation(
        replace(ALL, quorum=quorum, timeout_s=1.0 if quorum == 1 else None), at_once=6
    )
    federation.use(PatientTransport(federation, late))
    inputs, accepted = torch.zeros(2, federation.layout.numel)
    own = federation.members[0]
    sum_updates(own, inputs)
    outcomes = list(federation.loop.rounds(range(1, 7)))
    assert [[r.client for r in o.rejections] for o in outcomes] == [[0], [], [0], [], [0], []]
    for outcome in outcomes:
        for answer in outcome.accepted:
            if answer.client == 0:
                answer.update.add_to(accepted)
    own.memory.commit() if own.ticket == federation.loop.tickets.get(0) else own.memory.rollback()
    torch.testing.assert_close(
        accepted + own.memory.state_dict()["residual"], inputs, rtol=1e-4, atol=1e-5
    )


def test_a_deadline_without_answers_leaves_the_model_and_gives_the_reason():
    federation = Federation(replace(ALL, timeout_s=0.01))
    federation.use(PatientTransport(federation, lambda deliveries: []))
    first = next(federation.loop.rounds([1]))
    assert first.broadcast is None and not first.accepted and first.train_loss is None
    assert [(r.client, r.stage, r.reason) for r in first.rejections] == [
        (client, DEADLINE, "no reply within 0.01 s (--deadline)") for client in range(6)
    ]
    federation.use(InProcessTransport(federation))
    federation.loop.config = ALL
    second = next(federation.loop.rounds([2]))
    assert len(second.accepted) == 6 and second.broadcast.base == federation.loop.broadcasts.first


@pytest.mark.parametrize("options", [{"deadline": 5.0}, {"quorum": 0.5}])
def test_a_simulation_without_a_network_refuses_deadline_and_quorum(tmp_path, options):
    with pytest.raises(
        ConfigError,
        match="--deadline and --quorum have no effect without --network.* or use fedcomp server start",
    ):
        simulate(RunConfig(out=str(tmp_path / "run"), **options))
    assert not (tmp_path / "run").exists()


def test_an_asynchronous_strategy_refuses_a_quorum():
    config, layout = resolved(RunConfig(strategy="asynchronous", quorum=0.5)), Layout.flat(8)
    with pytest.raises(
        ConfigError, match="leave --quorum out, or give --strategy asynchronous:wait=0.5"
    ):
        make_strategy(config, layout)
    late = resolved(RunConfig(deadline=7.0, quorum=0.5))
    assert make_strategy(late, layout).config.timeout_s == 7.0
    assert make_strategy(resolved(RunConfig()), layout).config.timeout_s is None
