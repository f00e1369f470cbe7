"""Ternary updates with a shared scale: their sum is exact in any order, and frames with another scale are rejected."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import for_each
from federation import Federation
from safetensors.torch import load_file
from small_runs import StopsAfter, assert_the_same_when_stopped

from fedcomp import Layout, NonFiniteError, RunConfig, UserError, codec, memory
from fedcomp.codecs import Context
from fedcomp.config import read_run
from fedcomp.errors import ProtocolError
from fedcomp.server.round_loop import RoundResult
from fedcomp.sim import simulate
from fedcomp.strategies import StrategyConfig
from fedcomp.strategies.base import RoundUpdates
from fedcomp.strategies.shared_scale import NUMBERS, SharedScale, SharedScaleClient, scales
from fedcomp.tasks.partition import partition

TINY = RunConfig(
    task=f"{Path(__file__).parents[1] / 'tiny_task.py'}:task",
    clients=8,
    participation=0.5,
    rounds=6,
    local_steps=2,
    lr=0.1,
    strategy="shared-scale",
    downlink="stc:density=20%",
    partition="classes:1",
)
LAYER = StrategyConfig(
    participation=1.0, uplink="terngrad@layer", downlink="identity", memory="none", seed=3
)
MODEL = replace(LAYER, uplink="terngrad")
both = for_each("rules", [LAYER, MODEL])


class Recorded(Federation):
    """A federation that records assignments and reports."""

    def __init__(self, rules: StrategyConfig = LAYER, **options):
        super().__init__(rules, strategy=SharedScale, **options)
        self.said: list[tuple] = []

    def handle(self, assignments):
        reports = super().handle(assignments)
        self.said += zip(assignments, reports, strict=True)
        return reports

    def run(self, rounds: int, first: int = 1) -> list:
        return list(self.loop.rounds(range(first, first + rounds)))


@both
def test_the_scale_of_a_round_is_the_largest_of_all_clients(rules):
    federation = Recorded(rules)
    federation.run(1)
    sections = 4 if rules is LAYER else 1
    claimed = [
        NUMBERS.decode(r.frame, numel=sections).numpy()
        for a, r in federation.said
        if a.phase == "scale"
    ]
    told = {(a.announced[0], a.announced[1]) for a, _ in federation.said if a.phase == "train"}
    assert len(claimed) == 6 and told == {
        (b"scale", np.max(claimed, axis=0).astype("<f4").tobytes())
    }
    assert all(a.announced == [] for a, _ in federation.said if a.phase == "scale")


def updates_of(outcome: RoundResult) -> RoundUpdates:
    return RoundUpdates(outcome.round, {"train": outcome.accepted}, torch.zeros(42))


@both
def test_the_sum_of_the_frames_of_a_round_is_exact(rules):
    federation = Recorded(rules)
    (outcome,) = federation.run(1)
    frames = [a.frame for a in outcome.accepted]
    total = federation.strategy.uplink.decode(
        federation.strategy.uplink.merge(frames), numel=42, layout=federation.layout
    ).double()
    moved = torch.zeros(42)
    federation.strategy.aggregate(updates_of(outcome), moved)
    torch.testing.assert_close(moved, (total / 6).float(), rtol=1e-6, atol=0)
    votes = torch.zeros(42, dtype=torch.float64)
    for span, scale in zip(
        federation.strategy.spans, federation.strategy.scales.tolist(), strict=True
    ):
        votes[span] = 6 * moved[span].double() / scale
        for answer in outcome.accepted:
            assert set(answer.update.dense()[span].abs().tolist()) <= {0.0, scale}
    assert torch.allclose(votes, votes.round(), atol=1e-5) and votes.abs().max() > 1
    torch.testing.assert_close(federation.loop.broadcasts.weights, federation.initial + moved)


def test_the_sum_is_the_same_in_any_order():
    federation = Recorded(LAYER)
    (outcome,) = federation.run(1)
    forwards, backwards = torch.zeros(42), torch.zeros(42)
    federation.strategy.aggregate(updates_of(outcome), forwards)
    turned = replace(outcome, accepted=outcome.accepted[::-1])
    federation.strategy.aggregate(updates_of(turned), backwards)
    assert torch.equal(forwards, backwards)


def test_ternary_values_are_weighted():
    federation = Recorded(replace(LAYER, weights="examples"), clients=2)
    federation.members[0].shard = federation.members[0].shard[:50]
    (outcome,) = federation.run(1)
    first, second = (a.update.dense() for a in outcome.accepted)
    moved = federation.loop.broadcasts.weights - federation.initial
    torch.testing.assert_close(moved, 0.2 * first + 0.8 * second, rtol=1e-5, atol=1e-7)


def test_every_byte_of_both_phases_is_counted():
    federation = Recorded(replace(LAYER, participation=0.5, downlink="stc:density=20%"))
    for round in range(1, 6):
        (outcome,) = federation.run(1, round)
        up, down = dict.fromkeys(outcome.cohort, 0), dict.fromkeys(outcome.cohort, 0)
        for a, r in federation.said:
            up[a.client] += len(r.frame)
            down[a.client] += sum(map(len, [*a.frames, *a.announced]))
        assert (up, down) == (outcome.traffic.uplink, outcome.traffic.downlink)
        assert all(down[client] >= 5 + 16 for client in down)
        federation.said.clear()


# Faults.


def test_a_frame_with_another_scale_is_rejected():
    federation = Recorded(LAYER)
    other = Context(announced={"scale": np.full(4, 0.5, "<f4").tobytes()})
    frame = federation.strategy.uplink.encode(
        0.3 * torch.ones(42), layout=federation.layout, context=other
    )
    federation.faults[2, 1] = lambda a, r: replace(r, frame=frame) if a.phase == "train" else r
    (outcome,) = federation.run(1)
    (rejection,) = outcome.rejections
    assert (
        rejection.client == 2
        and "the announced scale" in rejection.reason
        and len(outcome.accepted) == 5
    )


@for_each(
    "claim, sentence",
    [([1, 1, -1, 1], "negative scale -1"), ([1, 1, 1], "checksum")],
)
def test_an_invalid_scale_is_rejected(claim, sentence):
    federation = Recorded(LAYER)
    frame = NUMBERS.encode(torch.tensor(claim, dtype=torch.float32))
    federation.faults[2, 1] = lambda a, r: replace(r, frame=frame) if a.phase == "scale" else r
    (outcome,) = federation.run(1)
    assert [r.client for r in outcome.rejections] == [2] and sentence in outcome.rejections[
        0
    ].reason
    assert (federation.strategy.scales < 1).all() and len(outcome.accepted) == 5


def test_clients_without_a_frame_count_as_zero_updates():
    federation = Recorded(LAYER)
    for client in range(5):
        federation.faults[client, 1] = lambda a, r: replace(r, frame=b"", ticket="")
    (outcome,) = federation.run(1)
    torch.testing.assert_close(
        federation.loop.broadcasts.weights,
        federation.initial + outcome.accepted[5].update.dense() / 6,
    )


def test_updates_of_zeros_do_not_move_the_model():
    federation = Recorded(LAYER)
    for member in federation.members:
        member.sgd = replace(member.sgd, lr=1e-44)
    (outcome,) = federation.run(1)
    assert not federation.strategy.scales.any() and len(outcome.accepted) == 6
    assert torch.equal(federation.loop.broadcasts.weights, federation.initial)


def test_a_nonfinite_update_is_reported_in_the_first_phase():
    federation = Recorded(LAYER)
    federation.members[3].sgd = replace(federation.members[3].sgd, lr=1e38)
    (outcome,) = federation.run(1)
    (rejection,) = outcome.rejections
    assert (rejection.client, rejection.stage) == (3, "encode")
    assert "the update is" in rejection.reason and "in tensor '" in rejection.reason


# The client half.

LAYOUT = Layout.from_shapes({"w": (3, 4), "none": (0, 5), "b": (2,)})


def test_each_section_has_the_scale_of_the_codec():
    x = torch.arange(14, dtype=torch.float32) - 4
    assert scales(codec("terngrad:clip=0@layer"), x, LAYOUT) == [7.0, 0.0, 9.0]
    assert scales(codec("terngrad:clip=0"), x, LAYOUT) == [9.0]
    spiked = torch.where(torch.arange(100) == 50, 1000.0, 0.1 * torch.ones(100))
    assert (
        scales(codec("terngrad"), spiked, None)[0]
        == pytest.approx(250, rel=1e-3)
        == codec("terngrad").scale(spiked)
    )


def test_the_update_is_sent_once_in_the_second_phase():
    algorithm, values = SharedScaleClient(), [{} for _ in range(3)]
    x = torch.randn(3, 14, generator=torch.Generator().manual_seed(1))
    x[1, 13] = float("nan")
    memories = [memory("none", codec("terngrad@layer"), 14, LAYOUT) for _ in range(3)]
    frames = algorithm.encode(memories, x.clone(), values, [5, 6, 7], Context(phase="scale"))
    assert isinstance(frames[1], NonFiniteError) and "tensor 'b', element 1" in str(frames[1])
    expected = torch.tensor(scales(memories[2].codec, x[2], LAYOUT))
    assert torch.equal(codec("identity").decode(frames[2], numel=3), expected)

    context = Context(announced={"scale": np.full(3, 2, "<f4").tobytes()})
    sent = algorithm.encode(memories, None, values, [5, 6, 7], context)
    assert isinstance(sent[1], ProtocolError)
    for i in (0, 2):
        alone = memories[i].codec.encode(x[i], seed=5 + i, layout=LAYOUT, context=context)
        assert sent[i] == memories[i].pending == alone
    again = algorithm.encode(memories, None, values, [5, 6, 7], context)
    assert ["has no update for phase 'train'" in str(error) for error in again] == [True] * 3


# In a simulation.


@pytest.mark.parametrize(("engine", "rules"), [("serial", LAYER), ("batched", MODEL)])
def test_virtual_and_real_clients_compute_the_same_model(tmp_path, engine, rules):
    rules = replace(rules, participation=0.5, downlink="stc:density=20%", seed=5)
    federation = Recorded(rules, clients=8)
    for member, shard in zip(
        federation.members, partition("iid", federation.members[0].data, 8, 5), strict=True
    ):
        member.shard = shard
    federation.run(3)
    simulate(
        replace(
            TINY,
            rounds=3,
            engine=engine,
            uplink=rules.uplink,
            partition="iid",
            batch_size=10,
            seed=5,
            out=str(tmp_path / "run"),
        )
    )
    virtual = load_file(tmp_path / "run" / "model.safetensors")
    for name, view in federation.layout.views(federation.loop.broadcasts.weights).items():
        torch.testing.assert_close(
            virtual[name], view, rtol=0, atol=0 if engine == "serial" else 1e-4
        )


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path):
    assert_the_same_when_stopped(
        tmp_path, replace(TINY, rounds=4), StopsAfter(2, 2), StopsAfter(3, 7)
    )


def test_the_tiny_task_is_learned_with_the_defaults_of_the_strategy(tmp_path):
    summary = simulate(replace(TINY, rounds=12, out=str(tmp_path / "run")))
    assert summary.accuracy > 0.85
    stored = read_run(tmp_path / "run")
    assert (stored["uplink"], stored["memory"]) == ("terngrad@layer", "none")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"uplink": "qsgd"}, "does not work with --uplink qsgd"),
        ({"uplink": "qsgd"}, "leave --uplink out, or give terngrad"),
        ({"memory": "ecq"}, "does not work with memory 'ecq'; leave --memory out, or give none"),
        (
            {"strategy": "shared-scale:x=1"},
            "strategy 'shared-scale' has no option 'x'; it takes no options",
        ),
    ],
)
def test_errors_in_options_say_how_to_fix_them(tmp_path, options, sentence):
    with pytest.raises(UserError) as caught:
        simulate(replace(TINY, **options, out=str(tmp_path / "run")))
    assert sentence in str(caught.value) and not (tmp_path / "run").exists()
