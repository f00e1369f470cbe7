"""When a phase closes: all have answered, a quorum was accepted, or the time is over; and what is left out of it comes later."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import for_each
from federation import Federation, sum_updates
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import RunConfig
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout
from fedcomp.server.clock import Clock
from fedcomp.server.results import strategy_of
from fedcomp.sim import simulate
from fedcomp.strategies import Average, StrategyConfig, resolved
from fedcomp.strategies.powersgd import PowerSGD
from fedcomp.strategies.round_completion import (
    DEADLINE,
    AllAnswered,
    Progress,
    QuorumOrDeadline,
    least,
)
from fedcomp.strategies.sketched_sgd import SketchedSGD

ALL = StrategyConfig(
    participation=1.0, uplink="stc:density=10%", downlink="stc:density=10%", seed=3
)
counts = st.integers(0, 50)


@given(
    asked=counts, answered=counts, accepted=counts, quorum=st.floats(0.01, 1), over=st.booleans()
)
def test_a_phase_closes_exactly_when_it_may(asked, answered, accepted, quorum, over):
    answered = min(answered, asked)
    accepted = min(accepted, answered)
    closed = QuorumOrDeadline(quorum, 10.0).check(
        Progress(asked, answered, accepted, 11.0 if over else 9.0)
    )
    assert (closed is not None) == (answered == asked or accepted >= least(quorum, asked) or over)
    late = over and answered < asked and accepted < least(quorum, asked)
    assert (closed is not None and closed.stage == DEADLINE) == late
    assert (AllAnswered().check(Progress(asked, answered, accepted, 1e9)) is not None) == (
        answered == asked
    )


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
    assert least(quorum, clients) == enough


def test_without_a_deadline_nobody_is_too_late():
    assert QuorumOrDeadline().check(Progress(3, 2, 2, 1e12)) is None


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
def test_a_quorum_closes_a_round_and_the_others_are_named(strategy, rules):
    federation = Federation(replace(rules, quorum=0.5), at_once=1, strategy=strategy)
    before = federation.loop.broadcasts.version
    for outcome in federation.loop.rounds(federation.grid, range(1, 6)):
        assert {a.client for a in outcome.accepted}.isdisjoint(r.client for r in outcome.rejections)
        assert len(outcome.accepted) + len(outcome.rejections) == len(outcome.cohort) == 6
        assert len(outcome.accepted) == (
            2 if len(list(federation.strategy.phases(1))) > 1 else 3
        )  # of 6, and of the 3 asked again
        assert all(r.stage == "quorum" and "(--quorum 0.5)" in r.reason for r in outcome.rejections)
        assert outcome.broadcast is not None and federation.loop.broadcasts.version != before


def late(federation):
    """Replies of client 0 in odd rounds come in the round after, when nobody waits for them any more."""
    pull, kept = federation.grid.pull_messages, []

    def pulled(ids):
        ready = [reply for reply in kept if reply.metadata.reply_to_message_id not in ids]
        kept[:] = [reply for reply in kept if reply not in ready]
        for reply in pull(ids):
            odd = int(reply.metadata.group_id) % 2
            (
                kept
                if odd and federation.grid.get_node_ids()[0] == reply.metadata.src_node_id
                else ready
            ).append(reply)
        return ready

    federation.grid.pull_messages = pulled


class Resting(Clock):
    """Time passes while there is nothing to do, and only then."""

    now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def rest(self, seconds: float) -> None:
        self.now_s += seconds


@for_each("quorum", [5 / 6, 1.0])
def test_what_came_late_goes_back_into_its_senders_residual(quorum):
    federation = Federation(
        replace(ALL, quorum=quorum, timeout_s=1.0 if quorum == 1 else None), at_once=6
    )
    federation.loop.clock = Resting()
    late(federation)
    inputs, accepted = torch.zeros(2, federation.layout.numel)
    own = federation.members[0]
    sum_updates(own, inputs)
    outcomes = list(federation.loop.rounds(federation.grid, range(1, 7)))
    assert [[r.client for r in o.rejections] for o in outcomes] == [[0], [], [0], [], [0], []]
    for outcome in outcomes:
        for answer in outcome.accepted:
            if answer.client == 0:
                answer.update.add_to(accepted)
    own.memory.commit() if own.ticket == federation.loop.tickets.get(0) else own.memory.rollback()
    torch.testing.assert_close(
        accepted + own.memory.state_dict()["residual"], inputs, rtol=1e-4, atol=1e-5
    )


def test_a_deadline_that_passes_with_nobody_leaves_the_model_and_says_why():
    federation = Federation(replace(ALL, timeout_s=0.01))
    federation.loop.clock = Resting()
    federation.grid.pull_messages, pull = lambda ids: [], federation.grid.pull_messages
    first = next(federation.loop.rounds(federation.grid, [1]))
    assert first.broadcast is None and not first.accepted and first.train_loss is None
    assert [(r.client, r.stage, r.reason) for r in first.rejections] == [
        (client, DEADLINE, "no reply within 0.01 s (--deadline)") for client in range(6)
    ]
    federation.grid.pull_messages, federation.loop.config = pull, ALL
    second = next(federation.loop.rounds(federation.grid, [2]))
    assert len(second.accepted) == 6 and second.broadcast.base == federation.loop.broadcasts.first


@pytest.mark.parametrize("options", [{"deadline": 5.0}, {"quorum": 0.5}])
def test_a_simulation_has_no_clock_and_says_so(tmp_path, options):
    with pytest.raises(
        ConfigError,
        match="--deadline and --quorum are for real clients.* or use fedcomp server start",
    ):
        simulate(RunConfig(out=str(tmp_path / "run"), **options))
    assert not (tmp_path / "run").exists()


def test_a_strategy_that_waits_for_nobody_has_no_quorum():
    config, layout = resolved(RunConfig(strategy="asynchronous", quorum=0.5)), Layout.flat(8)
    with pytest.raises(
        ConfigError, match="leave --quorum out, or give --strategy asynchronous:wait=0.5"
    ):
        strategy_of(config, layout)
    late = resolved(RunConfig(deadline=7.0, quorum=0.5))
    assert strategy_of(late, layout).config.timeout_s == 7.0
    assert strategy_of(resolved(RunConfig()), layout).config.timeout_s is None
