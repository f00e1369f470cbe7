"""Elections give the same model with and without Byzantine clients, and report rounds in which they cannot guarantee this."""

from dataclasses import replace

import pytest
from small_runs import (
    TINY,
    Records,
    StopsAt,
    assert_the_same_when_stopped,
    model_bytes,
    out,
    rounds_of,
)

from fedcomp import RunConfig, UserError
from fedcomp.run_display import suspects
from fedcomp.server.server_run import NOTHING_ACCEPTED
from fedcomp.sim import simulate

VOTING = replace(
    TINY,
    uplink="sign",
    downlink="efsign",
    memory="none",
    lr=0.02,
    participation=1.0,
    clients=9,
    rounds=3,
    local_steps=1,
    batch_size=1,
)  # training on one example makes the votes of partitions differ
ATTACKS = [
    "inverted:{b}",
    "random-sign:{b}",
    "constant:{b}",
    "gaussian:{b}",
    "alie:{b},z=1.5",
    "mimic:{b}",
    "label-flip:{b}",
    "low-margin:{b}",
    "code-aware:{b}",
    "ipm:{b}",
    "rescaled:{b}",
    "infinity:{b}",
    "malformed:{b}",
]


def model(tmp_path, name: str, config: RunConfig, **changes) -> bytes:
    simulate(replace(config, out=out(tmp_path, name), **changes))
    return model_bytes(out(tmp_path, name))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "b"), [(5, 2), (9, 3)])
def test_byzantine_clients_do_not_change_the_model(tmp_path, n, b):
    config = replace(VOTING, clients=n, rounds=2, strategy=f"election:byzantine={b}")
    honest = model(tmp_path, "honest", config)
    for attack in (
        ATTACKS if (n, b) == (5, 2) else ("inverted:{b}", "code-aware:{b}", "malformed:{b}")
    ):
        assert (
            model(tmp_path, attack.partition(":")[0], config, attack=attack.format(b=b)) == honest
        ), attack


@pytest.mark.slow
def test_byzantine_clients_do_not_change_a_model_that_learns_digits(tmp_path):
    config = replace(
        VOTING,
        task="digits",
        clients=5,
        strategy="election:byzantine=2",
        partition="iid",
        rounds=3,
        local_steps=5,
        batch_size=20,
        lr=0.01,
    )
    honest = simulate(replace(config, out=out(tmp_path, "honest")))
    assert honest.accuracy > 0.7
    for attack in ("inverted:2", "low-margin:2", "alie:2,z=1", "label-flip:1+malformed:1"):
        assert model(tmp_path, attack[:5], config, attack=attack) == model_bytes(
            out(tmp_path, "honest")
        )
    byzantine = replace(config, attack="inverted:2", out=out(tmp_path, "plain"), strategy="vote")
    assert simulate(byzantine).accuracy < honest.accuracy


def test_the_same_byzantine_clients_change_an_ordinary_vote(tmp_path):
    """Without an election code, the same Byzantine clients and partitions decide the vote."""
    for strategy in (
        "election:code=uncoded,byzantine=2",
        "election:form=ballots,byzantine=2",
        "vote",
    ):
        config = replace(VOTING, strategy=strategy)
        assert model(tmp_path, f"{strategy} honest", config) != model(
            tmp_path, strategy, config, attack="inverted:2"
        )


def test_without_byzantine_clients_ballot_elections_equal_the_ordinary_vote(tmp_path):
    """An election whose ballots are forwarded gives the same model as the strategy `vote`."""
    plain = model(tmp_path, "vote", VOTING, strategy="vote")
    assert model(tmp_path, "passed", VOTING, strategy="election:byzantine=2,form=ballots") == plain
    assert (
        model(
            tmp_path, "uncoded", VOTING, strategy="election:code=uncoded,byzantine=0,form=ballots"
        )
        == plain
    )


@pytest.mark.parametrize("seats", [3, 5])
def test_clients_share_rows_of_the_code_if_the_cohort_has_more_clients_than_rows(tmp_path, seats):
    config = replace(VOTING, clients=11, strategy=f"election:byzantine=1,seats={seats},f=2")
    honest = model(tmp_path, "honest", config)
    for attack in ("inverted:2", "code-aware:2", "malformed:1+constant:1"):
        assert model(tmp_path, attack, config, attack=attack) == honest


def test_tolerated_absent_voters_do_not_change_the_model(tmp_path):
    config = replace(VOTING, strategy="election:byzantine=2,f=1")
    honest = model(tmp_path, "honest", config)
    assert model(tmp_path, "borne", config, attack="inverted:1+abstention:2") == honest


def test_rounds_with_too_many_absent_voters_fail_with_one_warning(tmp_path):
    config = replace(
        VOTING, strategy="election:byzantine=2,f=1", attack="abstention:3", out=out(tmp_path, "run")
    )
    summary = simulate(config)
    warned, nothing = summary.warnings
    assert (
        nothing == NOTHING_ACCEPTED
        and "round 1 failed" in warned
        and "3 are absent" in warned
        and "'byzantine'" in warned
    )
    for line in rounds_of(config.out):
        assert line["accepted"] == 0 and line["rejected"] == 9
        assert {r["stage"] for r in line["rejections"]} == {"reply", "aggregate"}
    assert summary.client_updates == 0 and summary.downlink_bytes < 3 * 9 * 100, (
        "clients downloaded only rows"
    )


def test_only_rounds_with_too_many_absent_voters_fail(tmp_path):
    config = replace(
        VOTING,
        rounds=8,
        strategy="election:byzantine=1,f=0",
        attack="abstention:6,share=0.4",
        out=out(tmp_path, "run"),
    )
    simulate(config)
    accepted = [line["accepted"] for line in rounds_of(config.out)]
    assert (
        0 in accepted and any(n >= 7 for n in accepted) and all(n == 0 or n >= 7 for n in accepted)
    )


def test_an_invalid_frame_counts_as_one_byzantine_client(tmp_path):
    """Four of nine clients are Byzantine, three of them send invalid frames. If these three also counted as absent, rounds would fail."""
    config = replace(
        VOTING,
        strategy="election:byzantine=4",
        attack="malformed:3+inverted:1",
        out=out(tmp_path, "run"),
    )
    assert simulate(config).client_updates == 3 * 6
    assert model_bytes(config.out) == model(tmp_path, "honest", replace(config, attack=None))


def test_a_round_with_more_proven_byzantine_clients_than_f_is_reported(tmp_path):
    config = replace(
        VOTING, strategy="election:byzantine=3,f=1", attack="malformed:2", out=out(tmp_path, "run")
    )
    (warned,) = simulate(config).warnings
    assert "2 clients were proven Byzantine" in warned and "give f=2" in warned


def test_the_header_of_a_run_has_the_notice(tmp_path):
    watched = Records()
    strategy = "election:byzantine=2,form=ballots"
    simulate(replace(VOTING, rounds=1, strategy=strategy, out=out(tmp_path, "run")), watched)
    assert "the ballot of a Byzantine client counts like any other" in watched.header.notice


@pytest.mark.parametrize("form", ["data", "ballots"])
def test_low_margin_attacks_change_the_model_only_with_form_ballots(tmp_path, form):
    config = replace(VOTING, clients=5, strategy=f"election:byzantine=2,form={form}")
    same = model(tmp_path, "honest", config) == model(
        tmp_path, "lied", config, attack="low-margin:2"
    )
    assert same == (form == "data")


def test_byzantine_clients_are_suspected(tmp_path):
    config = replace(
        VOTING,
        rounds=20,
        batch_size=20,
        partition="iid",
        strategy="election:byzantine=2",
        attack="constant:clients=2/5",
    )
    simulate(replace(config, out=out(tmp_path, "run")))
    last = rounds_of(out(tmp_path, "run"))[-1]["suspicion"]
    assert set(sorted(last, key=last.get)[-2:]) == {"2", "5"}


@pytest.mark.parametrize("strategy", ["election:byzantine=1", "election:byzantine=3,form=ballots"])
def test_honest_voters_on_few_partitions_are_not_suspected(tmp_path, strategy):
    seen = Records()
    simulate(
        replace(VOTING, clients=15, strategy=strategy, rounds=6, out=out(tmp_path, "run")), seen
    )
    judged = [record.suspicion for record in seen.records]
    assert [suspects(record) for record in seen.records] == [""] * 6
    assert (
        7 < len(judged[0]) < 15 and len(judged[-1]) == 15
    )  # clients are assigned to other rows of the code in each round


@pytest.mark.parametrize(
    ("strategy", "attack", "at"),
    [
        ("election:byzantine=2,momentum=0.9", "inverted:2", (2, 4)),
        ("election:byzantine=1,form=ballots", "random-sign:1", (2, 4)),
        ("election:code=bernoulli,redundancy=1.5,byzantine=4", None, (3, None)),
        ("election:byzantine=2,f=0", "abstention:6,share=0.4", (2, None)),
    ],
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path, strategy, attack, at):
    config = replace(VOTING, rounds=5, strategy=strategy, attack=attack)
    assert_the_same_when_stopped(tmp_path, config, StopsAt(*at))


def test_nan_in_an_example_randomizes_only_the_ballot_of_its_partition(tmp_path):
    task = VOTING.task.replace(":task", ":one_is_nan")
    config = replace(
        VOTING,
        task=task,
        rounds=6,
        partition="iid",
        batch_size=100,
        strategy="election:byzantine=2",
        lr=0.05,
    )
    summary = simulate(replace(config, out=out(tmp_path, "run")))
    assert summary.client_updates == 6 * 9 and summary.accuracy > 0.8 and not summary.rejections


def test_voters_that_cannot_train_a_partition_are_absent(tmp_path):
    """Training on one of nine partitions fails, so the clients of this partition cannot vote. The run continues with a warning."""
    task = VOTING.task.replace(":task", ":one_raises")
    config = replace(
        VOTING,
        task=task,
        partition="iid",
        batch_size=100,
        engine="serial",
        strategy="election:byzantine=2,f=0",
    )
    summary = simulate(replace(config, out=out(tmp_path, "run")))
    assert summary.client_updates == 0 and "failed" in summary.warnings[0]
    assert any("a sensor reports nonsense" in r.reason for r in summary.rejections)


def test_keep_momentum_is_refused(tmp_path):
    with pytest.raises(UserError, match="leave --keep-momentum out"):
        simulate(
            replace(
                VOTING,
                strategy="election",
                momentum=0.9,
                keep_momentum=True,
                out=out(tmp_path, "run"),
            )
        )


def test_training_that_fails_on_all_partitions_does_not_move_the_model(tmp_path):
    """Without any update, votes would be random signs, which would change the model at random and without a warning."""
    config = replace(VOTING, rounds=2, strategy="election:byzantine=2", lr=1e30, local_steps=4)
    summary = simulate(replace(config, out=out(tmp_path, "run")))
    assert summary.client_updates == 0
    assert any(
        "lower the learning rate (--lr)" in r.reason and "of partition" in r.reason
        for r in summary.rejections
    )
