"""Clients evaluate the global model on their own data. Their metrics are stored in the run folder."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_workers import fork_workers
from safetensors.torch import load_file
from small_runs import TINY, Records, Stop, StopsAt, out
from torch import nn

import fedcomp
from fedcomp import Data, Task
from fedcomp.cli.comparison.comparison import as_text
from fedcomp.cli.report.page import html
from fedcomp.cli.results import results
from fedcomp.errors import ConfigError, TaskError
from fedcomp.formatting import percent
from fedcomp.run_display import LineDisplay
from fedcomp.runs import groups
from fedcomp.sim import simulate

HERE = Path(__file__).resolve()
GENERATOR = torch.Generator().manual_seed(5)
LABELS = torch.randint(0, 2, (60,), generator=GENERATOR)
INPUTS = torch.randn(60, 3, generator=GENERATOR) + LABELS[:, None]
TRAIN = {
    name: Data(INPUTS[rows], LABELS[rows])
    for name, rows in zip("abc", torch.arange(36).split((20, 10, 6)))
}
TEST = {"c": Data(INPUTS[36:44], LABELS[36:44]), "a": Data(INPUTS[44:], LABELS[44:])}


def network() -> nn.Module:
    return nn.Linear(3, 2)


def loop(model, data, local_round):
    with torch.no_grad():
        model.weight += 0.01 * len(data)
    return {"loss": 1.0, "accuracy": 0.1 * local_round.client, "examples": 1 + local_round.client}


def evaluate(model, data):
    return {"loss": model.weight.sum(), "seen": len(data)}


by_client = Task("by client", network, TRAIN, TEST)
untested = Task("by client", network, TRAIN)
tested_together = Task("by client", network, TRAIN, (INPUTS[36:], LABELS[36:]))
own_loop = Task("own loop", network, TRAIN, TEST, train_fn=loop)
own_evaluation = Task("own evaluation", network, TRAIN, TEST, evaluate_fn=evaluate)


def run(folder, name="by_client", **options):
    config = replace(
        TINY, task=f"{HERE}:{name}", clients=3, participation=1.0, rounds=3, partition="natural"
    )
    simulate(replace(config, **{"engine": "serial", **options}, out=str(folder)))
    return fedcomp.load(folder)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def compared(folder: Path) -> list[tuple]:
    return [(line.get("client_metrics"), line["by_client"]) for line in lines(folder)]


def test_a_client_evaluates_the_model_that_it_received_on_its_test_data(tmp_path):
    found = run(tmp_path / "two", evaluate="clients", rounds=2)
    run(tmp_path / "one", rounds=1)
    received = network()
    received.load_state_dict(load_file(tmp_path / "one" / "model.safetensors"))
    values = {record.client: dict(record.metrics) for record in found.records[1].by_client}
    assert values.keys() == {0, 2}  # client 1, whose group is b, has no test data
    with torch.no_grad():
        for client, name in ((0, "a"), (2, "c")):
            outputs, targets = received(TEST[name].inputs), TEST[name].targets
            share = (outputs.argmax(1) == targets).float().mean().item()
            loss = nn.functional.cross_entropy(outputs, targets).item()
            assert values[client] == pytest.approx({"accuracy": share, "loss": loss})
    spread = found.records[1].client_metrics["accuracy"]
    assert (spread.clients, spread.examples) == (2, 24)
    assert spread.mean == pytest.approx(
        (16 * values[0]["accuracy"] + 8 * values[2]["accuracy"]) / 24
    )
    assert spread.worst_decile == min(value["accuracy"] for value in values.values())
    worst = found.records[1].client_metrics["loss"].worst_decile
    assert worst == max(value["loss"] for value in values.values())
    assert found.records[1].accuracy is None and found.summary.accuracy is None
    assert found.summary.client_metrics == found.records[1].client_metrics


def test_a_task_without_test_data_is_evaluated_by_clients(tmp_path):
    found = run(tmp_path / "untested", "untested", evaluate="clients")
    run(tmp_path / "tested", "tested_together", evaluate="clients")
    assert found.records[-1].client_metrics["accuracy"].clients == 3
    assert compared(tmp_path / "untested") == compared(tmp_path / "tested")
    assert found.summary.accuracy is None and found.model() is not None


@pytest.mark.parametrize("evaluate", ["server", "both"])
def test_the_server_cannot_evaluate_without_test_data(tmp_path, evaluate):
    message = "task 'by client' has no test data; give the task a 'test', or let the clients evaluate with --evaluate clients"
    with pytest.raises(TaskError, match=f"^{re.escape(message)}$"):
        run(tmp_path / "run", "untested", evaluate=evaluate)
    assert not (tmp_path / "run").exists()


def test_held_out_examples_are_evaluated_and_not_trained_on(tmp_path):
    seen = {"train": set(), "evaluated": set()}

    def train(model, data, local_round):
        seen["train"] |= {float(inputs[0]) for inputs, _ in data}
        return {"loss": 1.0}

    def measure(model, data):
        seen["evaluated"] |= {float(inputs[0]) for inputs, _ in data}
        return {"loss": 1.0, "size": len(data)}

    task = Task("seen", network, TRAIN, (INPUTS, LABELS), train_fn=train, evaluate_fn=measure)
    options = {
        "clients": 3,
        "participation": 1.0,
        "rounds": 2,
        "partition": "natural",
        "progress": False,
    }
    found = fedcomp.simulate(
        task, out=tmp_path / "run", evaluate="clients", holdout=0.25, **options
    )
    assert not seen["train"] & seen["evaluated"]
    assert seen["train"] | seen["evaluated"] == set(INPUTS[:36, 0].tolist())
    sizes = {client.client: client.metrics["size"] for client in found.records[0].by_client}
    assert sizes == {0: 5, 1: 3, 2: 2}


def test_a_client_with_one_example_trains_on_it_and_reports_no_metrics(tmp_path):
    data = [(INPUTS[:1], LABELS[:1]), (INPUTS[1:9], LABELS[1:9])]
    task = Task("one example", network, data, (INPUTS, LABELS))
    options = {
        "clients": 2,
        "participation": 1.0,
        "rounds": 1,
        "partition": "natural",
        "progress": False,
    }
    (record,) = fedcomp.simulate(task, out=tmp_path / "run", evaluate="both", **options).records
    assert record.accepted == 2 and [client.client for client in record.by_client] == [1]
    assert record.accuracy is not None


@pytest.mark.parametrize("name", ["own_loop", "own_evaluation"])
def test_a_resumed_run_has_the_same_metrics(tmp_path, name):
    options = {"evaluate": "clients", "eval_every": 2, "rounds": 4}
    whole = run(tmp_path / "whole", name, **options)
    assert [bool(record.by_client) for record in whole.records] == (
        [True] * 4 if name == "own_loop" else [False, True, False, True]
    )
    config = replace(whole.config, out=out(tmp_path, "parts"))
    with pytest.raises(Stop):
        simulate(config, StopsAt(2))
    simulate(replace(config, resume=True))
    assert compared(tmp_path / "parts") == compared(tmp_path / "whole")


@pytest.mark.deploy
@pytest.mark.parametrize("name", ["by_client", "own_loop", "own_evaluation"])
def test_worker_processes_compute_the_metrics_of_the_serial_engine(tmp_path, name, monkeypatch):
    fork_workers(monkeypatch)
    for engine in ("serial", "processes"):
        run(tmp_path / engine, name, evaluate="both", engine=engine)
    assert compared(tmp_path / "processes") == compared(tmp_path / "serial")
    assert compared(tmp_path / "serial")[-1][1]


def test_metrics_of_a_train_fn_are_reported_and_weighted_by_its_examples(tmp_path):
    weighted = run(
        tmp_path / "weighted",
        "own_loop",
        weights="examples",
        uplink="identity",
        downlink="identity",
        rounds=1,
    )
    (record,) = weighted.records
    assert {client.client: dict(client.metrics) for client in record.by_client} == {
        client: {"train_accuracy": pytest.approx(0.1 * client)} for client in range(3)
    }
    spread = record.client_metrics["train_accuracy"]
    assert (spread.clients, spread.examples, spread.worst_decile) == (3, 6, 0.0)
    assert spread.mean == pytest.approx((0.1 * 2 + 0.2 * 3) / 6)
    moved = load_file(tmp_path / "weighted" / "model.safetensors")["weight"]
    run(tmp_path / "uniform", "own_loop", uplink="identity", downlink="identity", rounds=1)
    uniform = load_file(tmp_path / "uniform" / "model.safetensors")["weight"]
    sizes = np.array([20, 10, 6]) * 0.01
    difference = (sizes @ [1, 2, 3]) / 6 - sizes.mean()
    assert torch.allclose(moved - uniform, torch.full((2, 3), difference), atol=1e-6)


def test_nonfinite_metrics_are_left_out_with_one_warning(tmp_path):
    def train(model, data, local_round):
        return loop(model, data, local_round) | {
            "score": float("nan") if local_round.client else 2.0
        }

    task = Task("not finite", network, TRAIN, TEST, train_fn=train)
    options = {
        "clients": 3,
        "participation": 1.0,
        "rounds": 2,
        "partition": "natural",
        "progress": False,
    }
    found = fedcomp.simulate(task, out=tmp_path / "run", **options)
    for record in found.records:
        assert (
            record.client_metrics["train_score"].mean,
            record.client_metrics["train_score"].clients,
        ) == (2.0, 1)
    (warning,) = found.summary.warnings
    assert warning.startswith("round 1: client 1 reports nan as its 'train_score'")


def test_a_metric_that_fails_on_a_clients_examples_is_left_out(tmp_path):
    def needs_both_classes(outputs, targets):
        if len(targets.unique()) < 2:
            raise ValueError("only one class")
        return 1.0

    ones = torch.ones(4, dtype=torch.long)
    test = {"a": (INPUTS[:4], ones), "b": (INPUTS[:4], torch.tensor([0, 1, 0, 1]))}
    task = Task("classes", network, TRAIN, test, metrics={"score": needs_both_classes})
    options = {
        "clients": 3,
        "participation": 1.0,
        "rounds": 1,
        "partition": "natural",
        "progress": False,
    }
    (record,) = fedcomp.simulate(task, out=tmp_path / "run", evaluate="clients", **options).records
    assert record.accepted == 3
    assert (
        record.client_metrics["score"].clients == 1 and record.client_metrics["loss"].clients == 2
    )


def too_many(model, data):
    return {"loss": 1.0} | {f"score_{i}": i for i in range(64)}


def no_such_metric(model, data):
    raise RuntimeError("no such metric")


def leaves(model, data):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (no_such_metric, "RuntimeError: no such metric"),
        (too_many, "there are 65 metrics; report at most 64"),
        (leaves, "SystemExit: 3"),
    ],
)
def test_an_error_of_the_evaluation_rejects_the_client(tmp_path, fails, reason):
    task = Task("fails", network, TRAIN, TEST, evaluate_fn=fails)
    options = {
        "clients": 3,
        "participation": 1.0,
        "rounds": 1,
        "partition": "natural",
        "progress": False,
    }
    (record,) = fedcomp.simulate(task, out=tmp_path / "run", evaluate="clients", **options).records
    assert {(r.client, r.stage) for r in record.rejections} == {(0, "evaluate"), (2, "evaluate")}
    assert reason in record.rejections[0].reason and record.accepted == 1


def test_evaluation_uses_the_clients_own_running_statistics(tmp_path):
    def normalized():
        return nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2))

    def measure(model, data):
        return {"loss": 1.0, "mean": model[0].running_mean.sum()}

    task = Task("normalized", normalized, TRAIN, TEST, evaluate_fn=measure)
    options = {
        "clients": 3,
        "participation": 1.0,
        "rounds": 1,
        "partition": "natural",
        "progress": False,
    }
    (record,) = fedcomp.simulate(task, out=tmp_path / "run", evaluate="clients", **options).records
    for client, name in ((0, "a"), (1, "c")):
        mean = TRAIN[name].inputs.mean(0).sum().item()
        assert record.by_client[client].metrics["mean"] == pytest.approx(mean, abs=1e-5)


def test_a_run_without_client_metrics_writes_the_same_files_as_before(tmp_path):
    watched = Records()
    simulate(replace(TINY, out=out(tmp_path, "run")), watched)
    assert all(
        "client_metrics" not in line and not line["by_client"] for line in lines(tmp_path / "run")
    )


def test_holdout_needs_clients_that_evaluate(tmp_path):
    with pytest.raises(ConfigError, match="--holdout 0.3 has no effect if clients do not evaluate"):
        simulate(replace(TINY, holdout=0.3, out=out(tmp_path, "run")))


def test_mean_and_worst_decile_are_shown_and_read_back(tmp_path, capsys):
    config = replace(TINY, task=f"{HERE}:by_client", clients=3, participation=1.0, rounds=2)
    config = replace(config, partition="natural", evaluate="clients", out=out(tmp_path, "run"))
    simulate(config, LineDisplay())
    found = fedcomp.load(tmp_path / "run")
    spread = found.records[-1].client_metrics["accuracy"]
    mean, worst = percent(spread.mean), percent(spread.worst_decile)
    shown = capsys.readouterr().out
    assert re.search(rf"worst 10 %.*\n.*\n *2 +{mean} +{worst}", shown)
    assert f"clients     accuracy {mean}, worst decile {worst}, 2 clients" in shown
    assert f"accuracy  {mean} " in repr(found)
    assert f"clients   accuracy {mean}, worst decile {worst}, 2 clients" in repr(found)
    assert found.metrics["client_accuracy"][-1] == spread.mean == found.accuracy
    assert found.metrics["client_accuracy_worst_decile"][-1] == spread.worst_decile
    assert np.isnan(found.metrics["accuracy"]).all()
    values = found.metric_by_client("accuracy")
    assert values.shape == (2, 3) and np.isnan(values[:, 1]).all()
    assert values[1, 0] == found.records[1].by_client[0].metrics["accuracy"]
    other = run(tmp_path / "other", evaluate="both", rounds=2, lr=0.2)
    page = html(groups([found, other]), None)
    assert f">{mean}</td>" in page and f">{worst}</td>" in page
    assert "worst decile of client accuracy" in page and "diverged" not in page
    table = as_text(results(groups([found, other])), None)
    assert "worst 10 %" in table[0] and any(f"{mean}  {worst:>10}" in line for line in table)
