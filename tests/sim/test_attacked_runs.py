"""Runs with Byzantine clients end with a finite model, name the rejected clients, and are the same after an interruption."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plugins import install
from safetensors.torch import load_file
from small_runs import TINY, Records, Stop, StopsAt, assert_the_same_when_stopped, out, rounds_of

from fedcomp import RunConfig
from fedcomp.sim import simulate
from fedcomp.sim.attacks import available_attacks
from fedcomp.sim.clients import VirtualClients
from fedcomp.strategies import Average

WAYS = {
    "identity": {"uplink": "identity", "downlink": "identity"},
    "stc": {},
    "sign": {"uplink": "sign", "memory": "none"},
    "qsgd": {"uplink": "qsgd:levels=4", "memory": "none"},
    "ef21": {"memory": "ef21"},
    "fetchsgd": {"strategy": "fetchsgd", "uplink": "sketch:rows=3,columns=40", "memory": "none"},
    "powersgd": {
        "strategy": "powersgd:rank=1",
        "uplink": RunConfig.uplink,
        "memory": RunConfig.memory,
        "downlink": "identity",
    },
    "shared-scale": {
        "strategy": "shared-scale",
        "uplink": RunConfig.uplink,
        "memory": RunConfig.memory,
    },
    "efsign": {"uplink": "efsign@layer", "engine": "serial"},
    "sketch": {"uplink": "sketch:rows=3,columns=40", "memory": "none"},
    "sketched-sgd": {
        "strategy": "sketched-sgd",
        "uplink": "sketch:rows=3,columns=40",
        "downlink": RunConfig.downlink,
    },
    "gtopk": {"strategy": "gtopk", "uplink": "topk:density=10%"},
    "asynchronous": {"strategy": "asynchronous"},
}
BYZANTINE = RunConfig(**{**TINY.__dict__, "partition": "iid", "participation": 1.0, "rounds": 3})


def finite(folder: str) -> bool:
    return all(
        bool(tensor.isfinite().all())
        for tensor in load_file(Path(folder, "model.safetensors")).values()
    )


GROUPS = {
    "updates": "inverted:1+rescaled:1+random-sign:1+constant:1+gaussian:1+label-flip:1+alie:1+ipm:1+mimic:1+low-margin:1+"
    "equivocation:1+code-aware:clients=0",
    "frames": "infinity:1+infinity:1,value=inf+malformed:1+malformed:1,how=body+abstention:1",
    "largest": "infinity:1,value=largest",
}


def test_every_attack_is_tried():
    attacks = "+".join(GROUPS.values()).split("+")
    assert {text.partition(":")[0] for text in attacks} == set(available_attacks())


@pytest.mark.parametrize(
    ("way", "group"),
    [(way, "frames") for way in WAYS]
    + [(way, "updates") for way in ("identity", "stc", "sign", "powersgd")]
    + [(way, "largest") for way in ("identity", "stc", "fetchsgd")],
)
def test_attacked_runs_finish_with_every_codec_and_strategy(tmp_path, way, group):
    config = replace(
        BYZANTINE, **WAYS[way], clients=16, attack=GROUPS[group], out=out(tmp_path, "run")
    )
    assert simulate(config).rounds == 3 and finite(config.out)
    lines = (
        rounds_of(config.out) if way != "asynchronous" else []
    )  # an asynchronous round accepts only the first answers
    if group == "frames":
        unread = 2 if way == "sign" else 4  # votes are bits, so no vote is NaN
        assert all(line["rejected"] >= unread and line["accepted"] >= 11 for line in lines), (
            "only unreadable frames are rejected"
        )
    if group == "updates" and lines:
        assert lines[0]["accepted"] == 16, "frames of Byzantine clients are valid"


@pytest.mark.parametrize(
    "attack", ["malformed:1,how=garbage", "infinity:1,value=inf", "abstention:1"]
)
def test_one_byzantine_client_of_200_loses_only_its_own_update(tmp_path, attack):
    config = replace(BYZANTINE, clients=200, rounds=2, attack=attack, out=out(tmp_path, "run"))
    simulate(config)
    (byzantine,) = {r["client"] for line in rounds_of(config.out) for r in line["rejections"]}
    assert [
        (line["accepted"], [r["client"] for r in line["rejections"]])
        for line in rounds_of(config.out)
    ] == [(199, [byzantine])] * 2
    assert all(
        r["stage"] == "reply" and r["reason"]
        for line in rounds_of(config.out)
        for r in line["rejections"]
    )


def test_rejections_are_in_the_summary_and_the_metrics(tmp_path):
    config = replace(
        BYZANTINE,
        attack="abstention:clients=1/6+infinity:clients=3,value=inf",
        uplink="identity",
        out=out(tmp_path, "run"),
    )
    watched = Records()
    summary = simulate(config, watched)
    stored = json.loads(Path(config.out, "summary.json").read_text())
    assert [
        (r["stage"], r["updates"], r["clients"], r["more_clients"]) for r in stored["rejections"]
    ] == [("reply", 6, [1, 6], 0), ("reply", 3, [3], 0)]
    assert (
        "abstains" in stored["rejections"][0]["reason"]
        and "NaN or infinity" in stored["rejections"][1]["reason"]
    )
    assert [list(r.clients) for r in summary.rejections] == [[1, 6], [3]]
    assert watched.header.attack == "abstention 1/6, infinity 3" and watched.header.byzantine == 3


@pytest.mark.parametrize(
    ("attack", "change"),
    [
        ("random-sign:2+alie:1,z=1+malformed:2", {}),
        ("gaussian:1,sigma=0.1+label-flip:1+mimic:1+infinity:1", {"memory": "ef21"}),
        ("low-margin:2+abstention:2,share=0.5", {"uplink": "efsign", "engine": "serial"}),
        ("ipm:2+rescaled:1", {"strategy": "asynchronous", "engine": "serial"}),
        ("inverted:1+malformed:1", WAYS["powersgd"]),
    ],
)
def test_a_stopped_and_resumed_attacked_run_equals_an_uninterrupted_one(tmp_path, attack, change):
    config = replace(TINY, attack=attack, clients=10, rounds=6, checkpoint_every=4, **change)
    assert_the_same_when_stopped(tmp_path, config, StopsAt(2), StopsAt(5))


@pytest.mark.parametrize("attack", ["alie:2,z=1+random-sign:1", "mimic:2,of=0", "low-margin:2"])
def test_frames_do_not_depend_on_how_a_cohort_is_split(tmp_path, attack, monkeypatch):
    seen: list[list[tuple]] = []
    for pieces in (1, 3, 8):
        frames: list[tuple] = []
        handle = VirtualClients.handle

        def small(self, assignments, pieces=pieces, frames=frames, handle=handle):
            self.trainer.at_once = pieces
            reports = handle(self, assignments)
            frames += [(r.round, r.client, r.frame) for r in reports]
            return reports

        monkeypatch.setattr(VirtualClients, "handle", small)
        config = replace(BYZANTINE, rounds=1, engine="serial", attack=attack)
        simulate(replace(config, out=out(tmp_path, str(pieces))))
        monkeypatch.undo()
        seen.append(sorted(frames))
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 8


def test_engines_agree_on_an_attacked_run_to_rounding(tmp_path):
    models = {}
    for engine in ("serial", "batched"):
        attack, dense = "alie:2,z=1+label-flip:1", {"uplink": "identity", "downlink": "identity"}
        config = replace(
            BYZANTINE, **dense, attack=attack, engine=engine, out=out(tmp_path, engine)
        )
        simulate(config)
        models[engine] = torch.cat(
            [t.flatten() for t in load_file(Path(config.out, "model.safetensors")).values()]
        )
    torch.testing.assert_close(models["serial"], models["batched"], rtol=1e-4, atol=1e-5)


def test_attacks_by_most_clients_prevent_learning_and_abstention_by_two_does_not(tmp_path):
    config = replace(BYZANTINE, rounds=20, uplink="identity", downlink="identity")
    honest = simulate(replace(config, out=out(tmp_path, "honest")))
    led = simulate(replace(config, attack="inverted:7,scale=0.5", out=out(tmp_path, "led")))
    unheard = simulate(replace(config, attack="abstention:2", out=out(tmp_path, "unheard")))
    flipped = simulate(replace(config, attack="label-flip:8", out=out(tmp_path, "flipped")))
    assert honest.accuracy > 0.8 and unheard.accuracy > 0.8
    assert led.accuracy <= 0.5 and led.loss > 3 * honest.loss and flipped.accuracy < 0.2


class Coded(Average):
    """A strategy with an allocation matrix whose rows 1 and 4 contain all partitions."""

    name = "coded"
    allocation = np.array(
        [[1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1]]
    )


def test_code_aware_clients_invert_the_updates_of_the_heaviest_rows(tmp_path, monkeypatch):
    installed = install(tmp_path, "theirs", strategies=[f"coded = {__name__}:Coded"])
    monkeypatch.syspath_prepend(installed)
    config = replace(BYZANTINE, clients=5, rounds=1, strategy="coded", uplink="identity")
    frames: dict[str, dict[int, bytes]] = {}
    handle = VirtualClients.handle
    for name, attack in (("honest", None), ("lying", "code-aware:2")):

        def heard(self, assignments, name=name):
            reports = handle(self, assignments)
            frames[name] = {report.client: report.frame for report in reports}
            return reports

        monkeypatch.setattr(VirtualClients, "handle", heard)
        simulate(replace(config, attack=attack, engine="serial", out=out(tmp_path, name)))
    values = {
        name: {c: np.frombuffer(f[10:], "<f4") for c, f in found.items()}
        for name, found in frames.items()
    }
    for client in range(5):
        sign = -1 if client in (1, 4) else 1
        np.testing.assert_array_equal(values["lying"][client], sign * values["honest"][client])


def test_suspicions_are_in_the_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(Average, "suspicion", {3: 0.75, 0: 0.1})
    config = replace(TINY, rounds=2, out=out(tmp_path, "run"))
    watched = Records()
    simulate(config, watched)
    assert [record.suspicion for record in watched.records] == [{3: 0.75, 0: 0.1}] * 2
    with pytest.raises(Stop):
        simulate(replace(config, rounds=4, resume=True), StopsAt(3))
    assert [line["suspicion"] for line in rounds_of(config.out)] == [{"3": 0.75, "0": 0.1}] * 3


@pytest.mark.parametrize(
    "attack", ["infinity:1", "malformed:1", "inverted:1", "abstention:1", "alie:1,z=1"]
)
def test_relays_forward_the_frames_of_honest_clients(tmp_path, attack):
    config = replace(
        BYZANTINE, uplink="identity", relays=2, attack=attack, out=out(tmp_path, "run")
    )
    summary = simulate(config)
    assert summary.rounds == 3 and finite(config.out) and summary.client_updates >= 3 * 7
