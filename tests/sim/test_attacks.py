"""Attacks: updates compared with the papers and with byzfl, frames of attackers, and the choice of the Byzantine clients."""

import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from byzfl_parts import byzfl_part
from cases import for_each
from every_codec import ONE_EACH, layout_of
from tiny_task import two_clouds

from fedcomp import FrameError, UserError, codec, seeds
from fedcomp.codecs import Context
from fedcomp.errors import ConfigError, SpecError
from fedcomp.messages import TRAIN, UP_TO_DATE, UPDATE, Assignment, Report, ticket
from fedcomp.sim.attacks import (
    ByzantineClients,
    ReplyContext,
    UpdateContext,
    attacks,
    available_attacks,
)
from fedcomp.sim.attacks.alie import z_max
from fedcomp.sim.attacks.code_aware import rank_by_row_weight
from fedcomp.sim.attacks.mimic import extreme_row
from fedcomp.sim.attacks.replies import doubled_offsets, with_checksum
from fedcomp.strategies.base import ClientAlgorithm
from fedcomp.tasks.data import Data

N = 500


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HONEST, OWN = normal(7, N) + 0.3, normal(2, N, seed=1)
CONTEXT = UpdateContext(9, 2, (0, 2, 3, 5, 6, 7, 8), HONEST)


def attacked(
    text: str, x: torch.Tensor = OWN, context: UpdateContext = CONTEXT, seed: int = 0
) -> torch.Tensor:
    (attack,) = attacks(text)
    return attack.updates(
        x.clone(), context, [seeds.generator(seed, "attack", 1, client) for client in range(len(x))]
    )


def assignments_of(*clients: int, round: int = 1, phase: str = TRAIN) -> list[Assignment]:
    return [Assignment(round, phase, client, UP_TO_DATE, "", "", "", [], "") for client in clients]


# Updates.


def test_blind_attacks_change_their_own_update():
    assert torch.equal(attacked("inverted:2"), -OWN)
    assert torch.equal(attacked("inverted:2,scale=2.5"), -2.5 * OWN)
    assert torch.equal(attacked("constant:2,value=-3"), torch.full_like(OWN, -3))
    signs = attacked("random-sign:2")
    assert torch.equal(signs.abs(), OWN.abs()) and 0.4 < (signs == OWN).double().mean() < 0.6
    assert not torch.equal(signs[0] / OWN[0], signs[1] / OWN[1])
    factors = attacked("rescaled:2,decades=2") / OWN
    assert (
        (factors.std(1) < 1e-4 * factors.mean(1)).all()
        and (1e-2 <= factors).all()
        and (factors <= 1e2).all()
    )
    noise = attacked("gaussian:2,sigma=5", normal(2, 100_000))
    assert (
        abs(noise.mean()) < 0.05
        and abs(noise.std() - 5) < 0.05
        and not torch.equal(noise[0], noise[1])
    )


@for_each("text", ["random-sign:2", "rescaled:2", "gaussian:2"])
def test_draws_depend_on_seed_round_and_client_only(text):
    assert torch.equal(attacked(text), attacked(text)) and not torch.equal(
        attacked(text), attacked(text, seed=1)
    )
    assert torch.equal(attacked(text)[:1], attacked(text, OWN[:1]))


@for_each(
    "text, name, options",
    [
        ("alie:2,z=1.5,shift=up", "ALittleIsEnough", {"tau": 1.5}),
        ("alie:2,z=-0.7", "ALittleIsEnough", {"tau": 0.7}),
        ("ipm:2", "InnerProductManipulation", {"tau": 2.0}),
        ("ipm:2,epsilon=0.1", "InnerProductManipulation", {"tau": 0.1}),
        ("ipm:2,epsilon=1", "SignFlipping", {}),
        ("mimic:2,of=0", "Mimic", {"epsilon": 0}),
        ("mimic:2,of=5", "Mimic", {"epsilon": 3}),
    ],
)
def test_colluding_attacks_match_byzfl(text, name, options):
    expected = getattr(byzfl_part("attacks"), name)(**options)(HONEST.double().numpy())
    for row in attacked(text):
        np.testing.assert_allclose(row.numpy(), expected, rtol=2e-5, atol=1e-6)


def test_alie_computes_z_from_n_and_f():
    assert z_max(50, 24) == pytest.approx(statistics.NormalDist().inv_cdf(24 / 26))  # s = 2
    assert z_max(50, 24) == pytest.approx(1.4261, abs=1e-4)
    assert z_max(9, 1) == 0  # s = 4 of 8 honest clients, so z = 0
    assert z_max(4, 4) == z_max(3, 2) > 4  # the attackers alone are a majority
    mean, spread = HONEST.mean(0), HONEST.std(0)
    context = UpdateContext(9, 3, CONTEXT.honest_clients, HONEST)
    assert z_max(9, 3) == pytest.approx(statistics.NormalDist().inv_cdf(4 / 6))
    torch.testing.assert_close(attacked("alie:3", context=context)[0], mean - z_max(9, 3) * spread)


def test_alie_against_reverses_only_the_signs_of_small_means():
    mean, spread = HONEST.mean(0), HONEST.std(0)
    row = attacked("alie:2,z=1.5,shift=against")[0]
    small = mean.abs() < 1.5 * spread
    assert 0 < small.sum() < N
    assert torch.equal(row.sign() == -mean.sign(), small)


def test_mimic_copies_the_client_with_the_largest_projection():
    honest = 0.1 * normal(7, N)
    honest[4] += 3 * normal(N, seed=3)
    assert extreme_row(honest) == 4
    deviation = honest - honest.mean(0)
    direction = torch.linalg.svd(deviation.double(), full_matrices=False).Vh[0]
    assert int((honest.double() @ direction).abs().argmax()) == 4
    assert torch.equal(
        attacked("mimic:2", context=UpdateContext(9, 2, CONTEXT.honest_clients, honest)),
        honest[4].expand(2, N),
    )
    assert torch.equal(
        attacked("mimic:2,of=1", context=UpdateContext(9, 2, CONTEXT.honest_clients, honest)),
        honest[4].expand(2, N),
    )  # client 1 is not in the cohort


def test_mimic_chooses_the_client_of_the_formula_on_random_updates():
    for seed in range(10):
        honest = normal(6, 40, seed=seed) + torch.linspace(-1, 1, 6)[:, None] * normal(
            40, seed=100 + seed
        )
        direction = torch.linalg.svd((honest - honest.mean(0)).double(), full_matrices=False).Vh[0]
        assert extreme_row(honest) == int((honest.double() @ direction).abs().argmax())


def test_mimic_handles_updates_of_any_size():
    honest = normal(6, 40)
    honest[3] *= 1e38
    assert (
        extreme_row(honest) == 3
        and extreme_row(torch.zeros(4, 10)) == 0
        and extreme_row(honest[:1]) == 0
    )


def test_low_margin_votes_only_against_narrow_majorities():
    tally = HONEST.sign().sum(0)
    for text, margin in (
        ("low-margin:2", 2),
        ("low-margin:2,margin=1", 1),
        ("low-margin:2,margin=3", 3),
    ):
        rows, thin = attacked(text), tally.abs() <= margin
        assert 0 < thin.sum() < N
        for row, own in zip(rows, OWN, strict=True):
            assert torch.equal(row[~thin], own[~thin])
            assert torch.equal(row[thin].sign(), -tally[thin].sign()) and torch.equal(
                row[thin].abs(), own[thin].abs()
            )
    rows = attacked("low-margin:2", torch.zeros(2, N) + OWN.where(OWN > 0, torch.zeros(())))
    assert (
        rows[:, tally.abs() <= 2] != 0
    ).all()  # attackers also vote at coordinates where their update is zero


def test_label_flip_trains_on_the_other_labels():
    (attack,) = attacks("label-flip:1")
    data = Data(torch.zeros(6, 1), torch.tensor([0, 1, 2, 9, 5, -100]))
    assert attack.data(data).targets.tolist() == [9, 8, 7, 0, 4, -100]
    assert attack.data(data).inputs is data.inputs and data.targets.tolist() == [
        0,
        1,
        2,
        9,
        5,
        -100,
    ]
    with pytest.raises(ConfigError, match="not whole numbers"):
        attack.data(Data(torch.zeros(2, 1), torch.zeros(2)))


def test_without_honest_clients_attacks_use_the_attackers_own_updates():
    byzantine = ByzantineClients(attacks("ipm:2,epsilon=1"), 2)
    assignments = assignments_of(0, 1)
    byzantine.set_strategy(
        SimpleNamespace(allocation=None, client_algorithm=ClientAlgorithm()), two_clouds(4, 0)
    )
    byzantine.on_assignments(assignments)
    ((attack, own),) = byzantine.groups(assignments)
    torch.testing.assert_close(
        byzantine.on_updates(attack, own, OWN.clone()), -OWN.mean(0).expand(2, N)
    )


def test_attacks_receive_honest_updates_before_encoding():
    byzantine = ByzantineClients(attacks("ipm:clients=3,epsilon=1"), 4)
    byzantine.set_strategy(
        SimpleNamespace(allocation=None, client_algorithm=ClientAlgorithm()), two_clouds(4, 0)
    )
    assignments, x = assignments_of(0, 1, 2, 3), normal(3, N)
    expected = -x.mean(0)[None]
    byzantine.on_assignments(assignments)
    (_, honest), (attack, own) = byzantine.groups(assignments)
    byzantine.on_updates(
        None, honest, x
    ).zero_()  # a session may overwrite the updates that on_updates returned
    torch.testing.assert_close(byzantine.on_updates(attack, own, OWN[:1].clone()), expected)


def test_attacks_do_not_receive_updates_that_are_not_finite():
    byzantine = ByzantineClients(attacks("ipm:clients=3,epsilon=1"), 4)
    byzantine.set_strategy(
        SimpleNamespace(allocation=None, client_algorithm=ClientAlgorithm()), two_clouds(4, 0)
    )
    assignments, x = assignments_of(0, 1, 2, 3), normal(3, N)
    x[1, 7] = float("nan")
    byzantine.on_assignments(assignments)
    (honest_group, honest), (attack, own) = byzantine.groups(assignments)
    assert (
        honest_group is None
        and [a.client for a in honest] == [0, 1, 2]
        and [a.client for a in own] == [3]
    )
    assert torch.equal(byzantine.on_updates(None, honest, x)[0], x[0])
    torch.testing.assert_close(
        byzantine.on_updates(attack, own, OWN[:1].clone()), -x[[0, 2]].mean(0)[None]
    )


# Frames.


def reply_context(spec: str, numel: int, seed: int = 0) -> ReplyContext:
    return ReplyContext(
        codec(spec), 5, Context(layout=layout_of(numel)), seeds.generator(seed, "attack", 1, 3)
    )


def sent(text: str, spec: str, numel: int, seed: int = 0) -> bytes:
    """Return the frame that a Byzantine client sends in place of an honest one."""
    (attack,) = attacks(text)
    honest = codec(spec).encode(normal(numel), seed=5, layout=layout_of(numel))
    report = Report(1, TRAIN, 3, UPDATE, "v", "f", honest, ticket(1, 3, honest), 10, 0.5, "", "")
    forged = attack.reply(report, reply_context(spec, numel, seed))
    assert forged.frame != honest and forged.ticket == ticket(1, 3, forged.frame)
    return forged.frame


@for_each("spec", ONE_EACH)
def test_no_forged_frame_decodes_to_a_non_finite_vector(spec):
    numel, c = 401, codec(spec)
    for value in ("nan", "inf", "largest"):
        frame = sent(f"infinity:1,value={value}", spec, numel)
        try:
            assert c.decode(frame, numel=numel, layout=layout_of(numel)).isfinite().all()
        except FrameError:
            assert value != "largest"


@for_each(
    "spec",
    [
        "identity",
        "topk",
        "stc",
        "sbc",
        "efsign",
        "onebit",
        "qsgd",
        "terngrad",
        "drive",
        "eden",
        "sketch",
        "stc@layer",
        "topk:density=10%+fp16",
        "fp16",
        "bf16",
    ],
)
@for_each("value", ["nan", "inf"])
def test_only_the_floats_of_a_forged_frame_are_invalid(spec, value):
    numel = 401
    with pytest.raises(FrameError) as error:
        codec(spec).decode(
            sent(f"infinity:1,value={value}", spec, numel), numel=numel, layout=layout_of(numel)
        )
    assert "checksum" not in str(error.value) and "too early" not in str(error.value)


def test_doubled_offsets_are_those_of_the_floats():
    x, c = normal(100), codec("identity")
    assert doubled_offsets(c.encode(x), c.encode(2 * x), 9) == list(range(10, 410, 4))
    x, c = normal(1000), codec("stc:density=1%")
    frame = c.encode(x)
    (offset,) = doubled_offsets(frame, c.encode(2 * x), 9)
    magnitude = c.decode(frame, numel=1000).abs().max()
    assert np.frombuffer(frame[offset : offset + 4], "<f4")[0] == magnitude
    assert with_checksum(frame, 1000) == frame


@for_each("how", ["garbage", "truncated", "size", "checksum"])
@for_each("spec", ["identity", "stc", "sign", "qsgd@layer", "sketch", "topk+fp16"])
def test_malformed_frames_are_refused(how, spec):
    for seed in range(20):
        with pytest.raises(FrameError):
            codec(spec).decode(
                sent(f"malformed:1,how={how}", spec, 401, seed), numel=401, layout=layout_of(401)
            )


def test_noise_with_a_valid_checksum_is_finite_or_rejected():
    for seed in range(50):
        try:
            assert (
                codec("qsgd")
                .decode(sent("malformed:1,how=body", "qsgd", 401, seed), numel=401)
                .isfinite()
                .all()
            )
        except FrameError as error:
            assert "checksum" not in str(error)


def test_frames_of_another_codec_are_replaced_by_constant_floats():
    (attack,) = attacks("infinity:1,value=inf")
    factors = codec("identity").encode(normal(12))
    forged = attack.reply(
        Report(1, "left", 3, UPDATE, "v", "f", factors, "t", 10, 0.5, "", ""),
        reply_context("powersgd", 401),
    )
    assert forged.frame[3] == codec("identity").id and len(forged.frame) == len(factors)
    with pytest.raises(FrameError, match="NaN or infinity"):
        codec("identity").decode(forged.frame, numel=12)


# The choice of the Byzantine clients.


def test_byzantine_clients_are_named_or_drawn_and_have_one_attack():
    byzantine = ByzantineClients(attacks("inverted:3+alie:clients=3/7-9+mimic:2"), 20, seed=4)
    names = {client: attack.name for client, attack in byzantine.fixed.items()}
    assert [client for client in sorted(names) if names[client] == "alie"] == [3, 7, 8, 9]
    assert (
        sorted(names.values()) == ["alie"] * 4 + ["inverted"] * 3 + ["mimic"] * 2
        and byzantine.size == 9
    )
    assert (
        byzantine.fixed
        == ByzantineClients(attacks("inverted:3+alie:clients=3/7-9+mimic:2"), 20, seed=4).fixed
    )
    assert (
        byzantine.fixed.keys()
        != ByzantineClients(
            attacks("inverted:3+alie:clients=3/7-9+mimic:2"), 20, seed=5
        ).fixed.keys()
    )
    assert "alie 3/7/8/9" in str(byzantine) and str(ByzantineClients()) == ""


def test_all_clients_may_be_byzantine():
    assert sorted(ByzantineClients(attacks("inverted:5"), 5).fixed) == [0, 1, 2, 3, 4]
    assert (
        str(ByzantineClients(attacks("inverted:12"), 12)) == "inverted 0/1/2/3/4/5/6/7 and 4 more"
    )


CODE = np.array(
    [[1, 0, 0, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1]]
)


def test_code_aware_clients_have_the_heaviest_rows_of_every_cohort():
    assert rank_by_row_weight([10, 11, 12, 13, 14], CODE) == [12, 14, 11, 13, 10]
    assert rank_by_row_weight(list(range(8)), CODE)[:3] == [
        2,
        4,
        7,
    ]  # with more clients than rows, the rows are assigned cyclically
    strategy = SimpleNamespace(allocation=CODE, client_algorithm=ClientAlgorithm())
    byzantine = ByzantineClients(attacks("code-aware:2,scale=3+constant:clients=24"), 30)
    byzantine.set_strategy(strategy, two_clouds(4, 0))
    for cohort, expected in (
        ((10, 11, 12, 13, 14), {12, 14}),
        ((20, 21, 22, 23, 24), {21, 22}),
        ((1, 2, 3), {2, 3}),
    ):
        assignments = assignments_of(*cohort, round=cohort[0])
        byzantine.on_assignments(assignments)
        attackers = {
            a.client: attack.name for a in assignments if (attack := byzantine.attack_of(a))
        }
        assert {client for client, name in attackers.items() if name == "code-aware"} == expected
        byzantine.on_assignments([])  # a later phase
        again = assignments_of(
            cohort[0], round=cohort[0]
        )  # a client that needs the dense model gets a second assignment
        byzantine.on_assignments(again)
        assert {a.client for a in assignments if byzantine.attack_of(a)} == attackers.keys()
    groups = byzantine.groups(assignments)
    torch.testing.assert_close(
        byzantine.on_updates(groups[-1][0], groups[-1][1], OWN.clone()), -3 * OWN
    )
    strategy.allocation = CODE[::-1]  # a new matrix in the next round
    byzantine.on_assignments(assignments_of(10, 11, 12, 13, 14, round=99))
    heaviest = [c for c in range(10, 15) if byzantine.attack_of(*assignments_of(c, round=99))]
    assert heaviest == [10, 12]


def test_code_aware_needs_an_allocation_matrix():
    with pytest.raises(ConfigError, match="allocation matrix"):
        ByzantineClients(attacks("code-aware:2"), 9).set_strategy(
            SimpleNamespace(allocation=None, client_algorithm=ClientAlgorithm()), two_clouds(4, 0)
        )


@for_each(
    "text, message",
    [
        ("inverse:2", "did you mean 'inverted'"),
        ("inverted", "write inverted:2"),
        ("inverted:0", "write inverted:2"),
        ("inverted:-1", "at least 1"),
        ("inverted:two", "a whole number"),
        ("inverted:2@layer", "leave @layer out"),
        ("inverted:2+inverted:2", "twice"),
        ("inverted:2,clients=3", "leave the count out"),
        ("inverted:clients=3/3", "twice"),
        ("inverted:clients=3/x", "give ids and ranges"),
        ("inverted:clients=9-3", "give ids and ranges"),
        ("inverted:clients=3/12", "--attack inverted names client 12, but the clients are 0 to 9"),
        ("inverted:clients=3+mimic:clients=3", "--attack names client 3 in two attacks"),
        ("inverted:6+alie:5", "11 Byzantine clients"),
        ("mimic:clients=3,of=3", "not an honest client"),
        ("mimic:3,of=10", "--attack mimic cannot copy client 10"),
        ("constant:1,value=1e39", "give -3.40282e+38 to 3.40282e+38"),
        ("gaussian:1,sigma=-1", "sigma is -1; give at least 0"),
        ("rescaled:1,decades=99", "0 to 30"),
        ("low-margin:1,margin=0", "margin is 0; give at least 1"),
        ("infinity:1,value=none", "known: inf"),
        ("equivocation:1,share=0", "share is 0; give 1e-09 to 1"),
        ("perjury:1", "unknown attack"),
    ],
)
def test_invalid_specs_raise_a_user_error(text, message):
    with pytest.raises(UserError) as error:
        ByzantineClients(attacks(text), 10)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_every_attack_takes_its_count_first():
    assert all(
        attacks(f"{name}:2")[0].count == 2 and type(attacks(f"{name}:2")[0]) is cls
        for name, cls in available_attacks().items()
    )
    with pytest.raises(SpecError, match="known: abstention, alie"):
        attacks("nonsense")
