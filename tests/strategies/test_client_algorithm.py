"""The phases of a round that a client answers, and its state between them."""

from dataclasses import replace

import pytest
import torch
from cases import for_each
from every_codec import same_bits
from federation import Federation, virtual_clients

from fedcomp import codec, memory
from fedcomp.codecs import Context
from fedcomp.errors import ConfigError, NonFiniteError, ProtocolError
from fedcomp.messages import FAILED, UP_TO_DATE, UPDATE, Assignment
from fedcomp.strategies import StrategyConfig
from fedcomp.strategies.base import ClientAlgorithm, RoundState
from fedcomp.strategies.shared_scale import SharedScale

ASSIGNMENT = Assignment(4, "train", 2, UP_TO_DATE, "v", "v", "f", [], "")
TWO = ClientAlgorithm(("first", "second", "third"))


def in_phase(phase: str, round: int = 4) -> Assignment:
    return replace(ASSIGNMENT, phase=phase, round=round)


def test_later_phases_need_the_state_of_the_first_phase():
    assert ClientAlgorithm().starts_round(ASSIGNMENT, None) and TWO.starts_round(
        in_phase("first"), None
    )
    held = RoundState(4, 0.5)
    assert [TWO.starts_round(in_phase(phase), held) for phase in TWO.phases] == [True, False, False]
    for phase, state in [
        ("second", None),
        ("third", None),
        ("second", RoundState(3, 0.5)),
        ("third", RoundState(5, 0.5)),
    ]:
        with pytest.raises(
            ProtocolError,
            match="this client did not complete phase 'first' of round 4, or has lost the results of this phase, "
            "so it cannot continue the round; it can take part in the next round",
        ):
            TWO.starts_round(in_phase(phase), state)


@for_each("phase", ["tally", "", "Train"])
def test_a_phase_unknown_to_the_strategy_is_refused(phase):
    for algorithm in (ClientAlgorithm(), TWO):
        with pytest.raises(
            ProtocolError,
            match=f"this client's strategy has no phase '{phase}', but only .*; server and client need the same strategy",
        ):
            algorithm.starts_round(in_phase(phase), RoundState(4, 0.5))


def test_a_refused_phase_does_not_change_the_memory():
    federation = Federation(StrategyConfig(participation=1.0, uplink="stc:density=10%"))
    list(federation.loop.rounds([1]))
    member, b = federation.members[0], federation.loop.broadcasts
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
        federation.loop.tickets[0],
    )
    report = member.answer(a)
    assert (report.kind, report.stage) == (
        FAILED,
        "phase",
    ) and member.memory.pending == pending is not None
    assert same_bits(member.memory.state_dict()["residual"], before)


def test_each_run_client_and_round_has_its_own_seed():
    c, algorithm = codec("stc"), ClientAlgorithm()
    seeds = {
        algorithm.seed(c, run, replace(ASSIGNMENT, client=client, round=round))
        for run in (0, 1)
        for client in (0, 1)
        for round in (1, 2)
    }
    assert len(seeds) == 8


def test_the_frames_of_a_cohort_equal_those_of_single_clients():
    algorithm, x = ClientAlgorithm(), torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    x[1, 7] = float("inf")
    stacked, alone = (
        [memory("residual", codec("stc:density=10%"), 40) for _ in range(3)] for _ in range(2)
    )
    frames = algorithm.encode(stacked, x.clone(), [{}, {}, {}], [5, 6, 7], Context())
    assert isinstance(frames[1], NonFiniteError)
    for i in (0, 2):
        one = algorithm.encode([alone[i]], x[i : i + 1].clone(), [{}], [5 + i], Context())
        assert one == [frames[i]] and frames[i] == stacked[i].pending


def test_a_memory_with_one_frame_refuses_a_second_phase():
    m = memory("none", codec("stc"), 40)
    TWO.encode([m], torch.ones(1, 40), [{}], [1], Context(phase="first"))
    (refused,) = TWO.encode([m], None, [{}], [1], Context(phase="second"))
    assert isinstance(
        refused, ConfigError
    ) and "memory 'none' cannot make a frame for the phase 'second'" in str(refused)


def test_virtual_clients_answer_like_real_ones_to_different_assignments():
    """One client gets another scale, one gets an unknown phase, and one gets no assignment in the second phase."""
    rules = StrategyConfig(participation=1.0, uplink="terngrad", memory="none", seed=3)
    federation = Federation(rules, strategy=SharedScale)
    members, b = federation.members, federation.loop.broadcasts
    virtual = virtual_clients(
        federation, lambda: memory("none", codec("terngrad"), 42, federation.layout), 6
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
        assert reports == [members[a.client].answer(a) for a in asked]
        assert [r.kind for r in reports] == [UPDATE] * (len(asked) - 1) + [FAILED]
    assert not any(state.values for client, state in virtual.rounds.items() if client != 4)
    virtual.handle([replace(told(0, "scale"), round=2)])
    assert list(virtual.rounds) == [0]
