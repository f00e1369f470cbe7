"""Asynchronous runs: virtual time depends only on the seed, with and without an interruption."""

import sqlite3
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

from fedcomp.errors import CheckpointError
from fedcomp.server.checkpoint import Checkpoint
from fedcomp.sim import simulate

RUN = replace(TINY, strategy="asynchronous:wait=0.5,staleness=3", rounds=8)


@pytest.mark.parametrize(
    ("memory", "every", "stop"),
    [("residual", 1, (1, 1)), ("residual", 4, (3, None)), ("ef21", 1, (5, 2))],
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path, memory, every, stop):
    config = replace(RUN, memory=memory, checkpoint_every=every)
    assert_the_same_when_stopped(tmp_path, config, StopsAt(*stop), StopsAt(7))


def test_stored_answers_keep_the_learning_rate_of_their_round(tmp_path):
    config = replace(RUN, memory="diana", uplink="qsgd:levels=4", lr_warmup=10, checkpoint_every=1)
    assert_the_same_when_stopped(tmp_path, config, StopsAt(3, None), StopsAt(6))


def test_a_client_that_fails_while_a_run_is_stopped_is_rejected_after_the_resume(tmp_path):
    config = replace(
        RUN,
        rounds=12,
        task=TINY.task.replace(":task", ":one_is_nan"),
        partition="iid",
        local_epochs=1,
    )
    simulate(replace(config, out=out(tmp_path, "whole")))
    lines = rounds_of(out(tmp_path, "whole"))
    (first, *_) = [
        line["round"] for line in lines if any(r["stage"] == "encode" for r in line["rejections"])
    ]
    simulate(replace(config, rounds=first - 1, out=out(tmp_path, "parts")))
    simulate(replace(config, out=out(tmp_path, "parts"), resume=True))
    # Compare only the rounds after the interruption: the last round before it is evaluated, unlike in the run without interruption.
    assert rounds_of(out(tmp_path, "parts"))[first - 1 :] == lines[first - 1 :]
    assert model_bytes(out(tmp_path, "whole")) == model_bytes(out(tmp_path, "parts"))


def test_equal_seeds_give_equal_runs_and_other_seeds_other_runs(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        simulate(replace(RUN, seed=seed, out=out(tmp_path, name)))
    assert (
        model_bytes(out(tmp_path, "a"))
        == model_bytes(out(tmp_path, "b"))
        != model_bytes(out(tmp_path, "c"))
    )
    assert rounds_of(out(tmp_path, "a")) == rounds_of(out(tmp_path, "b"))


def test_checkpoints_write_only_new_and_delivered_answers(tmp_path, monkeypatch):
    written: list[set[str]] = []
    save = Checkpoint.save

    def listening(self, vectors, values, broadcasts=(), oldest=0):
        written.append({name for name in values if name.startswith("loop/at-work/")})
        return save(self, vectors, values, broadcasts, oldest)

    monkeypatch.setattr(Checkpoint, "save", listening)
    config = replace(RUN, clients=40, strategy="asynchronous:wait=0", checkpoint_every=1)
    simulate(replace(config, out=out(tmp_path, "run")))
    assert len(written[1]) == 20 and all(1 <= len(names) <= 3 for names in written[2:])


@pytest.mark.slow
def test_the_tiny_task_is_learned_with_low_precision_in_both_directions(tmp_path):
    config = replace(
        RUN,
        strategy="asynchronous",
        rounds=20,
        uplink="qsgd:levels=4@layer",
        memory="none",
        downlink="qsgd:levels=4,damped=true@layer",
        eval_every=20,
    )
    watched = Records()
    summary = simulate(replace(config, out=out(tmp_path, "run")), watched)
    assert summary.accuracy > 0.88
    assert summary.dense_uplink_bytes > 3 * summary.uplink_bytes and {
        r.cohort for r in watched.records
    } == {1}


@pytest.mark.parametrize("data", [b"[1", b"[0.0, [99]]", b"{}"])
def test_a_checkpoint_with_damaged_training_clients_raises_an_error(tmp_path, data):
    config = replace(RUN, rounds=2, out=out(tmp_path, "run"))
    simulate(config)
    with sqlite3.connect(tmp_path / "run" / "checkpoint" / "state.sqlite") as state:
        state.execute("UPDATE entry SET data = ? WHERE name = 'loop/clock'", (data,))
    state.close()
    with pytest.raises(CheckpointError, match="damaged"):
        simulate(replace(config, rounds=3, resume=True))
