"""Runs with relays have the same model as without relays, count the bytes to and from relays, and lose no rejected update."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import for_each
from federation import Federation
from safetensors.torch import load_file

from fedcomp import Layout, RunConfig, codec
from fedcomp.callbacks import Callback
from fedcomp.errors import ConfigError
from fedcomp.messages import FAILED, UPDATE, Assignment, Report
from fedcomp.run_display import LineDisplay
from fedcomp.sim import simulate
from fedcomp.sim.relays import Relays
from fedcomp.strategies import StrategyConfig
from fedcomp.transports.inprocess import InProcessTransport
from fedcomp.transports.relays import add_frames, inexact

TINY = f"{Path(__file__).parents[1] / 'tiny_task.py'}:task"
S2 = "topk:density=1/4+s2:union=4"
CONFIG = RunConfig(
    task=TINY,
    clients=12,
    participation=1.0,
    rounds=4,
    lr=0.1,
    batch_size=10,
    relays=3,
    uplink=S2,
    downlink="identity",
)


def run(
    tmp_path: Path, name: str, callback: Callback | None = None, **changes
) -> tuple[dict, list[dict]]:
    """Return the model and the rounds."""
    out = tmp_path / name
    simulate(replace(CONFIG, out=str(out), **changes), callback)
    return load_file(out / "model.safetensors"), [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
    ]


def close(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], atol=1e-6) for name in one
    )


@pytest.mark.parametrize(
    ("uplink", "relays"),
    [
        (S2, 1),
        ("identity@layer", 50),
        ("topk:density=1/4+s2:columns=40,values=int24", 3),
    ],
)
def test_the_model_equals_that_without_relays(tmp_path, uplink, relays):
    model, rounds = run(tmp_path, "relays", uplink=uplink, relays=relays)
    star, others = run(tmp_path, "star", uplink=uplink, relays=0)
    assert close(model, star) and [r["accepted"] for r in rounds] == [12] * 4
    assert [r["uplink_bytes"] for r in rounds] == pytest.approx(
        [r["uplink_bytes"] for r in others], rel=0.02
    )  # the models may differ by rounding
    assert all(r["relayed_bytes"] for r in rounds) and not any(r["relayed_bytes"] for r in others)


@pytest.mark.slow
def test_rounding_errors_are_sent_later_with_relays_too(tmp_path):
    uplink = "s2:columns=40,values=int16"
    assert close(
        *(
            run(tmp_path, f"{relays}", rounds=12, uplink=uplink, relays=relays)[0]
            for relays in (3, 0)
        )
    )


def test_the_bytes_of_both_links_are_counted(tmp_path):
    _, rounds = run(tmp_path, "run", uplink="identity")
    frame = 4 * 42 + 10
    assert [(r["uplink_bytes"], r["relayed_bytes"], r["skipped"]) for r in rounds] == [
        (12 * frame, 3 * frame, 0)
    ] * 4


def test_a_run_behind_relays_can_be_resumed(tmp_path):
    whole = run(tmp_path, "whole")
    run(tmp_path, "halves", rounds=2)
    halves = run(tmp_path, "halves", resume=True)
    assert close(whole[0], halves[0])
    assert [r["relayed_bytes"] for r in whole[1]] == [r["relayed_bytes"] for r in halves[1]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"uplink": "stc"},
            "but --uplink stc.* does not support this; use --uplink topk:density=1%.s2:union=[0-9]+, or identity",
        ),
        (
            {"uplink": "randomk"},
            "each client has its own seed; use --uplink topk:density=1%.s2:union=",
        ),
        (
            {"uplink": "topk", "strategy": "gtopk"},
            "--strategy gtopk needs each update; use --strategy average or fetchsgd",
        ),
        (
            {"uplink": "s2"},
            "depends on the update; use --uplink topk:density=1%.s2:union=[0-9]+, or s2:columns=N",
        ),
        ({"uplink": "s2@layer"}, "depends on the update"),
        ({"weights": "examples"}, "use --weights uniform"),
        ({"strategy": "asynchronous"}, "needs each update; use --strategy average or fetchsgd"),
        ({"memory": "ef21"}, "use --memory residual"),
        ({"relays": -1}, "give at least 0"),
    ],
)
def test_unsuitable_options_are_refused_before_anything_is_written(tmp_path, change, says):
    with pytest.raises(ConfigError, match=says):
        run(tmp_path, "run", **change)
    assert not (tmp_path / "run").exists()


class Warnings(Callback):
    def __init__(self):
        self.heard = []

    def on_warning(self, sentence: str) -> None:
        self.heard.append(sentence)


@pytest.mark.parametrize(
    "uplink", ["topk:density=1/4+s2:columns=4", "topk:density=1/4+s2:columns=2@layer"]
)
def test_tables_that_are_too_small_for_the_sum_are_reported_once(tmp_path, uplink):
    watching = Warnings()
    run(tmp_path, "run", watching, uplink=uplink, memory="none")
    (sentence,) = [s for s in watching.heard if "in the sums of the relays" in s]
    assert "round 1: " in sentence and "a larger 'union' or more 'columns'" in sentence


def test_tables_that_are_large_enough_are_not_reported(tmp_path):
    watching = Warnings()
    run(tmp_path, "run", watching)
    assert not watching.heard


# Faults.


class Behind:
    """A federation of real clients behind relays."""

    def __init__(self, uplink: str = S2, relays: int = 2):
        self.federation = Federation(
            StrategyConfig(participation=1.0, uplink=uplink, downlink="identity"),
            clients=6,
            memory_name="residual",
        )
        self.relays = Relays(self.federation, relays, codec(uplink), self.federation.layout)
        self.federation.use(InProcessTransport(self.relays))

    def round(self, number: int):
        return self.federation.loop.run_round(number)


def damaged(a: Assignment, report: Report) -> Report:
    return replace(report, frame=report.frame[:-1] + bytes([report.frame[-1] ^ 1]))


def test_a_damaged_frame_fails_alone_and_its_update_is_sent_again():
    behind = Behind()
    behind.federation.faults = {(2, 1): damaged, (5, 1): damaged}
    first = behind.round(1)
    assert [(r.client, r.stage) for r in first.rejections] == [
        (2, "relay"),
        (5, "relay"),
    ] and "checksum" in first.rejections[0].reason
    assert [a.client for a in first.accepted] == [0, 1, 3, 4]
    before = {
        i: member.memory.residual.clone() for i, member in enumerate(behind.federation.members)
    }
    assert not behind.round(2).rejections
    for client in (
        2,
        5,
    ):  # rolled back: the whole update of round 1 was still unsent
        member = behind.federation.members[client]
        assert member.memory.pending and float((member.memory.residual - before[client]).norm()) > 0


def test_the_forwarded_sum_equals_the_sum_of_the_accepted_frames():
    behind, heard = Behind(relays=1), []
    handle = behind.federation.handle

    def listening(assignments: Sequence[Assignment]) -> list[Report]:
        heard.extend(reports := handle(assignments))
        return reports

    behind.federation.handle = listening
    outcome = behind.round(1)
    sent = sum(codec(S2).decode(report.frame, numel=42) for report in heard)
    assert [report.kind for report in heard] == [UPDATE] * 6 and len(
        {a.ticket for a in outcome.accepted}
    ) == 6
    (merged,) = [a for a in outcome.accepted if a.update is not None]
    assert torch.allclose(merged.update.dense(), sent, atol=1e-6)
    assert inexact([merged.update, None]) == 0
    moved = behind.federation.loop.broadcasts.weights - behind.federation.initial
    assert torch.allclose(moved, sent / 6, atol=1e-6)
    assert behind.relays.take() == (sum(len(report.frame) for report in heard), 0)
    assert behind.relays.take() == (0, 0)
    for member in behind.federation.members:
        assert member.memory.pending is not None  # pending until the next assignment
    behind.round(2)


def test_failed_clients_and_clients_without_a_frame_are_left_out_of_the_sum():
    behind = Behind(relays=1)
    behind.federation.faults = {
        (0, 1): lambda a, report: replace(report, frame=b"", ticket=""),
        (1, 1): lambda a, report: replace(
            report, kind=FAILED, frame=b"", stage="train", reason="no"
        ),
    }
    outcome = behind.round(1)
    assert [(r.client, r.stage) for r in outcome.rejections] == [(1, "train")]
    assert [(a.client, a.update is None) for a in outcome.accepted] == [
        (0, True),
        (2, False),
        (3, True),
        (4, True),
        (5, True),
    ]
    assert behind.relays.take()[1] == 1


def test_relayed_bytes_are_shown_at_the_end(tmp_path, capsys):
    with LineDisplay() as watching:
        run(tmp_path, "run", watching, uplink="identity")
    shown = capsys.readouterr().out
    assert (
        "3; each relay sums the frames of its clients" in shown
        and "relayed     2.14 kB, ×3.78 against 8.06 kB in float32" in shown
    )


def merged(spec: str, frames: list[bytes], layout: Layout) -> tuple[bytes, list[int]]:
    """Return the frame that a relay forwards, and the indices of the refused frames."""
    assignments = [asked(i) for i in range(len(frames))]
    reports = [report(i, frame) for i, frame in enumerate(frames)]
    told = add_frames(codec(spec), layout, assignments, reports)
    (passed,) = {r.frame for r in told} - {b""}
    return passed, [i for i, r in enumerate(told) if r.kind == FAILED]


def asked(client: int) -> Assignment:
    return Assignment(1, "train", client, "up-to-date", "", "v", "f", [], "")


def report(client: int, frame: bytes) -> Report:
    return Report(1, "train", client, UPDATE, "v", "f", frame, "", 1, 0.0, "", "")


@for_each("odd", [0, 2, 4])
def test_one_unsuitable_frame_does_not_affect_the_others(odd):
    layout, c = Layout.flat(400), codec("topk:density=5%+s2:union=5")
    x = [
        torch.from_numpy(np.random.default_rng(i).standard_normal(400).astype(np.float32))
        for i in range(5)
    ]
    frames = [
        (codec("topk:density=5%+s2:columns=300") if i == odd else c).encode(v, seed=3)
        for i, v in enumerate(x)
    ]
    passed, refused = merged(str(c), frames, layout)
    assert refused == [odd] and passed == c.merge(
        [frame for i, frame in enumerate(frames) if i != odd]
    )


@for_each("spec", ["sketch@layer", "identity@layer", "topk:density=5%+s2:union=5@layer"])
def test_a_frame_with_other_tensors_is_refused_by_the_relay(spec):
    layout, other = (
        Layout.from_shapes({"a": (60,), "b": (40,)}),
        Layout.from_shapes({"a": (40,), "b": (60,)}),
    )
    c, x = codec(spec), torch.ones(100)
    frames = [
        c.encode(x, seed=3, layout=other),
        c.encode(x, seed=3, layout=layout),
        c.encode(2 * x, seed=3, layout=layout),
    ]
    passed, refused = merged(spec, frames, layout)
    assert refused == [0] and c.open(passed, 100, layout)


@for_each("change", [{"version": "00" * 16}, {"round": 9}, {"examples": 0}, {"metrics": b"x"}])
def test_a_report_that_the_server_would_reject_is_left_out_of_the_sum(change):
    behind, sent = Behind(relays=1), []
    handle = behind.federation.handle

    def listening(assignments: Sequence[Assignment]) -> list[Report]:
        sent.extend(reports := handle(assignments))
        return reports

    behind.federation.handle = listening
    behind.federation.faults = {(0, 1): lambda a, report: replace(report, **change)}
    outcome = behind.round(1)
    assert [(r.client, r.stage) for r in outcome.rejections] == [(0, "reply")]
    expected = sum(codec(S2).decode(report.frame, numel=42) for report in sent[1:])
    (merged,) = [a for a in outcome.accepted if a.update is not None]
    assert merged.client == 1 and torch.allclose(merged.update.dense(), expected, atol=1e-6)
