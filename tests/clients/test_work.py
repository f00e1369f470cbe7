"""Which phases of a round clients take part in, and what they hold in between."""

from dataclasses import replace

import pytest
import torch
from every_codec import same_bits
from federation import Federation

from fedcomp import codec, memory
from fedcomp.clients.replica import Replica
from fedcomp.clients.work import Held, Work
from fedcomp.codecs import Context
from fedcomp.errors import ConfigError, ProtocolError
from fedcomp.messages import FAILED, UP_TO_DATE, UPDATE, Assignment
from fedcomp.sim.clients import VirtualClients
from fedcomp.strategies import Rules, SharedScale
from fedcomp.training.engine import OneByOne

ASSIGNMENT = Assignment(4, "train", 2, UP_TO_DATE, "v", "v", "f", [], "")
TWO = Work(("first", "second", "third"))


def in_phase(phase: str, round: int = 4) -> Assignment:
    return replace(ASSIGNMENT, phase=phase, round=round)


def test_the_first_phase_opens_a_round_and_the_others_need_it():
    assert Work().opens(ASSIGNMENT, None) and TWO.opens(in_phase("first"), None)
    held = Held(4, 0.5)
    assert [TWO.opens(in_phase(phase), held) for phase in TWO.phases] == [True, False, False]
    for phase, state in [
        ("second", None),
        ("third", None),
        ("second", Held(3, 0.5)),
        ("third", Held(5, 0.5)),
    ]:
        with pytest.raises(
            ProtocolError,
            match="this client holds nothing of phase 'first' of round 4; ask it again in the next round",
        ):
            TWO.opens(in_phase(phase), state)


@pytest.mark.parametrize("phase", ["tally", "", "Train"])
def test_a_phase_that_the_strategy_does_not_have_is_refused(phase):
    for work in (Work(), TWO):
        with pytest.raises(
            ProtocolError,
            match=f"this client has no part in a phase '{phase}'; both sides need the same strategy",
        ):
            work.opens(in_phase(phase), Held(4, 0.5))


def test_a_refused_phase_changes_nothing():
    federation = Federation(Rules(participation=1.0, uplink="stc:density=10%"))
    list(federation.strategy.rounds(federation.grid, [1]))
    member, b = federation.members[0], federation.strategy.broadcasts
    before, pending = member.memory.state_dict()["residual"].clone(), member.memory.pending
    a = Assignment(
        2,
        "tally",
        0,
        UP_TO_DATE,
        b.version,
        b.version,
        b.fingerprint,
        [],
        federation.strategy.tickets[0],
    )
    report = member.handle(a)
    assert (report.kind, report.stage) == (
        FAILED,
        "phase",
    ) and member.memory.pending == pending is not None
    assert same_bits(member.memory.state_dict()["residual"], before)


def test_each_client_and_round_has_a_seed_of_its_own():
    c, work = codec("stc"), Work()
    seeds = {
        work.seed(c, run, replace(ASSIGNMENT, client=client, round=round))
        for run in (0, 1)
        for client in (0, 1)
        for round in (1, 2)
    }
    assert len(seeds) == 8


def test_a_cohort_answers_as_each_of_it_does():
    class Halved(Work):
        def answer(self, memory, x, held, seed, context):
            if seed == 6:
                raise ConfigError("this one cannot")
            return memory.propose(x[0] / 2, seed=seed, context=context)

    x = torch.randn(3, 1, 40, generator=torch.Generator().manual_seed(1))
    for work in (Work(), Halved()):
        stacked, each = (
            [memory("residual", codec("stc:density=10%"), 40) for _ in range(3)] for _ in range(2)
        )
        frames = work.answer_stack(stacked, x.clone(), [{}, {}, {}], [5, 6, 7], Context())
        for i, m in enumerate(each):
            if isinstance(work, Halved) and i == 1:
                assert isinstance(frames[i], ConfigError)
            else:
                assert frames[i] == work.answer(m, x[i], {}, 5 + i, Context())


def test_a_memory_of_one_phase_refuses_a_second():
    m = memory("none", codec("stc"), 40)
    TWO.answer(m, torch.ones(1, 40), {}, 1, Context(phase="first"))
    (refused,) = TWO.answer_stack([m], None, [{}], [1], Context(phase="second"))
    assert isinstance(
        refused, ConfigError
    ) and "memory 'none' has no frame for a phase 'second'" in str(refused)


def test_virtual_clients_answer_as_real_ones_whatever_each_is_told():
    """One is told another scale, one is told a phase that is not there and so misses the first, one is not asked again."""
    rules = Rules(participation=1.0, uplink="terngrad", memory="none", seed=3)
    federation = Federation(rules, strategy=SharedScale)
    members, b = federation.members, federation.strategy.broadcasts
    virtual = VirtualClients(
        Replica(federation.initial.clone(), federation.layout, federation.strategy.downlink),
        OneByOne(members[0].engine),
        6,
        members[0].data,
        [m.shard for m in members],
        members[0].sgd,
        lambda: memory("none", codec("terngrad"), 42, federation.layout),
        3,
        SharedScale.work,
    )

    def told(client: int, phase: str, scale: float = 0.0) -> Assignment:
        announced = [b"scale", torch.tensor([scale]).numpy().tobytes()] if scale else []
        return Assignment(
            1, phase, client, UP_TO_DATE, b.version, b.version, b.fingerprint, [], "", announced
        )

    first = [told(client, "scale") for client in range(5)] + [told(5, "tally")]
    then = [
        told(0, "train", 0.5),
        told(1, "train", 0.9),
        told(2, "train", 0.5),
        told(3, "train", 0.5),
        told(5, "train", 0.5),
    ]
    for asked in (first, then):
        reports = virtual.handle(asked)
        assert reports == [members[a.client].handle(a) for a in asked]
        assert [r.kind for r in reports] == [UPDATE] * (len(asked) - 1) + [FAILED]
    assert not any(held.kept for client, held in virtual.held.items() if client != 4)
    virtual.handle([replace(told(0, "scale"), round=2)])
    assert list(virtual.held) == [0]
