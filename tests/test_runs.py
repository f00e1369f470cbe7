"""Loaded runs: options, metrics as arrays, and the model as the user's module. Runs that differ only in their seeds form a group."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from fedcomp import RunConfig
from fedcomp.callbacks import RejectionSummary
from fedcomp.errors import RunFolderError, UserError
from fedcomp.formatting import human_bytes
from fedcomp.runs import baseline_of, groups, load
from fedcomp.sim import simulate
from fedcomp.tasks import load as load_task

TINY = RunConfig(
    task=f"{Path(__file__).parent / 'tiny_task.py'}:task",
    clients=6,
    rounds=4,
    participation=0.5,
    lr=0.1,
    eval_every=2,
    uplink="stc:density=10%",
    downlink="stc:density=10%",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tiny"
    simulate(replace(TINY, out=str(out)))
    return out


def test_options_and_metrics_are_those_of_the_run(folder):
    run = load(folder)
    chosen = {"memory": "residual", "downlink_memory": "residual"}
    assert run.config == replace(TINY, out=str(folder), **chosen)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert run.metrics["uplink_bytes"].tolist() == [line["uplink_bytes"] for line in lines]
    accuracy = [math.nan if line["accuracy"] is None else line["accuracy"] for line in lines]
    assert (
        np.array_equal(run.metrics["accuracy"], accuracy, equal_nan=True)
        and np.isnan(accuracy).any()
    )
    assert run.accuracy == run.summary.accuracy == accuracy[-1]
    assert run.parameters == 42 and run.resolved["engine"]
    assert run.sent_bytes == run.summary.uplink_bytes + run.summary.downlink_bytes


def test_rejected_updates_do_not_change_the_number_of_parameters(folder):
    run = load(folder)
    records = [replace(r, accepted=1, rejected=r.cohort - 1) for r in run.records]
    assert replace(run, records=records).parameters == 42


def test_an_unknown_metric_is_an_error_that_lists_the_names(folder):
    with pytest.raises(KeyError, match="no metric 'acc'; .*known: "):
        load(folder).metrics["acc"]


def test_the_repr_describes_the_run_in_five_lines(folder, tmp_path):
    run = load(folder)
    last, best = run.records[-1], max(run.records, key=lambda r: r.accuracy or 0)
    up = sum(r.uplink_bytes for r in run.records)
    told, quality, sent, rounds, place = repr(run).splitlines()
    assert told == f"Run tiny, task {TINY.task}" and place == f"folder    {folder}"
    assert f"{100 * last.accuracy:.2f} % (best {100 * best.accuracy:.2f} % in round" in quality
    times = f"×{sum(r.dense_uplink_bytes for r in run.records) / up:.2f}"
    assert f" {human_bytes(up)} up ({times}), " in sent and "than in float32" in sent
    assert rounds == "rounds    4; 6 clients, 3 a round"

    regression = [replace(r, accuracy=None, loss=r.round * 0.5) for r in run.records]
    lines = repr(replace(run, records=tuple(regression), summary=None)).splitlines()
    assert lines[1] == "loss      2.0000 (lowest 0.5000 in round 1)"
    assert lines[3].startswith("rounds    4, not finished; ")
    assert "accuracy  –" in repr(replace(run, records=())).splitlines()


def test_the_repr_tells_that_messages_are_larger_and_that_all_updates_were_rejected(folder):
    run = load(folder)
    large = [replace(r, uplink_bytes=2 * r.dense_uplink_bytes) for r in run.records]
    large = [replace(r, downlink_bytes=2 * r.dense_downlink_bytes) for r in large]
    assert "in total ×2.00 larger than in float32" in repr(replace(run, records=tuple(large)))
    rejection = RejectionSummary("train", "the loss is not finite", 12, [0, 1])
    summary = replace(run.summary, client_updates=0, rejections=[rejection])
    last = repr(replace(run, summary=summary)).splitlines()[-1]
    assert last == "rejected  all updates, for example: the loss is not finite"


def test_cost_to_returns_the_rounds_and_bytes_to_an_accuracy(folder):
    run = load(folder)
    first = run.records[1]
    sent = sum(r.uplink_bytes + r.downlink_bytes for r in run.records[:2])
    assert run.cost_to(first.accuracy) == (2, sent)
    assert run.cost_to(1.01) is None


def test_the_model_is_the_users_module_with_the_trained_weights(folder):
    run = load(folder)
    model, test = run.model(), load_task(TINY.task).test()
    right = (model(test.inputs).argmax(-1) == test.targets).float().mean().item()
    assert not model.training and right == pytest.approx(run.accuracy)
    assert isinstance(model, torch.nn.Sequential)


def test_an_unfinished_run_is_read_up_to_its_last_round(folder, tmp_path):
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    run = load(tmp_path)
    assert run.summary is None and len(run.records) == 4
    with pytest.raises(RunFolderError, match="no model.safetensors yet"):
        run.model()


def test_a_damaged_or_incomplete_model_file_is_refused(folder, tmp_path):
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    whole = (folder / "model.safetensors").read_bytes()
    tensors = safetensors.torch.load(whole)
    name = next(iter(tensors))
    del tensors[name]
    for content, output in (
        (whole[:-1], "model.safetensors cannot be read"),
        (safetensors.torch.save(tensors), f"has no tensor '{name}'"),
    ):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(RunFolderError, match=output):
            load(tmp_path).model()


@pytest.mark.parametrize(
    ("name", "content", "output"),
    [
        ("config.toml", None, "contains no run"),
        ("config.toml", b"\xff", "leave this run out"),
        ("config.toml", b"lr = ", "cannot be read"),
        ("config.toml", b"lr = true", "leave this run out"),
        ("metrics.jsonl", b"\xff\n", "is damaged"),
        ("metrics.jsonl", b"{}\n", "is damaged"),
        ("metrics.jsonl", b"[]\n", "is damaged"),
        ("summary.json", b"7", "is damaged"),
        ("summary.json", b"{}", "is damaged"),
    ],
)
def test_a_missing_or_damaged_file_of_a_run_is_refused(folder, tmp_path, name, content, output):
    for path in folder.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RunFolderError, match=output):
        load(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="is not a folder"):
        load(tmp_path / "none")


def test_runs_are_grouped_over_seeds_and_labels_have_the_options_that_differ(folder):
    run = load(folder)

    def like(**changes):
        return replace(run, options=run.options | changes)

    found = groups(
        [like(), like(seed=1, out="x"), like(uplink="identity"), like(seed=1, uplink="identity")]
    )
    assert [(g.label, len(g.runs)) for g in found] == [("stc:density=10%", 2), ("identity", 2)]
    assert [g.label for g in groups([like(lr=0.1), like(lr=0.2, strategy="vote")])] == [
        "lr 0.1, average",
        "lr 0.2, vote",
    ]
    assert [g.label for g in groups([like(budget=None), like(budget="1kB")])] == [
        "budget –",
        "budget 1kB",
    ]
    assert [g.label for g in groups([run])] == ["tiny"]
    long = [like(task="x" * 90), like(task="y" * 90)]
    assert [g.label for g in groups(long)] == ["tiny (tiny)"] * 2, (
        "the name of the folder replaces a long label"
    )
    spread = groups([like(lr=1.0), like(partition="classes:2"), like(clients=9, lr=1.0)])
    assert [(g.method_label, g.problem_label) for g in spread] == [
        ("lr 1.0", "partition iid, clients 6"),
        ("lr 0.1", "partition classes:2, clients 6"),
        ("lr 1.0", "partition iid, clients 9"),
    ]
    with pytest.raises(UserError, match="have the same options and seed"):
        groups([like(), like(out="elsewhere")])


def test_labels_leave_out_options_that_fedcomp_chose(folder):
    run = load(folder)

    def labels(*changes):
        return [g.label for g in groups([replace(run, options=run.options | c) for c in changes])]

    stc = {"uplink": "stc:density=1/100", "memory": "residual", "downlink": "stc:density=1/100"}
    qsgd = stc | {"uplink": "qsgd:levels=16", "memory": "none"}
    ef21 = stc | {"memory": "ef21"}
    powersgd = {"strategy": "powersgd", "uplink": "powersgd:rank=2", "memory": "lowrank"}
    powersgd["downlink"] = "identity"
    dense = {"downlink": "identity", "downlink_memory": "none", "memory": "none"}
    dense |= {"uplink": "identity"}
    assert labels(stc, qsgd) == ["stc:density=1/100", "qsgd:levels=16"]
    assert labels(stc, qsgd, dense) == ["stc:density=1/100", "qsgd:levels=16", "dense"]
    assert labels(ef21, qsgd) == ["stc:density=1/100, ef21", "qsgd:levels=16, none"]
    assert labels(stc, powersgd, dense) == ["average", "powersgd", "dense"]
    assert labels(stc, dense) == ["stc:density=1/100", "dense"]
    assert labels(dense, dense | {"strategy": "median"}, stc, qsgd) == [
        "dense, average",
        "dense, median",
        "stc:density=1/100",
        "qsgd:levels=16",
    ]


def test_the_baseline_of_a_run_with_a_density_schedule_has_neither_schedule_nor_horizon(folder):
    run = load(folder)
    dense = {name: "identity" for name in ("uplink", "downlink")}
    dense |= {"memory": "none", "downlink_memory": "none"}
    options = {"density_schedule": "linear:to=1%", "horizon": 4}
    given = [options, dense, dense | {"lr": 0.3}]
    mine, baseline, _ = found = groups([replace(run, options=run.options | o) for o in given])
    assert baseline_of(mine, found) is baseline


def test_an_incomplete_line_of_metrics_is_ignored(folder, tmp_path):
    (tmp_path / "config.toml").write_bytes((folder / "config.toml").read_bytes())
    (tmp_path / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes()[:-30])
    assert len(load(tmp_path).records) == 3


def test_text_in_place_of_a_number_is_refused(folder, tmp_path):
    (tmp_path / "config.toml").write_bytes((folder / "config.toml").read_bytes())
    lines = (
        (folder / "metrics.jsonl")
        .read_text()
        .replace('"loss": ', '"loss": "high", "x": ', 1)
        .replace(', "x": ', ', "train_loss": ', 1)
    )
    (tmp_path / "metrics.jsonl").write_text(lines)
    with pytest.raises(RunFolderError, match="is damaged"):
        load(tmp_path)
