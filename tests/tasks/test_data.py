"""The forms of data that a task accepts, models given as modules, and tasks without an accuracy."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
from cases import for_each
from prometheus_client import generate_latest
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset

from fedcomp import RunConfig, Task
from fedcomp.errors import TaskError
from fedcomp.runs import load
from fedcomp.server.metrics import Metrics
from fedcomp.sim import simulate
from fedcomp.tasks import OBJECT, Data, initial_model
from fedcomp.tasks.check import check

X, Y = np.arange(24, dtype=np.float64).reshape(6, 4) / 10, np.array([0, 1, 2, 0, 1, 2], np.int32)
TENSORS = torch.tensor(X, dtype=torch.float32), torch.tensor(Y, dtype=torch.int64)


class Pairs(Dataset):
    """A dataset whose items are a tensor and a number, as in torchvision."""

    def __init__(self, change=lambda x, y: (x, y)):
        self.change = change

    def __len__(self):
        return len(Y)

    def __getitem__(self, i):
        return self.change(TENSORS[0][i], int(Y[i]))


def linear() -> nn.Module:
    return nn.Linear(4, 3)


FORMS = {
    "Data": Data(*TENSORS),
    "tensors": TENSORS,
    "arrays": (X, Y),
    "lists": [X.tolist(), Y.tolist()],
    "TensorDataset": TensorDataset(*TENSORS),
    "Dataset": Pairs(),
    "Subset": Subset(Pairs(), range(6)),
    "function of Data": lambda: Data(*TENSORS),
    "function of arrays": lambda: (X, Y),
    "function of a Dataset": Pairs,
}


@for_each("given", FORMS.values(), ids=FORMS)
def test_all_forms_of_data_give_the_same_batches(given):
    task = Task("toy", linear, given, given)
    check(task, 20)
    found = dataclasses.replace(task, name="other").train()
    batch = found.batch(torch.arange(6))
    assert torch.equal(batch.inputs, TENSORS[0]) and torch.equal(batch.targets, TENSORS[1])
    assert (batch.inputs.dtype, batch.targets.dtype) == (torch.float32, torch.int64)


@for_each(
    "given, says",
    [
        (
            (X,),
            r"train\(\): got tuple; expected a fedcomp Data, a pair \(inputs, targets\) of tensors or arrays, a torch Dataset,",
        ),
        ((X, Y[:3]), r"train\(\): got 6 inputs and 3 targets"),
        ((X, ["a"] * 6), r"train\(\) failed: .*TypeError"),
        (
            Pairs(lambda x, y: {"x": x}),
            r"the batch has the key 'x', but the model's forward has no argument of this name; .* give Task\(target='x'\)",
        ),
        (
            Pairs(lambda x, y: (x[: y + 1], y)),
            r"the first examples of train failed: .*stack expects each tensor to be equal size",
        ),
        (
            {"anna": (X, Y), "bert": (X[:0], Y[:0])},
            r"client 'bert' has no examples; leave the client out",
        ),
        (Subset(Pairs(), []), r"train\(\).inputs gave|no examples"),
    ],
)
def test_invalid_data_is_one_error_message(given, says):
    with pytest.raises(TaskError, match=f"^task 'toy': .*({says})"):
        check(Task("toy", linear, given, (X, Y)), 20)


def test_a_model_given_as_a_module_is_copied_with_its_weights():
    module = nn.Linear(4, 3)
    before = copy.deepcopy(module.state_dict())
    task = Task("toy", module, (X, Y), (X, Y))
    with torch.no_grad():
        module.weight.zero_()
    for seed in (0, 1):
        made = initial_model(task, seed)
        assert made is not module and all(
            torch.equal(before[name], value) for name, value in made.state_dict().items()
        )
    with torch.no_grad():
        made.weight.zero_()
    assert torch.equal(initial_model(task, 0).weight, before["weight"])


def absolute(outputs, targets):
    return (outputs - targets).abs().mean()


REGRESSION = Task(
    "line",
    lambda: nn.Linear(4, 1),
    (X, X[:, :1]),
    (X, X[:, :1]),
    F.mse_loss,
    None,
    metrics={"absolute": absolute},
)


def test_a_run_without_accuracy_records_its_loss_and_metrics(tmp_path):
    config = RunConfig(
        task=OBJECT + "line",
        clients=2,
        rounds=4,
        participation=1.0,
        eval_every=2,
        out=str(tmp_path / "run"),
    )
    metrics = Metrics()
    summary = simulate(config, metrics, REGRESSION)
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["accuracy"] for line in lines] == [None] * 4
    assert (
        [line["loss"] is None for line in lines]
        == ["metrics" not in line for line in lines]
        == [True, False, True, False]
    )
    run = load(tmp_path / "run")
    model = run.model(REGRESSION)
    with torch.no_grad():
        outputs, targets = model(REGRESSION.test().inputs), REGRESSION.test().targets
    assert run.metrics["absolute"][3] == pytest.approx(absolute(outputs, targets).item(), rel=1e-5)
    assert np.isnan(run.metrics["absolute"][[0, 2]]).all()
    assert (
        run.summary == summary
        and summary.accuracy is None
        and summary.metrics == {"absolute": run.metrics["absolute"][3]}
    )
    assert summary.loss == pytest.approx(F.mse_loss(outputs, targets).item(), rel=1e-5)
    text = generate_latest(metrics.registry).decode()
    assert f"fedcomp_loss {summary.loss}" in text


def test_files_have_no_key_for_metrics_if_the_task_has_none(tmp_path):
    task = Task("toy", linear, (X, Y), (X, Y))
    simulate(
        RunConfig(
            task=OBJECT + "toy", clients=2, rounds=1, participation=1.0, out=str(tmp_path / "run")
        ),
        task=task,
    )
    assert "metrics" not in json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert "metrics" not in json.loads((tmp_path / "run" / "summary.json").read_text())


@for_each(
    "change, says",
    [
        (
            {"accuracy": Task.accuracy},
            r"test\(\).targets: got float32 \[2, 1\]; expected integer labels; for other targets, give the task accuracy=None",
        ),
        (
            {"metrics": {"loss": absolute}},
            "metrics: got the name 'loss'; expected an identifier, such as mean_error, that is not a key of metrics.jsonl",
        ),
        ({"metrics": {"mean error": absolute}}, "metrics: got the name 'mean error'"),
        (
            {"metrics": {"each": lambda o, t: o - t}},
            r"metrics\['each'\]\(outputs, targets\): got float32 \[6, 1\]; expected a number",
        ),
        (
            {"metrics": {"broken": lambda o, t: 1 / 0}},
            r"metrics\['broken'\]\(outputs, targets\) failed: .*ZeroDivisionError",
        ),
    ],
)
def test_metrics_are_checked_before_the_first_round(change, says):
    check(REGRESSION, 20)
    with pytest.raises(TaskError, match=says):
        check(dataclasses.replace(REGRESSION, **change), 20)
