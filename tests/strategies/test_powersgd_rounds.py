"""PowerSGD in two exchanges: the update is a low-rank mean, every byte is counted, and no part of an update is lost."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import for_each
from federation import Federation, sum_updates
from safetensors.torch import load_file
from small_runs import StopsAfter, assert_the_same_when_stopped

from fedcomp import RunConfig, UserError
from fedcomp.config import read_run
from fedcomp.layout import Layout
from fedcomp.memories.lowrank import LEFT, RIGHT
from fedcomp.messages import DENSE
from fedcomp.sim import simulate
from fedcomp.strategies import StrategyConfig, strategy
from fedcomp.strategies.powersgd import PowerSGD
from fedcomp.tasks.partition import partition

TINY = RunConfig(
    task=f"{Path(__file__).parents[1] / 'tiny_task.py'}:task",
    clients=8,
    participation=0.5,
    rounds=6,
    local_steps=2,
    lr=0.1,
    strategy="powersgd:rank=1",
    downlink="stc:density=20%",
    partition="classes:1",
)
RULES = StrategyConfig(
    participation=1.0, uplink="powersgd:rank=1", downlink="identity", memory="lowrank", seed=3
)
MATRICES = {"0.weight": (8, 2), "2.weight": (2, 8)}
RANK_1 = partial(PowerSGD, options=PowerSGD.Options(rank=1))


class Recorded(Federation):
    """A federation that records the updates of each client, and the assignments and reports of each phase."""

    def __init__(self, rules: StrategyConfig = RULES, **options):
        super().__init__(rules, strategy=RANK_1, **options)
        self.inputs = [torch.zeros(self.layout.numel) for _ in self.members]
        self.said: list[tuple] = []
        self.lost_reports: set[tuple[int, int, str]] = set()  # client, round and phase
        for client, member in enumerate(self.members):
            sum_updates(member, self.inputs[client])

    def handle(self, assignments):
        reports = super().handle(assignments)
        self.said += zip(assignments, reports, strict=True)
        return [
            replace(r, kind="failed", frame=b"", stage="link", reason="lost")
            if (a.client, a.round, a.phase) in self.lost_reports
            else r
            for a, r in zip(assignments, reports, strict=True)
        ]

    def run(self, rounds: int, first: int = 1) -> list:
        return list(self.loop.rounds(range(first, first + rounds)))

    def own_part(self, answer) -> torch.Tensor:
        return self.strategy.factor_layout.update(self.strategy.basis, answer.update.values).dense()


# A round.


def test_a_round_is_one_step_of_power_iteration_on_the_mean():
    federation = Recorded()
    first = np.frombuffer(federation.strategy.right, "<f4").astype(np.float64)
    (outcome,) = federation.run(1)
    mean = federation.layout.views(torch.stack(federation.inputs).double().mean(0))
    moved = federation.layout.views(
        federation.loop.broadcasts.weights.double() - federation.initial.double()
    )
    for q, name in zip(np.split(first, [2]), MATRICES, strict=True):
        m = mean[name].numpy()
        basis = np.linalg.qr(m @ q[:, None]).Q
        np.testing.assert_allclose(moved[name], basis @ (basis.T @ m), atol=1e-6)
    for name in ("0.bias", "2.bias"):
        torch.testing.assert_close(moved[name], mean[name], rtol=1e-4, atol=1e-6)
    assert [a.client for a in outcome.accepted] == list(range(6)) and outcome.train_loss > 0


def test_the_next_round_starts_from_the_last_right_factors():
    federation = Recorded()
    before = federation.strategy.right
    (outcome,) = federation.run(1)
    numbers = torch.stack(
        [torch.from_numpy(a.update.values.copy()) for a in outcome.accepted]
    ).mean(0)
    after = torch.frombuffer(bytearray(federation.strategy.right), dtype=torch.float32)
    torch.testing.assert_close(after, numbers[:10])
    assert federation.strategy.right != before
    federation.run(1, 2)
    told = [a.announced for a, _ in federation.said if (a.round, a.phase) == (2, LEFT)]
    assert told == [[b"right", after.numpy().tobytes()]] * 6


def test_every_byte_of_both_phases_is_counted():
    federation = Recorded(replace(RULES, participation=0.5, downlink="stc:density=20%"))
    for round in range(1, 6):
        (outcome,) = federation.run(1, round)
        up, down = dict.fromkeys(outcome.cohort, 0), dict.fromkeys(outcome.cohort, 0)
        for a, r in federation.said:
            up[a.client] += len(r.frame)
            down[a.client] += sum(map(len, [*a.frames, *a.announced]))
        assert (up, down) == (outcome.traffic.uplink, outcome.traffic.downlink)
        assert all(10 + 4 * 10 <= len(r.frame) for _, r in federation.said)
        federation.said.clear()


def test_announcements_sent_twice_are_counted_twice():
    federation = Recorded(replace(RULES, downlink="stc:density=20%"))
    federation.run(1)
    federation.said.clear()
    # A model version that the server does not know.
    federation.members[2].replica.restore(federation.initial + 1, "elsewhere")
    (outcome,) = federation.run(1, 2)
    sent = [a for a, _ in federation.said if a.client == 2]
    assert [a.form for a in sent][1] == DENSE and sent[1].announced
    assert outcome.traffic.downlink[2] == sum(
        len(part) for a in sent for part in [*a.frames, *a.announced]
    )


def test_clients_download_the_model_and_train_once_per_round():
    federation = Recorded()
    federation.run(3)
    for a, r in federation.said:
        assert a.form == "up-to-date" or a.phase == LEFT
        assert (r.version, r.fingerprint) == (a.version, a.fingerprint)
    by_phase = {
        phase: [(r.client, r.loss) for a, r in federation.said if a.phase == phase]
        for phase in (LEFT, RIGHT)
    }
    assert by_phase[LEFT] == by_phase[RIGHT] and len(by_phase[LEFT]) == 18


def test_weights_by_examples_count_in_both_phases():
    federation = Recorded(replace(RULES, weights="examples"), clients=2)
    federation.members[0].shard = federation.members[0].shard[:50]
    federation.run(1)
    mean = (
        federation.layout.views((50 * federation.inputs[0] + 200 * federation.inputs[1]) / 250)[
            "0.weight"
        ]
        .double()
        .numpy()
    )
    moved = federation.layout.views(federation.loop.broadcasts.weights - federation.initial)[
        "0.weight"
    ]
    q = np.frombuffer(RANK_1_START, "<f4")[:2].astype(np.float64)
    basis = np.linalg.qr(mean @ q[:, None]).Q
    np.testing.assert_allclose(moved, basis @ (basis.T @ mean), atol=1e-6)


RANK_1_START = Recorded().strategy.right


# Faults.


def settle_and_check(federation: Recorded, accepted: list[torch.Tensor]) -> None:
    """Σ accepted + residual = Σ inputs, per client."""
    for client, member in enumerate(federation.members):
        if member.memory.pending is not None:
            taken = member.ticket == federation.loop.tickets.get(client, "")
            member.memory.commit() if taken else member.memory.rollback()
        total = accepted[client] + member.memory.state_dict()["residual"]
        torch.testing.assert_close(total, federation.inputs[client], rtol=1e-4, atol=1e-5)


@for_each("phase", [LEFT, RIGHT])
def test_a_lost_reply_in_either_phase_loses_no_update(phase):
    federation = Recorded(replace(RULES, participation=0.5))
    federation.lost_reports = {
        (client, round, phase)
        for client in range(6)
        for round in range(1, 9)
        if (client + round) % 3 == 0
    }
    accepted = [torch.zeros(federation.layout.numel) for _ in federation.members]
    lost = 0
    for outcome in federation.loop.rounds(range(1, 9)):
        lost += len(outcome.rejections)
        for answer in outcome.accepted:
            accepted[answer.client] += federation.own_part(answer)
    assert lost >= 5
    settle_and_check(federation, accepted)


def test_a_client_lost_between_the_phases_does_not_move_the_model():
    federation = Recorded()
    federation.lost_reports = {(2, 1, RIGHT)}
    (outcome,) = federation.run(1)
    assert [a.client for a in outcome.accepted] == [0, 1, 3, 4, 5] and [
        r.client for r in outcome.rejections
    ] == [2]
    mean = torch.stack([federation.own_part(a) for a in outcome.accepted]).mean(0)
    torch.testing.assert_close(federation.loop.broadcasts.weights, federation.initial + mean)
    member = federation.members[2]
    assert member.memory.pending is not None
    federation.run(1, 2)
    assert 2 in federation.loop.tickets
    accepted = torch.zeros(federation.layout.numel)
    for answer in [a for a in federation.loop.rounds([3])][0].accepted:
        accepted = accepted if answer.client != 2 else federation.own_part(answer)
    assert accepted.any()


@for_each("phase", [LEFT, RIGHT])
def test_a_phase_without_answers_does_not_move_the_model(phase):
    federation = Recorded()
    federation.lost_reports = {(client, round, phase) for client in range(6) for round in (1, 3)}
    for round in (1, 3):
        weights, right = federation.loop.broadcasts.weights.clone(), federation.strategy.right
        (outcome,) = federation.run(1, round)
        assert outcome.broadcast is None and outcome.accepted == [] and len(outcome.rejections) == 6
        assert (
            torch.equal(federation.loop.broadcasts.weights, weights)
            and federation.strategy.right == right
        )
        (outcome,) = federation.run(1, round + 1)
        assert (
            len(outcome.accepted) == 6
            and outcome.broadcast is not None
            and federation.strategy.right != right
        )


def test_a_round_with_a_nonfinite_sum_does_not_move_the_model():
    federation = Recorded(replace(RULES, server_lr=1e39))
    right = federation.strategy.right
    (outcome,) = federation.run(1)
    assert outcome.broadcast is None and {r.stage for r in outcome.rejections} == {"aggregate"}
    assert federation.strategy.right == right and torch.equal(
        federation.loop.broadcasts.weights, federation.initial
    )


def test_a_client_that_lost_its_state_between_the_phases_fails_the_round():
    federation = Recorded()
    handle = federation.handle

    def restarted(assignments):
        for a in assignments:
            if (a.client, a.round, a.phase) == (4, 2, RIGHT):
                federation.members[4].rounds.clear()
        return handle(assignments)

    federation.handle = restarted
    outcomes = federation.run(3)
    (rejection,) = outcomes[1].rejections
    assert (rejection.client, rejection.stage) == (4, "phase")
    assert (
        rejection.reason
        == "this client did not complete phase 'left' of round 2, or has lost the results of this phase, "
        "so it cannot continue the round; it can take part in the next round"
    )
    assert len(outcomes[2].accepted) == 6


def test_frames_of_another_size_are_rejected():
    federation = Recorded()
    federation.faults[1, 1] = lambda a, r: (
        replace(r, frame=federation.strategy.downlink.encode(torch.ones(11)))
        if a.phase == LEFT
        else r
    )
    federation.faults[2, 1] = lambda a, r: replace(r, frame=r.frame[:-1]) if a.phase == RIGHT else r
    (outcome,) = federation.run(1)
    assert [r.client for r in outcome.rejections] == [1, 2] and [
        a.client for a in outcome.accepted
    ] == [0, 3, 4, 5]


def test_clients_without_a_frame_count_as_zero_updates():
    federation = Recorded()
    for client in range(5):
        federation.faults[client, 1] = lambda a, r: replace(r, frame=b"", ticket="")
    (outcome,) = federation.run(1)
    assert len(outcome.accepted) == 6
    torch.testing.assert_close(
        federation.loop.broadcasts.weights,
        federation.initial + federation.own_part(outcome.accepted[5]) / 6,
    )


def test_updates_near_the_largest_float32_leave_a_finite_model():
    federation = Recorded()
    huge = {LEFT: torch.full((10,), 3.4e38), RIGHT: torch.full((20,), 3.4e38)}
    for client in range(6):
        federation.faults[client, 1] = lambda a, r: replace(
            r, frame=federation.strategy.downlink.encode(huge[a.phase])
        )
    federation.run(1)
    assert federation.loop.broadcasts.weights.isfinite().all()


# In a simulation.


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_virtual_and_real_clients_compute_the_same_model(tmp_path, engine):
    rules = replace(RULES, participation=0.5, downlink="stc:density=20%", seed=5)
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
            partition="iid",
            batch_size=10,
            seed=5,
            out=str(tmp_path / "run"),
        )
    )
    virtual = load_file(tmp_path / "run" / "model.safetensors")
    for name, view in federation.layout.views(federation.loop.broadcasts.weights).items():
        torch.testing.assert_close(
            virtual[name], view, rtol=0, atol=0 if engine == "serial" else 1e-6
        )


@pytest.mark.parametrize(
    ("every", "stops"),
    [(1, [StopsAfter(1, 5), StopsAfter(3, 2), StopsAfter(3)]), (3, [StopsAfter(4, 7)])],
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path, every, stops):
    config = replace(TINY, rounds=4, checkpoint_every=every)
    assert_the_same_when_stopped(tmp_path, config, *stops)


def test_the_tiny_task_is_learned_at_rank_1(tmp_path):
    summary = simulate(replace(TINY, rounds=30, out=str(tmp_path / "run")))
    assert summary.accuracy > 0.85


def test_unset_uplink_and_memory_get_the_defaults_of_the_strategy(tmp_path):
    simulate(replace(TINY, rounds=1, out=str(tmp_path / "run")))
    stored = read_run(tmp_path / "run")
    assert (stored["uplink"], stored["memory"]) == ("powersgd:rank=1", "lowrank")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"uplink": "topk"},
            "--strategy powersgd sends factors of rank 1, not --uplink topk:density=0.01,values=fp32; leave --uplink out, or "
            "give powersgd:rank=1",
        ),
        ({"uplink": "powersgd:rank=2"}, "sends factors of rank 1, not --uplink powersgd:rank=2"),
        (
            {"memory": "none"},
            "does not work with memory 'none'; leave --memory out, or give lowrank",
        ),
        (
            {"strategy": "powersgd:rank=2"},
            "no tensor of the model is larger than its factors; give a lower rank",
        ),
        ({"strategy": "powersgd:rank=0"}, "rank is 0; give 1 to 254"),
        (
            {"strategy": "powersgd:rnk=1"},
            "strategy 'powersgd' has no option 'rnk'; did you mean 'rank'",
        ),
        ({"strategy": "powersdg"}, "unknown strategy 'powersdg'; did you mean 'powersgd'"),
        ({"strategy": "powersgd@layer"}, "has no scope"),
        (
            {"strategy": "average:rank=1"},
            "strategy 'average' has no option 'rank'; it takes no options",
        ),
        ({"density_warmup": 3}, "leave --density-warmup out"),
    ],
)
def test_errors_in_options_say_how_to_fix_them(tmp_path, options, sentence):
    with pytest.raises(UserError) as caught:
        simulate(replace(TINY, **options, out=str(tmp_path / "run")))
    assert sentence in str(caught.value) and not (tmp_path / "run").exists()


@for_each("stored", [None, b"", bytes(44), np.full(10, np.nan, "<f4").tobytes()])
def test_a_damaged_state_raises_an_error(stored):
    with pytest.raises((ValueError, TypeError)):
        Recorded().strategy.restore(lambda name: None, lambda name: stored)


def test_a_spec_string_sets_the_options():
    layout = Layout.from_shapes({"w": (20, 20)})
    made = [
        strategy(text, replace(RULES, uplink=text), layout)
        for text in ("powersgd:rank=3", "powersgd")
    ]
    assert all(isinstance(m, PowerSGD) for m in made) and [m.options.rank for m in made] == [3, 2]
