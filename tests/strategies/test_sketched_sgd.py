"""Sketched SGD in two exchanges: exact values at the k largest coordinates of the mean, every byte counted, and no update lost."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cases import for_each
from federation import Federation, sum_updates

from fedcomp import codec, memory
from fedcomp.codecs.sketch import Sketch
from fedcomp.errors import ConfigError, SpecError
from fedcomp.layout import Layout
from fedcomp.memories.sketched import CANDIDATES, MARKS, NUMBERS, SKETCH, VALUES
from fedcomp.messages import Assignment, Report, ticket
from fedcomp.strategies import Average, StrategyConfig, strategy
from fedcomp.strategies.sketched_sgd import SketchedSGD
from fedcomp.training.engine import ClientEngine, JobResult, SequentialJobs

K, MOST = 4, 8  # of 42 coordinates, at a density of 10 % with two candidates each
WIDE = "sketch:columns=400"
RULES = StrategyConfig(
    participation=1.0,
    uplink="sketch:columns=12",
    downlink="identity",
    memory="sketched:momentum=0",
    seed=3,
)
UPLINKS = [
    "sketch:columns=12",
    "sketch:columns=12,cells=bf16",
    "sketch:columns=12,cells=int8",
    "sketch:rows=3,columns=6@layer",
]
SMALL = partial(SketchedSGD, options=SketchedSGD.Options(density=0.1, candidates=2))


class Drawn(ClientEngine):
    """An engine whose updates have a part that all clients share and a part of each client."""

    device = torch.device("cpu")

    def __init__(self):
        pass

    def train_job(self, start, data, job, sgd, seed, out):
        shared, own = (
            torch.randn(start.numel(), generator=torch.Generator().manual_seed(seed))
            for seed in (job.round, 100 * job.round + job.client + 1)
        )
        out.copy_(sgd.lr * (shared**3 + own))
        return JobResult(1 / job.round)


class Recorded(Federation):
    """A federation that records the updates of each client, the accepted parts of them, and the assignments and reports."""

    def __init__(self, rules: StrategyConfig = RULES, strategy=SMALL, **options):
        super().__init__(rules, strategy=strategy, **options)
        self.inputs, self.accepted = (
            torch.zeros(len(self.members), self.layout.numel, dtype=torch.float64) for _ in range(2)
        )
        self.said: list[tuple[Assignment, Report]] = []
        # As (client, round, phase):
        self.lost_reports: set[tuple[int, int, str]] = set()
        self.lost_assignments: set[tuple[int, int, str]] = set()
        self.repeated_assignments: set[tuple[int, int, str]] = set()
        self.refused = 0
        for client, member in enumerate(self.members):
            member.trainer.engine = SequentialJobs(Drawn())
            self.count(client)

    def count(self, client: int) -> None:
        sum_updates(self.members[client], self.inputs[client])

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        super().handle(
            [a for a in assignments if (a.client, a.round, a.phase) in self.repeated_assignments]
        )
        heard = [
            a for a in assignments if (a.client, a.round, a.phase) not in self.lost_assignments
        ]
        reports = {report.client: report for report in super().handle(heard)}
        self.said += [(a, reports[a.client]) for a in heard]
        sent = [
            None if (a.client, a.round, a.phase) in self.lost_reports else reports.get(a.client)
            for a in assignments
        ]
        return [
            r
            or Report(a.round, a.phase, a.client, "failed", "", "", b"", "", 0, 0.0, "link", "lost")
            for a, r in zip(assignments, sent, strict=True)
        ]

    def run(self, rounds: int, first: int = 1) -> list:
        outcomes = []
        for outcome in self.loop.rounds(range(first, first + rounds)):
            outcomes.append(outcome)
            self.refused += len(outcome.rejections)
            for answer in outcome.accepted:
                if answer.update is not None:
                    self.accepted[answer.client] += self.own_part(answer)
        return outcomes

    def own_part(self, answer) -> torch.Tensor:
        """Return the part of an accepted answer that the server used, as the returned frame tells the client."""
        candidates, back = self.strategy.candidates, self.loop.dropped.get(answer.client)
        kept = np.ones(candidates.size, bool)
        if back:
            kept[MARKS.open(back, candidates.size).positions] = False
        part = torch.zeros(self.layout.numel)
        part[torch.from_numpy(candidates[kept])] = torch.from_numpy(
            answer.update.values[kept].copy()
        )
        return part

    def settle(self) -> None:
        for client, member in enumerate(self.members):
            if member.memory.pending is not None:
                taken = member.ticket == self.loop.tickets.get(client, "")
                member.memory.commit(
                    returned=self.loop.dropped.get(client)
                ) if taken else member.memory.rollback()

    def check(self) -> None:
        """Assert Σ accepted + v = Σ inputs for every client."""
        self.settle()
        for client, member in enumerate(self.members):
            total = self.accepted[client] + member.memory.state_dict()["residual"]
            torch.testing.assert_close(total, self.inputs[client], rtol=1e-5, atol=1e-6)

    def moved(self) -> torch.Tensor:
        return self.loop.broadcasts.weights - self.initial

    def mean(self, weights: Sequence[float] = ()) -> torch.Tensor:
        shares = torch.tensor(weights or [1.0] * self.clients, dtype=torch.float64)
        return (shares[:, None] * self.inputs).sum(0).div(shares.sum()).float()


def largest(x: torch.Tensor, k: int) -> list[int]:
    return x.abs().topk(k).indices.sort().values.tolist()


# A round.


@for_each("uplink", [WIDE, f"{WIDE},cells=bf16", f"{WIDE},cells=int8"])
def test_the_model_moves_by_exact_means_at_the_k_largest_coordinates(uplink):
    federation = Recorded(replace(RULES, uplink=uplink))
    (outcome,) = federation.run(1)
    mean, step = federation.mean(), federation.moved()
    assert step.nonzero().flatten().tolist() == largest(mean, K)
    torch.testing.assert_close(step[step != 0], mean[step != 0], rtol=1e-4, atol=1e-7)
    assert [a.client for a in outcome.accepted] == list(range(6)) and outcome.train_loss > 0
    told = {a.announced[1] for a, _ in federation.said if a.phase == VALUES}
    assert len(told) == 1 and MARKS.open(told.pop(), 42).positions.tolist() == largest(mean, MOST)


def test_with_layer_scope_candidates_are_proportional_to_tensor_sizes():
    federation = Recorded(replace(RULES, uplink=f"{WIDE}@layer"))
    federation.run(1)
    mean, step, found = federation.mean(), federation.moved(), []
    for entry in federation.layout:
        found += [
            entry.offset + i for i in largest(mean[entry.span], max(1, round(0.2 * entry.numel)))
        ]
    assert federation.strategy.candidates.tolist() == found
    assert step.nonzero().flatten().tolist() == [found[i] for i in largest(mean[found], K)]
    torch.testing.assert_close(step[step != 0], mean[step != 0], rtol=1e-4, atol=1e-7)


def test_candidates_come_from_the_sum_and_values_from_the_clients():
    federation = Recorded()
    federation.run(1)
    cells = sum(
        federation.strategy.uplink.open(r.frame, 42).cells
        for a, r in federation.said
        if a.phase == SKETCH
    )
    (seed,) = {
        federation.strategy.uplink.open(r.frame, 42).seed
        for a, r in federation.said
        if a.phase == SKETCH
    }
    wide = Sketch(columns=12, density=8 / 42)
    merged = wide.open(wide.encode(torch.zeros(42), seed=seed), 42)
    merged.cells = cells
    assert federation.strategy.candidates.tolist() == merged.positions.tolist()
    for a, r in federation.said:
        if a.phase == VALUES:
            at = torch.from_numpy(federation.strategy.candidates)
            assert torch.equal(
                NUMBERS.decode(r.frame, numel=MOST).double(), federation.inputs[a.client][at]
            )


def test_weights_by_examples_count_in_both_phases():
    federation = Recorded(replace(RULES, weights="examples", uplink=WIDE), clients=2)
    federation.members[0].shard = federation.members[0].shard[:50]
    federation.run(1)
    mean, step = federation.mean([50, 200]), federation.moved()
    assert step.nonzero().flatten().tolist() == largest(mean, K)
    torch.testing.assert_close(step[step != 0], mean[step != 0], rtol=1e-4, atol=1e-7)


@for_each("uplink", UPLINKS[::3])
def test_every_byte_of_both_phases_is_counted(uplink):
    federation = Recorded(
        replace(RULES, participation=0.5, uplink=uplink, downlink="topk:density=10%")
    )
    back = 0
    for round in range(1, 6):
        (outcome,) = federation.run(1, round)
        up, down = dict.fromkeys(outcome.cohort, 0), dict.fromkeys(outcome.cohort, 0)
        for a, r in federation.said:
            up[a.client] += len(r.frame)
            down[a.client] += sum(map(len, [*a.frames, *a.announced, a.returned]))
            back += len(a.returned)
        assert (up, down) == (outcome.traffic.uplink, outcome.traffic.downlink)
        federation.said.clear()
    assert back


def test_returned_frames_are_as_short_as_marks_among_the_candidates():
    federation = Recorded()
    federation.run(1)
    assert {len(back) for back in federation.loop.dropped.values()} == {
        len(MARKS.encode(torch.tensor([1.0] * K + [0.0] * K)))
    }


def test_the_default_downlink_sends_the_update_without_loss():
    own = SketchedSGD.defaults(SketchedSGD.Options(density=0.1))
    assert own == {"uplink": "sketch", "downlink": "topk:density=0.1,values=fp32"}
    federation = Recorded(replace(RULES, downlink=own["downlink"]))
    for outcome in federation.run(4):
        assert federation.strategy.downlink.open(outcome.broadcast.frame, 42).positions.size == K
        assert not federation.loop.broadcasts.memory.state_dict()["residual"].any()


@pytest.mark.parametrize(
    ("uplink", "downlink"),
    [(UPLINKS[0], "identity"), (UPLINKS[2], "stc:density=10%"), (UPLINKS[3], "stc:density=10%")],
)
def test_no_part_of_an_update_is_lost(uplink, downlink):
    """The sum of all inputs is in the model, in the clients' vectors v and in the server's residual."""
    federation = Recorded(replace(RULES, uplink=uplink, downlink=downlink, participation=0.5))
    federation.lost_reports = {
        (client, round, phase)
        for client in range(6)
        for round, phase in [(3, SKETCH), (5 + client, VALUES)]
    }
    applied, where = torch.zeros(42, dtype=torch.float64), state(federation)
    for round in range(1, 13):
        (outcome,) = federation.run(1, round)
        # The step is a mean; times the number of clients, it is their sum.
        applied += len(outcome.accepted) * (state(federation) - where)
        where = state(federation)
    assert federation.refused > 3 and federation.loop.dropped
    federation.check()
    residuals = sum(
        member.memory.state_dict()["residual"].double() for member in federation.members
    )
    torch.testing.assert_close(applied + residuals, federation.inputs.sum(0), rtol=1e-5, atol=1e-5)


def state(federation: Federation) -> torch.Tensor:
    """Return the weights plus the server's residual."""
    b = federation.loop.broadcasts
    return (b.weights + b.memory.state_dict().get("residual", 0)).double()


def test_unsent_coordinates_accumulate_momentum_and_sent_ones_start_from_zero():
    federation = Recorded(replace(RULES, memory="sketched:momentum=0.5", uplink=WIDE), clients=1)
    v, u = torch.zeros(42), torch.zeros(42)
    for round in range(1, 6):
        before = federation.inputs[0].clone()
        federation.run(1, round)
        u = 0.5 * u + (federation.inputs[0] - before).float()
        v = v + u
        kept = (
            federation.accepted[0].float().nonzero().flatten().tolist()
            if round == 1
            else largest(v, K)
        )
        u[kept] = v[kept] = 0
    federation.settle()
    torch.testing.assert_close(federation.members[0].memory.residual, v, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(federation.members[0].memory.velocity, u, rtol=1e-4, atol=1e-6)


# Each row of the table "How both sides stay in step" in docs/reference/interfaces.md has one or more tests.


@pytest.mark.parametrize(("phase", "uplink"), [(SKETCH, UPLINKS[1]), (VALUES, UPLINKS[3])])
def test_a_lost_reply_in_either_phase_loses_no_update(phase, uplink):
    federation = Recorded(replace(RULES, uplink=uplink, participation=0.5))
    federation.lost_reports = {
        (client, round, phase)
        for client in range(6)
        for round in range(1, 9)
        if (client + round) % 3 == 0
    }
    federation.run(8)
    assert federation.refused >= 5
    federation.check()


def test_a_client_lost_between_the_phases_sends_its_whole_update_later():
    federation = Recorded(replace(RULES, uplink=WIDE))
    federation.lost_reports = {(2, 1, VALUES)}
    (outcome,) = federation.run(1)
    assert [a.client for a in outcome.accepted] == [0, 1, 3, 4, 5] and [
        r.client for r in outcome.rejections
    ] == [2]
    step = federation.moved()
    mean = (federation.mean() * 6 - federation.inputs[2].float()) / 5
    torch.testing.assert_close(step[step != 0], mean[step != 0], rtol=1e-4, atol=1e-7)
    first = federation.inputs[2].clone()
    federation.run(1, 2)
    sent = [r.frame for a, r in federation.said if (a.client, a.round, a.phase) == (2, 2, VALUES)]
    both = federation.inputs[2][torch.from_numpy(federation.strategy.candidates)]
    torch.testing.assert_close(NUMBERS.decode(sent[0], numel=MOST).double(), both)
    assert first.any() and federation.accepted[2].any()
    federation.check()


@pytest.mark.parametrize("phase", [SKETCH, VALUES])
def test_lost_and_repeated_assignments_take_effect_once(phase):
    federation = Recorded(replace(RULES, participation=0.5))
    everybody = [(client, round) for client in range(6) for round in range(1, 11)]
    federation.lost_assignments = {
        (client, round, phase) for client, round in everybody if (client + round) % 4 == 0
    }
    federation.repeated_assignments = {
        (client, round, phase) for client, round in everybody if (client + round) % 4 == 1
    }
    federation.run(10)
    assert federation.refused >= 5
    federation.check()


def test_returned_frames_are_sent_until_a_client_confirms_them():
    federation = Recorded()
    federation.lost_assignments, federation.lost_reports = (
        {(1, 2, SKETCH)},
        {(2, 2, SKETCH), (2, 3, SKETCH)},
    )
    federation.run(4)
    told = {
        (a.client, a.round): (a.accepted, a.returned)
        for a, _ in federation.said
        if a.phase == SKETCH
    }
    assert told[1, 3] != told[1, 4] and all(
        told[2, 2] == told[2, round] and told[2, round][1] for round in (3, 4)
    )
    federation.check()


def test_a_server_restored_before_clients_settled_counts_no_update_twice():
    federation = Recorded(replace(RULES, participation=0.5))
    federation.run(5)
    kept, accepted = federation.copy_of_loop(), federation.accepted.clone()
    federation.run(1, 6)
    assert not torch.equal(federation.accepted, accepted)
    federation.loop, federation.accepted = kept, accepted
    federation.run(5, 7)
    assert not federation.refused
    federation.check()


def test_a_server_restored_further_back_continues_with_the_clients_state():
    federation = Recorded()
    federation.run(2)
    kept = federation.copy_of_loop()
    federation.run(3, 3)
    federation.loop = kept
    outcomes = federation.run(3, 6)
    assert [len(outcome.accepted) for outcome in outcomes] == [6, 6, 6]


def test_a_client_that_restarts_between_rounds_continues_from_its_state():
    stayed, restarted = (
        Recorded(replace(RULES, memory="sketched")),
        Recorded(replace(RULES, memory="sketched")),
    )
    for round in range(1, 5):
        stayed.run(1, round), restarted.run(1, round)
        for member in restarted.members:
            state = {
                k: v.clone() if isinstance(v, torch.Tensor) else v
                for k, v in member.memory.state_dict().items()
            }
            assert {"pending", "candidates"} <= state.keys()
            member.state.memory = memory(
                "sketched", restarted.strategy.uplink, 42, restarted.layout
            )
            member.memory.load_state_dict(state)
            member.rounds.clear()
    assert torch.equal(stayed.loop.broadcasts.weights, restarted.loop.broadcasts.weights)


def test_a_client_that_lost_its_state_between_the_phases_fails_the_round():
    federation = Recorded()
    handle = federation.handle

    def restarted(assignments):
        for a in assignments:
            if (a.client, a.round, a.phase) == (4, 2, VALUES):
                federation.members[4].rounds.clear()
        return handle(assignments)

    federation.handle = restarted
    outcomes = federation.run(3)
    (rejection,) = outcomes[1].rejections
    assert (rejection.client, rejection.stage) == (4, "phase")
    assert (
        rejection.reason
        == "this client did not complete phase 'sketch' of round 2, or has lost the results of this phase, "
        "so it cannot continue the round; it can take part in the next round"
    )
    assert len(outcomes[2].accepted) == 6
    federation.check()


def test_damaged_returned_marks_fail_the_client_but_lose_no_update():
    federation = Recorded()
    federation.run(1)
    whole, waiting = federation.loop.dropped[3], federation.members[3].memory.pending
    federation.loop.dropped[3] = whole[:-1]
    (outcome,) = federation.run(1, 2)
    assert [(r.client, r.stage) for r in outcome.rejections] == [(3, "download")]
    assert federation.members[3].memory.pending == waiting
    federation.loop.dropped[3] = whole
    (outcome,) = federation.run(1, 3)
    assert not outcome.rejections
    federation.check()


@pytest.mark.parametrize("seed", range(4))
def test_no_mixture_of_faults_loses_an_update(seed):
    drawn, federation = (
        np.random.default_rng(seed),
        Recorded(replace(RULES, participation=0.5, uplink=UPLINKS[seed])),
    )
    for mishaps in (
        federation.lost_reports,
        federation.lost_assignments,
        federation.repeated_assignments,
    ):
        mishaps |= {
            (client, round, phase)
            for client in range(6)
            for round in range(1, 13)
            for phase in (SKETCH, VALUES)
            if drawn.random() < 0.1
        }
    kept, accepted = federation.copy_of_loop(), federation.accepted.clone()
    for round in range(1, 13):
        federation.run(1, round)
        if drawn.random() < 0.2:  # restore the server to the round before, which no client settled
            federation.loop, federation.accepted = kept, accepted
        kept, accepted = federation.copy_of_loop(), federation.accepted.clone()
    assert federation.refused
    federation.check()


# Unusual answers.


@for_each("phase", [SKETCH, VALUES])
def test_a_phase_without_answers_does_not_move_the_model(phase):
    federation = Recorded()
    federation.lost_reports = {(client, round, phase) for client in range(6) for round in (1, 3)}
    for round in (1, 3):
        weights = federation.loop.broadcasts.weights.clone()
        (outcome,) = federation.run(1, round)
        assert outcome.broadcast is None and outcome.accepted == [] and len(outcome.rejections) == 6
        assert torch.equal(federation.loop.broadcasts.weights, weights)
        (outcome,) = federation.run(1, round + 1)
        assert len(outcome.accepted) == 6 and outcome.broadcast is not None
    federation.check()


def test_a_round_with_a_nonfinite_sum_moves_and_loses_nothing():
    federation = Recorded(replace(RULES, server_lr=1e39))
    (outcome,) = federation.run(1)
    assert (
        outcome.broadcast is None
        and {r.stage for r in outcome.rejections} == {"aggregate"}
        and not federation.loop.dropped
    )
    assert torch.equal(federation.loop.broadcasts.weights, federation.initial)
    federation.check()


def answers(phase: str, frame: bytes):
    return lambda a, r: (
        replace(r, frame=frame, ticket=ticket(a.round, a.client, frame)) if a.phase == phase else r
    )


def test_frames_of_another_size_or_codec_are_rejected():
    federation = Recorded()
    federation.faults[1, 1] = answers(SKETCH, NUMBERS.encode(torch.ones(42)))
    federation.faults[2, 1] = answers(VALUES, NUMBERS.encode(torch.ones(MOST + 1)))
    federation.faults[4, 1] = answers(SKETCH, codec("sketch").encode(torch.ones(41)))
    (outcome,) = federation.run(1)
    assert [r.client for r in outcome.rejections] == [1, 2, 4] and [
        a.client for a in outcome.accepted
    ] == [0, 3, 5]


def test_sketches_with_other_seeds_do_not_add_candidates():
    federation = Recorded()
    for client in range(5):
        x = torch.zeros(42)
        x[8 * client : 8 * client + 8] = 100.0
        federation.faults[client, 1] = answers(
            SKETCH, codec("sketch:columns=500").encode(x, seed=client)
        )
    (outcome,) = federation.run(1)
    assert federation.strategy.candidates.size == MOST and len(outcome.accepted) == 6


def test_clients_without_a_frame_count_as_zero_updates():
    federation = Recorded()
    for client in range(5):
        federation.faults[client, 1] = lambda a, r: replace(r, frame=b"", ticket="")
    (outcome,) = federation.run(1)
    assert len(outcome.accepted) == 6 and set(federation.loop.dropped) == {5}
    torch.testing.assert_close(
        federation.moved(), federation.own_part(outcome.accepted[5]) / 6, rtol=1e-5, atol=1e-8
    )


def test_updates_of_zeros_have_no_candidates_and_do_not_move_the_model():
    federation = Recorded()
    for member in federation.members:
        member.sgd = replace(member.sgd, lr=0.0)
    for outcome in federation.run(2):
        assert (
            len(outcome.accepted) == 6
            and not outcome.rejections
            and federation.strategy.candidates.size == 0
        )
    assert not federation.moved().any()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@for_each("seeds", [(7,), range(10)])
def test_updates_near_the_largest_float32_leave_a_finite_model(seeds):
    federation = Recorded(clients=10)  # ten times a tenth of the largest number is infinite
    huge = {
        SKETCH: [
            codec("sketch:columns=12").encode(torch.full((42,), 3.4e38), seed=seed)
            for seed in seeds
        ],
        VALUES: [NUMBERS.encode(torch.full((MOST,), 3.4e38))],
    }
    for client in range(10):
        federation.faults[client, 1] = lambda a, r: answers(
            a.phase, huge[a.phase][r.client % len(huge[a.phase])]
        )(a, r)
    federation.run(1)
    assert (
        federation.strategy.candidates.size == MOST
        and federation.loop.broadcasts.weights.isfinite().all()
    )


# Options.


@for_each(
    "changes, options, sentence",
    [
        (
            {"uplink": "topk"},
            {},
            "--strategy sketched-sgd does not work with --uplink topk:density=0.01,values=fp32; "
            "leave --uplink out, or give sketch",
        ),
        ({"uplink": "fp16@layer"}, {}, "does not work with --uplink fp16@layer"),
        (
            {"uplink": "sketch:density=1/10"},
            {},
            "has density=0.01, but --uplink has density=0.1; leave the density of --uplink out, or give --strategy sketched-sgd:",
        ),
        (
            {"memory": "none"},
            {},
            "does not work with memory 'none'; leave --memory out, or give sketched",
        ),
        ({"memory": "dgc"}, {}, "does not work with memory 'dgc'"),
        (
            {"density_warmup": 3},
            {},
            "needs frames of equal size, but --density-warmup, --density-schedule and --budget change",
        ),
        (
            {"budget_bytes": 10**6},
            {},
            "needs frames of equal size, but --density-warmup, --density-schedule and --budget change",
        ),
        (
            {},
            {"density": 0.0},
            "density must be in (0, 1]; try density=1%",
        ),
        (
            {},
            {"candidates": 0},
            "candidates is 0; give at least 1",
        ),
    ],
)
def test_errors_in_options_say_how_to_fix_them(changes, options, sentence):
    with pytest.raises((ConfigError, SpecError)) as caught:
        SketchedSGD(
            replace(RULES, **changes), Layout.flat(42), options=SketchedSGD.Options(**options)
        )
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_its_memory_is_refused_with_other_strategies_and_for_the_downlink():
    with pytest.raises(
        ConfigError,
        match="--memory sketched does not work with --strategy average; give --strategy sketched-sgd, or",
    ):
        Federation(RULES, strategy=Average)
    with pytest.raises(
        ConfigError,
        match="--downlink-memory sketched sends an update in several frames, but a broadcast has one frame; use",
    ):
        Federation(replace(RULES, downlink="sketch", downlink_memory="sketched"), strategy=SMALL)


def test_a_spec_string_sets_the_options():
    made = strategy(
        "sketched-sgd:density=5%,candidates=3",
        replace(RULES, uplink="sketch:density=5%"),
        Layout.flat(42),
    )
    assert (
        isinstance(made, SketchedSGD)
        and made.options == SketchedSGD.Options(0.05, 3)
        and CANDIDATES == "candidates"
    )
