"""Runs whose memories have a counterpart on the server are the same after interruptions, and write only changes to checkpoints."""

from dataclasses import replace

import pytest
from small_runs import TINY, StopsAt, assert_refused, assert_the_same_when_stopped, out, rounds_of

from fedcomp.server.checkpoint import Checkpoint
from fedcomp.sim import simulate

PAIRED = [
    ("ef21", "stc:density=10%"),
    ("diana:alpha=1/3", "natural@layer"),
    ("laq:weight=8", "fp16"),
    ("laq:errors=0,patience=2", "topk:density=1/2"),
]


@pytest.mark.parametrize(
    ("memory", "uplink", "stop", "every"),
    [
        (*PAIRED[0], (1, 1), 1),
        (*PAIRED[1], (4, None), 4),
        (*PAIRED[2], (5, 4), 1),
        (*PAIRED[3], (4, 2), 4),
    ],
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(
    tmp_path, memory, uplink, stop, every
):
    config = replace(
        TINY, memory=memory, uplink=uplink, rounds=7, checkpoint_every=every, lr_warmup=6
    )
    assert_the_same_when_stopped(tmp_path, config, StopsAt(*stop), StopsAt(6))


@pytest.mark.parametrize(
    ("memory", "uplink", "engine"),
    [(*pair, ("serial", "batched")[i % 2]) for i, pair in enumerate(PAIRED)],
)
def test_checkpoints_write_only_changed_shifts_of_the_counterpart(
    tmp_path, memory, uplink, engine, monkeypatch
):
    written: list[set[str]] = []
    save = Checkpoint.save

    def listening(self, vectors, values, broadcasts=(), oldest=0):
        written.append(
            {
                name.partition("/")[2]
                for name in [*vectors, *values]
                if name.startswith("counterpart/")
            }
        )
        return save(self, vectors, values, broadcasts, oldest)

    monkeypatch.setattr(Checkpoint, "save", listening)
    config = replace(TINY, memory=memory, uplink=uplink, engine=engine, checkpoint_every=1)
    simulate(replace(config, rounds=7, out=out(tmp_path, "run")))
    lines, members = rounds_of(out(tmp_path, "run")), set()
    assert len(written) == 8
    for line, names in zip(lines, written[1:], strict=True):
        rows = {name for name in names if name.isdigit()}
        assert len(rows) == line["accepted"] - line["skipped"]
        assert ("clients" in names) == bool(rows - members)
        members |= rows


def test_skipped_updates_are_in_the_metrics(tmp_path):
    simulate(
        replace(
            TINY,
            memory="laq:weight=1e6",
            uplink="identity",
            participation=1.0,
            rounds=8,
            out=out(tmp_path, "run"),
        )
    )
    lines = rounds_of(out(tmp_path, "run"))
    assert lines[0]["skipped"] == 0 and lines[-1]["skipped"] == lines[-1]["accepted"] == 8
    for line in lines:
        assert line["uplink_bytes"] == (8 - line["skipped"]) * (4 * 42 + 10)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"memory": "ef21", "uplink": "sign"}, "use --uplink stc"),
        ({"memory": "diana"}, "use --uplink qsgd"),
        ({"memory": "laq"}, "laq:errors=0"),
        ({"memory": "diana:alpha=2", "uplink": "natural"}, "at most 0.888889"),
        ({"downlink_memory": "ef21"}, "use --downlink-memory residual"),
    ],
)
def test_errors_in_options_are_raised_before_anything_is_written(tmp_path, change, says):
    assert_refused(tmp_path, replace(TINY, **change), says)
