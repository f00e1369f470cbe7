"""FetchSGD: rounds equal the paper's algorithm, no update is lost, failed rounds do not move the model, other sketches are rejected."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cases import for_each
from federation import Federation, watch_updates

from fedcomp import codec
from fedcomp.errors import ConfigError, SpecError
from fedcomp.kernels import count_sketch
from fedcomp.layout import Layout
from fedcomp.messages import Assignment
from fedcomp.strategies import StrategyConfig, strategy
from fedcomp.strategies.fetchsgd import ERROR, MOMENTUM, FetchSGD

RULES = StrategyConfig(
    participation=1.0,
    uplink="sketch:rows=3,columns=24",
    downlink="topk:density=10%",
    memory="none",
    downlink_memory="none",
    seed=3,
)
both_rules = for_each("error", ["subtract", "zero"])


class Recorded(Federation):
    """A federation that records the updates of each client by round, and every assignment with its report."""

    def __init__(self, rules: StrategyConfig = RULES, clients: int = 6, **options):
        options = {"density": 0.1, "momentum": 0.5, "error": "subtract"} | options
        super().__init__(
            rules, clients, strategy=partial(FetchSGD, options=FetchSGD.Options(**options))
        )
        self.inputs: dict[int, dict[int, np.ndarray]] = {}
        self.said: list[tuple] = []
        for client, member in enumerate(self.members):
            watch_updates(member, partial(self._keep, client))

    def _keep(self, client: int, a: Assignment, update: torch.Tensor) -> None:
        self.inputs.setdefault(a.round, {})[client] = update.double().numpy()

    def handle(self, assignments):
        reports = super().handle(assignments)
        self.said += zip(assignments, reports, strict=True)
        return reports

    def run(self, rounds: int, first: int = 1) -> list:
        return list(self.loop.rounds(range(first, first + rounds)))

    @property
    def moved(self) -> np.ndarray:
        return (self.loop.broadcasts.weights.double() - self.initial.double()).numpy()

    @property
    def state(self) -> tuple[bytes, bytes]:
        values = self.strategy.take_changes()[1]
        return values[MOMENTUM], values[ERROR]

    def sketch(self, x: np.ndarray) -> np.ndarray:
        """Return the sketch of x in float64, computed with a matrix."""
        rows, columns = self.strategy.shape
        matrix = np.zeros((rows, columns, x.size))
        for r, (buckets, negative) in enumerate(
            count_sketch.buckets_and_signs(np.arange(x.size), rows, columns, self.strategy.seed)
        ):
            matrix[r, buckets, np.arange(x.size)] = np.where(negative, -1.0, 1.0)
        return matrix @ x

    def query(self, cells: np.ndarray) -> np.ndarray:
        """Return the estimate of each coordinate: the median over the rows."""
        rows = [self.sketch(unit) for unit in np.eye(self.layout.numel)]  # ±1 in one cell a row
        return np.array([np.median((cells * unit).sum(1)) for unit in rows])


# A round.


@pytest.mark.parametrize(
    ("error", "step", "warmup"), [("subtract", 0.5, 0), ("zero", 1.0, 0), ("zero", 0.5, 3)]
)
def test_rounds_equal_those_of_the_paper(error, step, warmup):
    """The sketches contain gradients. A round's learning rate is applied when the model moves."""
    rules = replace(RULES, server_lr=step, uplink="sketch:rows=3,columns=60", lr_warmup=warmup)
    federation = Recorded(rules, error=error)
    outcomes = federation.run(4)
    numel, moved = federation.layout.numel, np.zeros(federation.layout.numel)
    momentum = accumulated = np.zeros((3, 60))
    for round, outcome in enumerate(outcomes, 1):
        assert len(outcome.accepted) == 6
        rate = min(1.0, round / warmup) if warmup else 1.0
        momentum = 0.5 * momentum + federation.sketch(
            np.mean([*federation.inputs[round].values()], axis=0) / rate
        )
        accumulated = accumulated + momentum
        estimates = federation.query(accumulated)
        # Rounded, because the biases of the two classes have equal magnitudes.
        at = np.argsort(-np.abs(estimates).round(6), kind="stable")[:4]
        delta = np.where(np.isin(np.arange(numel), at), estimates, 0)
        moved += step * rate * delta
        if error == "subtract":
            accumulated = accumulated - federation.sketch(delta)
            momentum = momentum - federation.sketch(
                np.where(delta != 0, federation.query(momentum), 0)
            )
        else:
            touched = (
                federation.sketch((delta != 0) * np.random.default_rng(0).normal(size=numel)) != 0
            )
            momentum, accumulated = (
                np.where(touched, 0, momentum),
                np.where(touched, 0, accumulated),
            )
    np.testing.assert_allclose(federation.moved, moved, atol=1e-5)
    np.testing.assert_allclose(federation.strategy.momentum, momentum, atol=1e-5)
    np.testing.assert_allclose(federation.strategy.error, accumulated, atol=1e-5)


@for_each(
    "downlink, step",
    [
        ("topk:density=10%", 0.5),
        ("stc:density=10%", 1.0),
        ("topk:density=5%", 1.0),
        ("topk:density=10%+qsgd:levels=2", 2.0),
        ("identity", 1.0),
    ],
)
def test_sent_updates_have_moved_the_model_or_are_in_the_error_sketch(downlink, step):
    federation = Recorded(
        replace(RULES, downlink=downlink, server_lr=step, participation=0.5), momentum=0.0
    )
    sent = sum(
        np.mean([a.update.cells for a in outcome.accepted], axis=0, dtype=np.float64)
        for outcome in federation.run(5)
    )
    assert np.count_nonzero(federation.moved) >= 4
    np.testing.assert_allclose(
        federation.strategy.error + federation.sketch(federation.moved) / step, sent, atol=1e-5
    )


def test_momentum_is_zero_at_the_coordinates_that_moved():
    federation = Recorded(replace(RULES, uplink="sketch:rows=5,columns=2000"))
    federation.run(3)
    last = np.flatnonzero(
        federation.strategy.downlink.decode(
            federation.loop.broadcasts.cache[-1].frame, numel=42
        ).numpy()
    )
    found = count_sketch.estimates(federation.strategy.momentum, 42, federation.strategy.seed)
    assert last.size == 4 and np.abs(found[last]).max() < 1e-6 < np.abs(found).max()


def test_all_sketches_of_a_run_share_a_seed_that_depends_on_the_runs_seed():
    federation = Recorded(replace(RULES, participation=0.5))
    seen = {a.update.seed for outcome in federation.run(4) for a in outcome.accepted}
    assert seen == {federation.strategy.seed} != {Recorded(replace(RULES, seed=4)).strategy.seed}


def test_every_byte_is_counted():
    federation = Recorded(replace(RULES, participation=0.5))
    for round in range(1, 6):
        (outcome,) = federation.run(1, round)
        assert {r.client: len(r.frame) for _, r in federation.said} == outcome.traffic.uplink
        assert {
            a.client: sum(map(len, a.frames)) for a, _ in federation.said
        } == outcome.traffic.downlink
        assert all(4 * 72 < len(r.frame) <= 4 * 72 + 24 for _, r in federation.said)
        assert not any(a.announced for a, _ in federation.said)
        federation.said.clear()


def test_weights_by_examples():
    federation = Recorded(replace(RULES, weights="examples"), clients=2)
    federation.members[0].shard = federation.members[0].shard[:50]
    federation.run(1)
    mean = (50 * federation.inputs[1][0] + 200 * federation.inputs[1][1]) / 250
    np.testing.assert_allclose(
        federation.strategy.momentum + federation.sketch(federation.moved),
        federation.sketch(mean),
        atol=1e-5,
    )


@for_each("cells, within", [("bf16", 2**-8), ("int8", 1 / 100)])
def test_estimates_from_cells_of_low_precision_are_close(cells, within):
    exact, short = (
        Recorded(),
        Recorded(replace(RULES, uplink=f"sketch:rows=3,columns=24,cells={cells}")),
    )
    (a,), (b,) = exact.run(1), short.run(1)
    assert sum(b.traffic.uplink.values()) < 0.7 * sum(a.traffic.uplink.values())
    np.testing.assert_allclose(
        short.strategy.momentum,
        exact.strategy.momentum,
        atol=2 * within * np.abs(exact.strategy.error).max(),
    )


# Faults.


@both_rules
def test_a_round_without_answers_does_not_move_the_model(error):
    federation = Recorded(error=error)
    federation.faults = {
        (client, 2): lambda a, r: replace(r, kind="failed", frame=b"", stage="link", reason="lost")
        for client in range(6)
    }
    federation.run(1)
    weights, state = federation.loop.broadcasts.weights.clone(), federation.state
    (outcome,) = federation.run(1, 2)
    assert outcome.broadcast is None and len(outcome.rejections) == 6
    assert torch.equal(federation.loop.broadcasts.weights, weights) and federation.state == state
    (outcome,) = federation.run(1, 3)
    assert outcome.broadcast is not None and federation.state != state


def test_a_rejected_reply_is_not_part_of_the_sketches():
    federation = Recorded(momentum=0.0)
    federation.faults = {(2, 1): lambda a, r: replace(r, frame=r.frame[:-1])}
    (outcome,) = federation.run(1)
    assert [r.client for r in outcome.rejections] == [2]
    mean = np.mean([x for client, x in federation.inputs[1].items() if client != 2], axis=0)
    np.testing.assert_allclose(
        federation.strategy.error + federation.sketch(federation.moved),
        federation.sketch(mean),
        atol=1e-5,
    )


def test_clients_without_a_frame_count_as_zero_updates():
    federation = Recorded(momentum=0.0)
    federation.faults = {
        (client, 1): lambda a, r: replace(r, frame=b"", ticket="") for client in range(5)
    }
    (outcome,) = federation.run(1)
    assert len(outcome.accepted) == 6
    taken = federation.strategy.error + federation.sketch(federation.moved)
    np.testing.assert_allclose(taken, federation.sketch(federation.inputs[1][5] / 6), atol=1e-5)


def test_without_frames_only_momentum_moves_the_model():
    federation = Recorded(replace(RULES, uplink="sketch:rows=3,columns=240"))
    federation.run(1)
    momentum = federation.strategy.momentum.copy()
    federation.faults = {
        (client, 2): lambda a, r: replace(r, frame=b"", ticket="") for client in range(6)
    }
    (outcome,) = federation.run(1, 2)
    assert outcome.broadcast is not None and momentum.any()
    assert np.abs(federation.strategy.momentum).sum() < 0.51 * np.abs(momentum).sum()


@for_each(
    "change",
    [
        {"uplink": "sketch:rows=3,columns=25"},
        {"uplink": "sketch:rows=5,columns=24"},
        {"uplink": "identity"},
        {"seed": 1},
    ],
)
def test_sketches_of_another_shape_or_seed_are_rejected(change):
    federation = Recorded()
    foreign, seed = (
        codec(change.get("uplink", RULES.uplink)),
        change.get("seed", federation.strategy.seed),
    )
    federation.faults = {
        (1, 1): lambda a, r: replace(r, frame=foreign.encode(torch.ones(42), seed=seed))
    }
    (outcome,) = federation.run(1)
    assert [r.client for r in outcome.rejections] == [1] and len(outcome.accepted) == 5
    if foreign.name == "sketch":
        assert "expected 3 × 24 and the seed" in outcome.rejections[0].reason


@for_each("error, size", [("subtract", 3.4e38), ("zero", 1e38)])
def test_sums_near_the_largest_float32_leave_a_finite_model(error, size):
    federation = Recorded(error=error, momentum=0.9)
    huge = federation.strategy.uplink.encode(
        torch.full((42,), size) * (1 - 2 * (torch.arange(42) % 2)), seed=federation.strategy.seed
    )
    federation.faults = {
        (client, round): lambda a, r: replace(r, frame=huge)
        for client in range(6)
        for round in range(1, 9)
    }
    outcomes = federation.run(8)
    assert outcomes[0].broadcast is not None and any(
        outcome.broadcast is None for outcome in outcomes
    )
    assert federation.loop.broadcasts.weights.isfinite().all()
    assert all(np.isfinite(np.frombuffer(data, "<f4")).all() for data in federation.state)


def test_a_nonfinite_step_does_not_change_the_sketches():
    federation = Recorded(replace(RULES, server_lr=1e39))
    state = federation.state
    (outcome,) = federation.run(1)
    assert outcome.broadcast is None and {r.stage for r in outcome.rejections} == {"aggregate"}
    assert federation.state == state and not federation.moved.any()


# The strategy and its options.


@for_each(
    "stored",
    [
        None,
        b"",
        bytes(71 * 4),
        np.full(72, np.nan, "<f4").tobytes(),
        np.full(72, np.inf, "<f4").tobytes(),
    ],
)
def test_a_damaged_state_raises_an_error(stored):
    good = bytes(4 * 72)
    for name in (MOMENTUM, ERROR):
        with pytest.raises((ValueError, TypeError)):
            Recorded().strategy.restore(
                lambda name: None, {MOMENTUM: good, ERROR: good, name: stored}.get
            )


def test_the_restored_state_equals_the_saved_one():
    federation, other = Recorded(), Recorded()
    federation.run(3)
    vectors, values = federation.strategy.take_changes()
    other.strategy.restore(vectors.get, values.get)
    assert other.state == federation.state != Recorded().state
    other.run(1)  # writable


@for_each(
    "spec, rules, sentence",
    [
        (
            "fetchsgd",
            {"uplink": "topk"},
            "needs sketches of the whole model, not --uplink topk:density=0.01,values=fp32; "
            "leave --uplink out, or give sketch",
        ),
        ("fetchsgd", {"uplink": "sketch@layer"}, "leave --uplink out, or give sketch"),
        (
            "fetchsgd",
            {"uplink": "sketch:density=5%"},
            "has density=0.01, but --uplink has density=0.05; leave the density of --uplink out, or give --strategy fetchsgd:density=0.05",
        ),
        (
            "fetchsgd",
            {"memory": "residual"},
            "does not work with memory 'residual'; leave --memory out, or give none",
        ),
        (
            "fetchsgd",
            {"downlink_memory": "residual"},
            "leave --downlink-memory out, or give none",
        ),
        (
            "fetchsgd",
            {"density_warmup": 3},
            "--density-schedule and --budget change the size of frames; leave",
        ),
        (
            "fetchsgd",
            {"budget_bytes": 10**6},
            "--density-schedule and --budget change the size of frames; leave",
        ),
    ],
)
def test_unsuitable_settings_are_refused(spec, rules, sentence):
    with pytest.raises(ConfigError) as caught:
        strategy(spec, replace(RULES, **rules), Layout.flat(42))
    assert sentence in str(caught.value)


@for_each(
    "spec",
    [
        "fetchsgd:momentum=1",
        "fetchsgd:momentum=-0.1",
        "fetchsgd:density=0",
        "fetchsgd:density=2",
        "fetchsgd:error=keep",
        "fetchsgd:k=3",
    ],
)
def test_options_out_of_range_are_refused(spec):
    with pytest.raises(SpecError):
        strategy(spec, RULES, Layout.flat(42))


def test_strategy_and_uplink_may_name_the_same_density():
    rules = replace(RULES, uplink="sketch:density=5%")
    made = strategy("fetchsgd:density=5%,momentum=0", rules, Layout.flat(42))
    assert (made.options.density, made.options.momentum, made.uplink.density) == (0.05, 0, 0.05)
