"""Runs with robust strategies learn, are the same after interruptions, and are refused if the cohort is always too small."""

from dataclasses import replace

import pytest
from small_runs import TINY, Records, StopsAt, assert_the_same_when_stopped, out, rounds_of

from fedcomp import RunConfig, UserError
from fedcomp.sim import simulate

RUN = replace(TINY, clients=10, rounds=5)
FRONTED = [
    "trimmed-mean:1,mix=true,buckets=2",
    "multi-krum:0,keep=2,buckets=2",
    "centered-clipping:1,buckets=2,iterations=2",
]


@pytest.mark.parametrize("strategy", ["multi-krum", "centered-clipping", FRONTED[0]])
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path, strategy):
    config = replace(RUN, strategy=strategy)
    assert_the_same_when_stopped(tmp_path, config, StopsAt(3, 2), StopsAt(4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "uplink", "least"),
    [
        ("median", "eden:bits=1,damped=true", 0.85),
        ("trimmed-mean:2,mix=true", "stc:density=10%", 0.85),
        ("krum", "stc:density=10%", 0.8),
        ("multi-krum:2", "stc:density=10%", 0.85),
        ("geometric-median:2", "stc:density=10%", 0.85),
        ("centered-clipping:2", "stc:density=10%", 0.85),
    ],
)
def test_digits_are_learned(tmp_path, strategy, uplink, least):
    config = RunConfig(
        clients=10,
        participation=1.0,
        rounds=6,
        strategy=strategy,
        uplink=uplink,
        eval_every=6,
        lr=0.2,
        downlink="stc:density=10%",
        checkpoint_every=6,
        out=out(tmp_path, "run"),
    )
    summary = simulate(config)
    assert summary.accuracy > least and summary.client_updates == 60
    assert summary.dense_uplink_bytes > 5 * summary.uplink_bytes


@pytest.mark.parametrize(
    ("strategy", "needs"),
    [
        ("median:3", 7),
        ("trimmed-mean:3", 7),
        ("krum:2", 7),
        ("multi-krum:2", 7),
        ("geometric-median:3", 7),
        ("centered-clipping:3", 7),
        ("median:1,buckets=3", 7),
        ("median:3,mix=true", 7),
    ],
)
def test_a_cohort_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path, strategy, needs
):
    with pytest.raises(UserError, match=f"needs {needs} clients .* a round has 5; give") as error:
        simulate(replace(RUN, strategy=strategy, out=out(tmp_path, "run")))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_failed_rounds_are_in_the_metrics_with_the_reason(tmp_path):
    config = replace(
        RUN,
        task=TINY.task.replace(":task", ":one_is_nan"),
        partition="iid",
        local_epochs=1,
        participation=1.0,
        clients=5,
        strategy="krum",
        uplink="identity",
        memory="none",
    )
    watched = Records()
    summary = simulate(replace(config, out=out(tmp_path, "run")), watched)
    assert summary.client_updates == 0  # one of five clients has no update, and four are too few
    for record in rounds_of(out(tmp_path, "run")):
        assert sorted(r["stage"] for r in record["rejections"]) == ["aggregate"] * 4 + ["encode"]
        assert record["rejections"][-1]["reason"].endswith(
            "needs 5 clients in a round for f=1; 4 were accepted"
        )


@pytest.mark.parametrize(
    "strategy",
    [
        "median:3",
        "trimmed-mean:3",
        "krum:3",
        "multi-krum:3",
        "geometric-median:3",
        "centered-clipping:3",
        "median:3,mix=true",
    ],
)
@pytest.mark.parametrize("attack", ["infinity:1+malformed:2"])
def test_rejected_byzantine_clients_count_among_the_f(tmp_path, strategy, attack):
    """Three of nine clients are rejected. The other six are too few to tolerate three more Byzantine clients, but need not do so."""
    summary = simulate(
        replace(
            RUN,
            rounds=2,
            clients=9,
            participation=1.0,
            strategy=strategy,
            attack=attack,
            out=out(tmp_path, "run"),
        )
    )
    assert summary.client_updates == 6 * 2
    assert all(record["rejected"] == 3 for record in rounds_of(out(tmp_path, "run")))
