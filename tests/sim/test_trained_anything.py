"""Runs with any optimizer, any batches or the task's own training loop, in every engine and after a resume."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_workers import fork_workers
from torch import nn
from torch.utils.data import Dataset

import fedcomp
from fedcomp import Data, RunConfig, Task
from fedcomp.errors import ConfigError
from fedcomp.server.server_run import UNCHANGED
from fedcomp.sim import simulate

HERE = Path(__file__).resolve()
GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(120, 6, generator=GENERATOR)
LABELS = (INPUTS.sum(1) > 0).long()


class Pairs(Dataset):
    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, row):
        return INPUTS[row], LABELS[row]


class Halves(nn.Module):
    """A model whose keyword arguments are the two halves of the inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, left, right):
        return self.layer(torch.cat([left, right], 1))


def own_loop(model, data, round):
    momentum = round.state.get("momentum", [0.0] * 2)
    inputs, labels = (torch.stack(part) for part in zip(*data, strict=True))
    loss = nn.functional.cross_entropy(model(inputs), labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    momentum = round.state["momentum"] = [0.9 * m + g for m, g in zip(momentum, gradients)]
    with torch.no_grad():
        for parameter, step in zip(model.parameters(), momentum):
            parameter -= 0.1 * step
    return {"loss": loss, "examples": len(data)}


def failing_loop(model, data, round):
    if round.client == 1:
        raise RuntimeError("no such file: words.txt")
    return {"loss": 1.0}


def train_a_copy(model, data, local_round):
    own_loop(copy.deepcopy(model), data, local_round)
    return {"loss": 0.5}


def evaluate(model, data):
    return {"loss": 0.5, "accuracy": 0.25, "fluency": 7}


lazy = Task("lazy", lambda: nn.Linear(6, 2), Pairs, (INPUTS, LABELS))
keywords = Task(
    "keywords",
    Halves,
    Data({"left": INPUTS[:, :2], "right": INPUTS[:, 2:]}, LABELS),
    Data({"left": INPUTS[:, :2], "right": INPUTS[:, 2:]}, LABELS),
)
own = Task("own", lambda: nn.Linear(6, 2), Pairs(), Pairs(), train_fn=own_loop)
failing = Task("failing", lambda: nn.Linear(6, 2), Pairs(), Pairs(), train_fn=failing_loop)
copied = Task("copied", lambda: nn.Linear(6, 2), Pairs(), Pairs(), train_fn=train_a_copy)
evaluated = Task("evaluated", lambda: nn.Linear(6, 2), Pairs(), Pairs(), evaluate_fn=evaluate)


def config(out, name: str, **options) -> RunConfig:
    return RunConfig(
        task=f"{HERE}:{name}",
        clients=6,
        participation=0.5,
        rounds=options.pop("rounds", 4),
        uplink="topk:density=50%",
        out=str(out),
        **options,
    )


def model_of(folder) -> bytes:
    return (folder / "model.safetensors").read_bytes()


ADAM = {"optimizer": "adam:lr=0.02", "optimizer_state": "kept"}
CASES = [("lazy", ADAM), ("keywords", {"optimizer": "adamw"}), ("own", {})]


@pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES])
def test_a_run_learns_and_equals_an_interrupted_one(tmp_path, name, options):
    whole = simulate(config(tmp_path / "whole", name, engine="serial", **options))
    records = fedcomp.load(tmp_path / "whole").metrics
    assert whole.rounds == 4 and records["loss"][-1] < records["loss"][0]
    begun = config(tmp_path / "parts", name, engine="serial", rounds=2, horizon=4, **options)
    simulate(begun)
    simulate(config(tmp_path / "parts", name, engine="serial", resume=True, **options))
    assert model_of(tmp_path / "parts") == model_of(tmp_path / "whole")


@pytest.mark.deploy
@pytest.mark.parametrize(("name", "options"), [("lazy", ADAM), ("keywords", {}), ("own", {})])
def test_worker_processes_compute_the_model_of_the_serial_engine(
    tmp_path, name, options, monkeypatch
):
    fork_workers(monkeypatch)
    for engine in ("serial", "processes"):
        simulate(config(tmp_path / engine, name, engine=engine, rounds=3, **options))
    assert model_of(tmp_path / "processes") == model_of(tmp_path / "serial")


def test_an_error_of_the_training_loop_is_reported_with_file_and_line(tmp_path):
    simulate(config(tmp_path / "run", "failing", engine="serial"))
    records = fedcomp.load(tmp_path / "run").records
    rejected = [rejection for record in records for rejection in record.rejections]
    assert rejected and {(r.client, r.stage) for r in rejected} == {(1, "train")}
    assert "test_trained_anything.py, line" in rejected[0].reason
    assert "in failing_loop: RuntimeError: no such file: words.txt" in rejected[0].reason


def test_a_train_fn_that_does_not_change_the_model_is_reported(tmp_path):
    assert simulate(config(tmp_path / "copied", "copied")).warnings[-1:] == (UNCHANGED,)
    assert UNCHANGED not in simulate(config(tmp_path / "own", "own")).warnings


def test_evaluate_fn_computes_the_metrics_of_a_round(tmp_path):
    simulate(config(tmp_path / "run", "evaluated"))
    metrics = fedcomp.load(tmp_path / "run").metrics
    assert np.all(metrics["accuracy"] == 0.25) and np.all(metrics["fluency"] == 7)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("own", {}, "a train_fn"),
        ("lazy", {}, "data that is read batch by batch"),
        ("keywords", {}, "several model inputs"),
        ("keywords", {"optimizer": "adamw"}, "--optimizer adamw"),
    ],
)
def test_the_error_of_the_batched_engine_names_the_obstacle(tmp_path, name, options, why):
    with pytest.raises(ConfigError, match=f"--engine batched does not support {why}"):
        simulate(config(tmp_path / "run", name, engine="batched", **options))
