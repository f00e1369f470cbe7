"""Votes: the step follows the majority, ties are random bits that all parties can compute, and frames contain one bit per parameter."""

import math
from dataclasses import replace

import pytest
import torch
from cases import for_each
from federation import Federation

from fedcomp import RunConfig, UserError, seeds
from fedcomp.kernels import votes
from fedcomp.layout import Layout
from fedcomp.server.results import client_config
from fedcomp.strategies import Average, StrategyConfig, resolved, strategy
from fedcomp.strategies.vote import Vote

RULES = StrategyConfig(
    participation=1.0,
    uplink="sign",
    downlink="efsign",
    memory="none",
    downlink_memory="none",
    seed=3,
    lr=0.02,
)


def federation(clients: int = 5, momentum: float = 0.0, **changes) -> Federation:
    return Federation(
        replace(RULES, **changes),
        clients=clients,
        strategy=lambda *args: strategy(f"vote:momentum={momentum}", *args),
    )


def signs(outcome) -> torch.Tensor:
    return torch.stack([a.update.dense() for a in outcome.accepted])


def test_the_model_moves_by_lr_in_the_direction_of_the_majority():
    f = federation()
    for outcome in f.loop.rounds(range(1, 6)):
        step = f.strategy.downlink.decode(outcome.broadcast.frame, numel=f.layout.numel)
        torch.testing.assert_close(step, 0.02 * signs(outcome).sum(0).sign(), rtol=1e-6, atol=0)


def test_ties_are_random_bits_of_seed_and_round():
    f = federation(clients=4)
    ties = 0
    for outcome in f.loop.rounds(range(1, 4)):
        step = f.strategy.downlink.decode(outcome.broadcast.frame, numel=f.layout.numel)
        tie = signs(outcome).sum(0) == 0
        key = seeds.key(3, "tie", outcome.round)
        random_bits = votes.bits.random_bits(key, f.layout.numel, votes.TIE_STREAM)
        heads = torch.from_numpy(votes.bits.unpack_signs(random_bits, f.layout.numel))
        assert torch.equal(step[tie] > 0, heads[tie])
        ties += int(tie.sum())
    assert ties


@for_each("momentum", [0.5, 0.9])
def test_the_momentum_of_the_server_averages_the_majorities(momentum):
    f, m = federation(momentum=momentum), torch.zeros(42)
    for outcome in f.loop.rounds(range(1, 7)):
        m = (m * momentum).add_(signs(outcome).sum(0).sign(), alpha=1 - momentum)
        step = f.strategy.downlink.decode(outcome.broadcast.frame, numel=f.layout.numel)
        sure = m.abs() > 1e-6
        assert torch.equal(step[sure].sign(), m[sure].sign())


def test_the_step_warms_up_with_the_learning_rate():
    f = federation(lr_warmup=4)
    steps = [
        f.strategy.downlink.decode(o.broadcast.frame, numel=42).abs().mean().item()
        for o in f.loop.rounds(range(1, 6))
    ]
    assert steps == pytest.approx([0.005, 0.01, 0.015, 0.02, 0.02])


def test_weight_decay_is_part_of_the_step_after_the_vote():
    """Algorithm 1 of Bernstein et al. 2019, with the same bits on the server and on clients that missed rounds."""
    f = federation(weight_decay=0.5, participation=0.4)
    weights, factor = f.initial.clone(), decay_of(1 - 0.02 * 0.5)
    for outcome in f.loop.rounds(range(1, 9)):
        voted = signs(outcome).sum(0)
        before, weights = weights, f.loop.broadcasts.weights.clone()
        step = weights - before * factor
        torch.testing.assert_close(step.abs(), torch.full_like(step, 0.02), rtol=1e-4, atol=0)
        assert torch.equal(step[voted != 0].sign(), voted[voted != 0].sign())
        assert not outcome.rejections  # the copies of the clients have the model's fingerprint


def test_clients_of_a_vote_train_without_weight_decay():
    config = RunConfig(strategy="vote", weight_decay=0.1)
    assert client_config(config, federation().strategy).weight_decay == 0
    assert client_config(config, Average(StrategyConfig(), Layout.flat(8))) == config


def decay_of(factor: float) -> float:
    return torch.tensor(factor, dtype=torch.float32).item()


def test_frames_in_both_directions_have_one_bit_per_parameter():
    f = federation()
    (outcome,) = f.loop.rounds([1])
    bits = math.ceil(f.layout.numel / 8)
    assert all(bits < size <= bits + 24 for size in outcome.traffic.uplink.values())
    assert bits < len(outcome.broadcast.frame) <= bits + 24


def test_a_client_whose_frame_is_rejected_has_no_vote():
    f = federation()
    f.faults[(2, 1)] = lambda a, r: replace(r, frame=r.frame[:-1])
    (outcome,) = f.loop.rounds([1])
    assert [r.client for r in outcome.rejections] == [2] and len(outcome.accepted) == 4
    assert 2 not in outcome.suspicion


def test_votes_with_error_feedback_ignore_the_scales():
    f = federation(uplink="efsign", memory="residual")
    for outcome in f.loop.rounds(range(1, 4)):
        step = f.strategy.downlink.decode(outcome.broadcast.frame, numel=f.layout.numel)
        assert torch.equal(step.sign(), signs(outcome).sign().sum(0).sign())


def test_an_update_of_zeros_votes_with_random_signs():
    f = federation(uplink="efsign")
    f.members[0].sgd = replace(f.members[0].sgd, lr=1e-44)  # too small to change a weight
    (outcome,) = f.loop.rounds([1])
    step = f.strategy.downlink.decode(outcome.broadcast.frame, numel=f.layout.numel)
    assert len(outcome.accepted) == 5 and 0 < (step > 0).sum() < f.layout.numel


@for_each("changes, fix", [
    ({"uplink": "stc"}, "leave --uplink out"),
    ({"weights": "examples"}, "leave --weights out"),
    ({"lr": 1e300}, "--strategy vote changes every weight by --lr 1e[+]300 times --server-lr 1"),
    ({"lr": 1e30, "server_lr": 1e30}, "exceeds the range of float32"),
    ({"downlink": "stc"}, "give --downlink-memory residual"),
    ({"downlink": "topk:density=1%"}, "leave --downlink out"),
])  # fmt: skip
def test_options_that_do_not_suit_a_vote_are_refused(changes, fix):
    with pytest.raises(UserError, match=fix):
        Vote(replace(RULES, **changes), Layout.flat(8))


def test_a_lossy_downlink_is_accepted_with_a_memory():
    rules = replace(RULES, downlink="stc", downlink_memory="residual")
    assert Vote(rules, Layout.flat(8)).downlink.name == "stc"


def test_a_step_out_of_the_range_of_float32_is_not_taken():
    """Two such steps stay in range, but not three: the model keeps the finite weights of round 2."""
    f = federation(lr=1.6e38)
    outcomes = list(f.loop.rounds([1, 2, 3]))
    assert outcomes[0].broadcast is not None and outcomes[-1].broadcast is None
    assert outcomes[-1].rejections and torch.isfinite(f.loop.broadcasts.weights).all()


def test_a_momentum_of_1_is_refused():
    with pytest.raises(UserError, match="such as 0.9"):
        strategy("vote:momentum=1", RULES, Layout.flat(8))


def test_explicit_options_are_not_replaced_by_defaults_of_the_strategy():
    def memory(**given: str) -> str:
        return resolved(RunConfig(strategy="vote", **given)).memory

    assert memory() == memory(memory="none") == "none"
    assert memory(memory="residual") == "residual"
    given = replace(RunConfig(strategy="vote"), memory="residual", uplink="efsign")
    assert (resolved(given).memory, resolved(given).uplink, resolved(given).downlink) == (
        "residual",
        "efsign",
        "efsign",
    )


def test_a_round_without_votes_does_not_change_the_suspicion():
    f = federation()
    first, second = f.loop.rounds((1, 2))
    assert first.suspicion != second.suspicion
    f.faults = {(client, 3): lose for client in range(5)}
    (third,) = f.loop.rounds((3,))
    assert not third.accepted and third.suspicion == second.suspicion


def lose(a, r):
    return replace(r, kind="failed", frame=b"", stage="link", reason="lost")
